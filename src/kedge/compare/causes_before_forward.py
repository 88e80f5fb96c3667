"""Causes that lie before the first forward pass that differs: parameters and data."""

from __future__ import annotations

from collections import Counter
from math import sqrt

import numpy as np

from kedge.compare.first_parting import Cause, Facts, is_from_outside
from kedge.compare.measures import coarser
from kedge.compare.wording import shaped, told_change, told_modules
from kedge.numbers import counted

#: Norms of n random numbers differ by 1 / sqrt(2 n) of themselves, one standard deviation; this many are allowed.
DEVIATIONS = 6
#: Batches are the same ones in another order if so large a share of their sums are.
SAME_BATCHES = 0.9
#: Fewer batches than this show no order.
LEAST_BATCHES = 5


def unseen(facts: Facts) -> Cause | None:
    """They part in steps that one of them did not measure."""
    begins = facts.earlier("param")
    if begins is None or (facts.compared("param") and not facts.parted("param")):
        return None
    now = "the parameters differ already" if facts.compared("param") else "the parameters were not measured in both"
    return Cause(
        "unseen",
        f"they part after step {begins}, in steps that were not measured in both",
        f"all that was measured is {facts.equal_before()} up to step {begins}, and at step {facts.step} {now}; "
        "to see where it begins, record both with --every 1 --budget none",
    )


def late(facts: Facts) -> Cause | None:
    """They have parted before the first step that both have."""
    if not facts.parted("param") or facts.at_start:
        return None
    return Cause(
        "late",
        f"they part before step {facts.step}, the first that was measured in both",
        "its parameters differ already; to see where it begins, record both with --every 1 --budget none",
    )


def dtype_of_parameters(facts: Facts) -> Cause | None:
    """The same parameters in another dtype."""
    other = facts.differing_dtypes(facts.parted("param"))
    if not other or not all(facts.fits_dtypes(facts.parting(i)) for i in facts.parted("param")):
        return None
    same = facts.sites[other[0]]
    many = f"{len(other)} of {counted(len(facts.compared('param')), 'parameter')}"
    return Cause(
        "dtype",
        f"another dtype: parameters are {same.a.dtype} in A and {same.b.dtype} in B",
        f"{many}, equal at step {facts.step} but for what {coarser(same.a.dtype, same.b.dtype)} rounds off",
    )


def seed(facts: Facts) -> Cause | None:
    """All parameters that begin at random begin otherwise."""
    drawn = [i for i in facts.compared("param") if len(facts.sites[i].a.shape) > 1]
    parted = set(facts.parted("param"))
    if not drawn or not parted.issuperset(drawn):
        return None
    ratios = facts.ratios(drawn)
    counts = np.array([facts.comparison.value(i, facts.column, "count", "a") for i in drawn])
    alike = np.abs(ratios - 1) <= DEVIATIONS / np.sqrt(2 * counts)
    n = f"{len(parted)} of {counted(len(facts.compared('param')), 'parameter')}"
    if alike.all():
        return Cause(
            "seed",
            "another seed: the parameters begin with other numbers of the same distribution",
            f"{n} differ at step {facts.step}, among them all matrices, and their sizes are as near as chance brings them",
        )
    worst = int(np.argmax(np.abs(np.log(ratios)) * sqrt(2) * np.sqrt(counts)))
    return Cause(
        "init",
        "another initialisation: the parameters begin with numbers of another size",
        f"{n} differ at step {facts.step}; {facts.sites[drawn[worst]].text} is {ratios[worst]:.3g} times as large in B",
    )


def layers(facts: Facts) -> Cause | None:
    """The parameters begin otherwise because there are others than before."""
    parted = facts.parted("param")
    if not parted:
        return None
    alignment = facts.comparison.alignment
    evidence = f"so {_some_begin(facts, parted)} with other values: what is drawn at random shifts with every layer"
    for same in alignment.modules:
        if same.a.parameters and same.b.parameters and not same.kept:
            return Cause("layer", f"a changed layer: {told_change(same.a, same.b)}", evidence)
    added = {
        side: [m for m in only if m.parameters] for side, only in (("A", alignment.only_a), ("B", alignment.only_b))
    }
    for side, other in (("B", "A"), ("A", "B")):
        if added[side]:
            return Cause("layer", f"changed layers: {side} has {told_modules(added[side])}, {other} has not", evidence)
    return None


def parameters(facts: Facts) -> Cause | None:
    """Some parameters begin otherwise."""
    parted = facts.parted("param")
    if not parted:
        return None
    names = ", ".join(facts.sites[i].text for i in parted[:3]) + (" and others" if len(parted) > 3 else "")
    return Cause(
        "parameters",
        f"{_some_begin(facts, parted)} with other values",
        f"these are {names}, at step {facts.step}; the others are {facts.equal_before()}",
    )


def _some_begin(facts: Facts, parted: list[int]) -> str:
    n = counted(len(facts.compared("param")), "parameter")
    return f"{len(parted)} of {n} begin{'s' if len(parted) == 1 else ''}"


def batch_size(facts: Facts) -> Cause | None:
    """The batches have other sizes."""
    for i in _inputs(facts):
        a, b = (facts.comparison.value(i, facts.column, "count", side) for side in ("a", "b"))
        if a != b:
            same = facts.sites[i]
            return Cause(
                "batch",
                f"inputs of another size: {same.text} holds {a:,.0f} numbers in A and {b:,.0f} in B",
                f"first shape {shaped(same.a.shape)} in A, {shaped(same.b.shape)} in B{_at(facts)}",
            )
    return None


def dtype_of_inputs(facts: Facts) -> Cause | None:
    """The same inputs in another dtype."""
    other = facts.differing_dtypes(_inputs(facts))
    if not other or not all(facts.fits_dtypes(facts.parting(i)) for i in other):
        return None
    same = facts.sites[other[0]]
    return Cause(
        "dtype",
        f"another dtype: inputs are {same.a.dtype} in A and {same.b.dtype} in B",
        f"{same.text} is equal but for what {coarser(same.a.dtype, same.b.dtype)} rounds off{_at(facts)}",
    )


def data(facts: Facts) -> Cause | None:
    """The inputs are other ones."""
    inputs = _inputs(facts)
    if not inputs:
        return _unrecorded(facts)
    same, known = facts.sites[inputs[0]], facts.compared("param")
    evidence = f"the inputs differ ({same.text}) from step {facts.step} on"
    if known:
        evidence += f", while all {len(known)} parameters are {facts.equal_before()}"
    shared = _shared_batches(facts, inputs[0])
    if shared >= SAME_BATCHES:
        return Cause("order", "another order of the data: the same batches, not one after the other", evidence)
    return Cause("data", "other data, or the same in another order", evidence)


def _unrecorded(facts: Facts) -> Cause | None:
    """Tell of a module that looks up what whole numbers stand for: those are not measured."""
    same = facts.first.same
    if same.kind != "out" or "Embedding" not in same.module.a.type or not same.module.kept:
        return None
    return Cause(
        "data",
        "other data, or the same in another order",
        f"{same.text} differs from step {facts.step} on, while its parameters are {facts.equal_before()}; "
        "the whole numbers that it looks up are not measured",
    )


def _inputs(facts: Facts) -> list[int]:
    """Give the inputs from outside that part, if nothing in the data's flow parts before them."""
    inputs = [i for i in facts.parted("in") if is_from_outside(facts.comparison.a, facts.sites[i])]
    first = min(facts.parted("in", "out"), default=-1)
    return inputs if first in inputs else []


def _shared_batches(facts: Facts, site: int) -> float:
    """Tell which share of the batches of one side the other has too, by their sums."""
    comparison, same = facts.comparison, facts.sites[site]
    sums = [
        Counter(recording.rows(text).sum[np.isin(recording.rows(text).step, comparison.steps)].tolist())
        for recording, text in ((comparison.a, same.a), (comparison.b, same.b))
    ]
    total = max(sum(count.values()) for count in sums)
    return sum((sums[0] & sums[1]).values()) / total if total >= LEAST_BATCHES else 0.0


def _at(facts: Facts) -> str:
    return f", at step {facts.step}"
