"""Causes that lie before the first forward pass that differs: parameters and data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import numpy as np

from kedge.compare.first_parting import FirstParting, PartingCause, common_factor, is_from_outside
from kedge.compare.measures import Compared, coarser
from kedge.compare.parameter_names import names_of_parameters, share_of
from kedge.compare.wording import change_between, names_of_modules, text_of_shape
from kedge.short_text import counted
from kedge.store.rows import Floats, Ints

#: Norms of n random numbers differ by 1 / sqrt(2 n) of themselves, one standard deviation; this
#: number is allowed.
DEVIATIONS = 6
#: Batches are the same in another order if this share of their sums is.
SAME_BATCHES = 0.9
#: The spread of the factors of parameters that begin with another scale.
SCALED = 1e-3
#: Totals of the same numbers in another order are equal up to this, relative to their size.
SAME_TOTALS = 1e-7
#: Of fewer batches than this all must be the same.
LEAST_BATCHES = 5
#: The most steps by which one run may be ahead with the same batches.
MOST_AHEAD = 20

Batch = tuple[float, float, float]


def unseen(facts: FirstParting) -> PartingCause | None:
    """The cause if they part in steps that one of them did not measure."""
    begins = facts.earlier("param")
    if begins is None or (facts.compared("param") and not facts.parted("param")):
        return None
    now = (
        "the parameters differ already"
        if facts.compared("param")
        else "the parameters were not measured in both"
    )
    return PartingCause(
        "unseen",
        f"they diverge after step {begins}, in steps that were not measured in both",
        f"all measured values are {facts.equal_before()} up to step {begins}, and at step {facts.step} {now}; "
        "to see where it begins, record both with --every 1 --budget none",
    )


def late(facts: FirstParting) -> PartingCause | None:
    """The cause if they parted before the first step that both have."""
    if not facts.parted("param") or facts.at_start:
        return None
    return PartingCause(
        "late",
        f"they diverge before step {facts.step}, the first that was measured in both",
        "its parameters differ already; to see where it begins, record both with --every 1 --budget none",
    )


def dtype_of_parameters(facts: FirstParting) -> PartingCause | None:
    """The cause if the same parameters have another dtype."""
    other = facts.differing_dtypes(facts.parted("param"))
    if not other or not all(facts.fits_dtypes(facts.parting(i)) for i in facts.parted("param")):
        return None
    same = facts.sites[other[0]]
    chosen, known = facts.paths(other), facts.paths(facts.compared("param"))
    which = f" of {names_of_parameters(chosen, known)}" if len(chosen) < len(known) else ""
    return PartingCause(
        "dtype",
        f"another dtype: parameters{which} are {same.a.dtype} in A and {same.b.dtype} in B",
        f"{share_of(chosen, known)}, equal at step {facts.step} up to the rounding of "
        f"{coarser(same.a.dtype, same.b.dtype)}",
    )


def seed(facts: FirstParting) -> PartingCause | None:
    """The cause if all parameters with random initial values have other ones."""
    drawn = [i for i in facts.compared("param") if len(facts.sites[i].a.shape) > 1]
    parted = set(facts.parted("param"))
    if not drawn or not parted.issuperset(drawn):
        return None
    ratios = facts.ratios(drawn)
    counts = np.array([facts.comparison.value(i, facts.column, "count", "a") for i in drawn])
    alike = np.abs(ratios - 1) <= DEVIATIONS / np.sqrt(2 * counts)
    n = f"{len(parted)} of {counted(len(facts.compared('param')), 'parameter')}"
    if alike.all():
        return PartingCause(
            "seed",
            "another seed: the parameters begin with other numbers of the same distribution",
            f"{n} differ at step {facts.step}, among them all matrices, and their scales differ only by chance",
        )
    worst = int(np.argmax(np.abs(np.log(ratios)) * sqrt(2) * np.sqrt(counts)))
    return PartingCause(
        "init",
        "another initialisation: the parameters begin with another scale",
        f"{n} differ at step {facts.step}; {facts.sites[drawn[worst]].text} is {ratios[worst]:.3g} times as large in B",
    )


def layers(facts: FirstParting) -> PartingCause | None:
    """The cause if parameters have other initial values because of changed layers."""
    parted = facts.parted("param")
    if not parted:
        return None
    alignment = facts.comparison.alignment
    evidence = f"so {_some_begin(facts, parted)} with other values: every layer shifts the random numbers of the next"
    for same in alignment.modules:
        if same.a.parameters and same.b.parameters and not same.kept:
            return PartingCause(
                "layer", f"a changed layer: {change_between(same.a, same.b)}", evidence
            )
    added = {
        side: [m for m in only if m.parameters]
        for side, only in (("A", alignment.only_a), ("B", alignment.only_b))
    }
    for side, other in (("B", "A"), ("A", "B")):
        if added[side]:
            return PartingCause(
                "layer",
                f"changed layers: {side} has {names_of_modules(added[side])}, {other} does not",
                evidence,
            )
    return None


def parameters(facts: FirstParting) -> PartingCause | None:
    """The cause if some parameters have other initial values."""
    parted = facts.parted("param")
    if not parted:
        return None
    known = facts.compared("param")
    telling = [
        i for i in known if i in parted or not np.isnan(facts.ratios([i])).all()
    ]  # zeros fit every scale
    names = names_of_parameters(facts.paths(parted), facts.paths(telling))
    return PartingCause(
        "parameters",
        f"{_some_begin(facts, parted)} {_otherwise(facts, parted)}: {names}",
        f"at step {facts.step} {'the others are' if len(parted) < len(known) else 'everything before is'} "
        f"{facts.equal_before()}",
    )


def _otherwise(facts: FirstParting, parted: list[int]) -> str:
    """Return words for the difference of some parameters: another scale, zeros, or other values."""
    for side in ("a", "b"):
        if not any(facts.comparison.value(i, facts.column, "rms", side) for i in parted):
            return f"with zeros in {side.upper()}"
    factor = _other_scale([facts.ratios(parted, statistic) for statistic in ("rms", "min", "max")])
    return "with other values" if factor is None else f"{factor:.4g} times as large in B"


def _other_scale(ratios: Sequence[Floats]) -> float | None:
    """Return the factor that all ratios equal; None if they differ, or it is one."""
    factor = common_factor(np.concatenate(ratios), SCALED)
    return None if factor is None or abs(factor - 1) <= SCALED else factor


def _some_begin(facts: FirstParting, parted: list[int]) -> str:
    n = counted(len(facts.compared("param")), "parameter")
    return f"{len(parted)} of {n} begin{'s' if len(parted) == 1 else ''}"


def batch_size(facts: FirstParting) -> PartingCause | None:
    """The cause if the batches have other sizes."""
    for i in _inputs(facts):
        a, b = (facts.comparison.value(i, facts.column, "count", side) for side in ("a", "b"))
        if a != b:
            same, when = facts.sites[i], f"at step {facts.step}"
            span = SpanOfDifference.of(facts, i)
            if not span.to_the_end:
                when = span.words
            first = ""
            if same.a.shape != same.b.shape:
                first = f"first shape {text_of_shape(same.a.shape)} in A, {text_of_shape(same.b.shape)} in B, "
            return PartingCause(
                "batch",
                f"inputs of another size: {same.text} holds {a:,.0f} numbers in A and {b:,.0f} in B",
                f"{first}{when}",
            )
    return None


def dtype_of_inputs(facts: FirstParting) -> PartingCause | None:
    """The cause if the same inputs have another dtype."""
    other = facts.differing_dtypes(_inputs(facts))
    if not other or not all(facts.fits_dtypes(facts.parting(i)) for i in other):
        return None
    same = facts.sites[other[0]]
    return PartingCause(
        "dtype",
        f"another dtype: inputs are {same.a.dtype} in A and {same.b.dtype} in B",
        f"{same.text} is equal up to the rounding of {coarser(same.a.dtype, same.b.dtype)}{_at(facts)}",
    )


@dataclass(frozen=True)
class SpanOfDifference:
    """The steps in which an input differs, of those from the first difference on.

    Attributes:
        steps: The steps in which it differs.
        compared: The steps in which it was compared.
    """

    steps: Ints
    compared: Ints

    @staticmethod
    def of(facts: FirstParting, site: int) -> SpanOfDifference:
        """Return the span of one input."""
        columns = (
            np.flatnonzero(~np.isnan(facts.comparison.apart[site, facts.column :])) + facts.column
        )
        steps = facts.comparison.steps
        return SpanOfDifference(
            steps[columns[facts.comparison.parted[site, columns]]], steps[columns]
        )

    @property
    def to_the_end(self) -> bool:
        """Whether it differs in every step from the first difference on, and in more than one."""
        return len(self.steps) == len(self.compared) > 1

    @property
    def words(self) -> str:
        """Words for the steps, and for what comes after them."""
        first, last = int(self.steps[0]), int(self.steps[-1])
        after = int(np.sum(self.compared > last))
        if self.to_the_end:
            return f"from step {first} on"
        if len(self.steps) > 1:
            between = counted(int(np.sum(self.compared <= last)), "compared step")
            when = f"in {len(self.steps)} of {between} from step {first} to {last}"
        else:
            when = f"at step {first} alone"
        if not after:
            return f"{when}, the last that was compared"
        return f"{when}; {counted(after, 'compared step')} after it {'has' if after == 1 else 'have'} equal inputs"


def data(facts: FirstParting) -> PartingCause | None:
    """The cause if the inputs differ, as far as the steps show it in which they do."""
    inputs = _inputs(facts)
    if not inputs:
        return _unrecorded(facts)
    site, known = inputs[0], facts.compared("param")
    span, parting = SpanOfDifference.of(facts, site), facts.parting(site)
    evidence = f"the inputs differ ({facts.sites[site].text}) {span.words}"
    if known:
        evidence += f", while all {len(known)} parameters are {facts.equal_before()}"
        if not span.to_the_end:
            evidence += f" until step {facts.step}"
    ahead = _batches_ahead(facts, site, span)
    if ahead:
        which, side = counted(abs(ahead), "step"), "B" if ahead > 0 else "A"
        headline = f"the same batches, but {side} is {which} ahead from step {facts.step} on: it left some out"
        return PartingCause("order", headline, evidence)
    if _has_same_batches(facts, site, span):
        return PartingCause(
            "order", "another order of the data: the same batches in another sequence", evidence
        )
    steps = _steps_to_same_total(facts, site)
    if steps is not None:
        evidence += f"; in {counted(steps, 'step')} they add up to the same in both"
        return PartingCause(
            "order", "another order of the data: the same samples in other batches", evidence
        )
    factor = _scale_of_inputs(facts, site, span)
    if factor is not None:
        when = "" if span.to_the_end else f" {span.words.partition(';')[0].partition(',')[0]}"
        headline = (
            f"another scale of the data: the inputs are {factor:.4g} times as large in B{when}"
        )
        return PartingCause("data", headline, evidence)
    evidence += (
        f"; their {_NAMES[parting.statistic]} is {parting.a:.4g} in A and {parting.b:.4g} in B"
    )
    if span.to_the_end:
        return PartingCause("data", "other data, or the same in another order", evidence)
    if len(span.steps) == 1:
        return PartingCause("data", f"other data in one batch, that of step {facts.step}", evidence)
    return PartingCause("data", f"other data in {len(span.steps)} batches, not in all", evidence)


_NAMES: dict[Compared, str] = {
    "rms": "root mean square",
    "max": "largest value",
    "min": "smallest value",
    "mean": "mean",
    "zero": "share of zeros",
    "nonfinite": "number of values that are not finite",
    "count": "size",
}


def _scale_of_inputs(facts: FirstParting, site: int, span: SpanOfDifference) -> float | None:
    """Return the factor by which an input is larger in B wherever it differs; None without one."""
    columns = np.searchsorted(facts.comparison.steps, span.steps)
    statistics: tuple[Compared, ...] = ("rms", "min", "max", "mean")
    return _other_scale(
        [facts.ratios([site], name, int(step)) for name in statistics for step in columns]
    )


def _unrecorded(facts: FirstParting) -> PartingCause | None:
    """The cause if the output of an embedding differs: its whole numbers are not measured."""
    same = facts.first.same
    if same.kind != "out" or "Embedding" not in same.module.a.type or not same.module.kept:
        return None
    return PartingCause(
        "data",
        "other data, or the same in another order",
        f"{same.text} differs from step {facts.step} on, while its parameters are {facts.equal_before()}; "
        "the indices that it looks up are not measured",
    )


def _inputs(facts: FirstParting) -> list[int]:
    """Return the inputs from outside that differ, if nothing in the data's flow differs before them."""
    inputs = [i for i in facts.parted("in") if is_from_outside(facts.comparison.a, facts.sites[i])]
    first = min(facts.parted("in", "out"), default=-1)
    return inputs if first in inputs else []


def _batches(facts: FirstParting, site: int) -> tuple[dict[int, Batch], dict[int, Batch]]:
    """Return the batches of both sides from the first difference on, by their steps: each as its size and its sums."""
    same, found = facts.sites[site], []
    for recording, own in ((facts.comparison.a, same.a), (facts.comparison.b, same.b)):
        rows = recording.rows(own)
        values = zip(
            rows.step.tolist(),
            rows.count.tolist(),
            rows.sum.tolist(),
            rows.sumsq.tolist(),
            strict=True,
        )
        found.append(
            {
                step: (count, total, squares)
                for step, count, total, squares in values
                if step >= facts.step
            }
        )
    return found[0], found[1]


def _has_same_batches(facts: FirstParting, site: int, span: SpanOfDifference) -> bool:
    """Whether the batches of the steps that differ are the same on both sides, nearly all of them."""
    counts = [
        Counter(own[step] for step in span.steps.tolist() if step in own)
        for own in _batches(facts, site)
    ]
    total = max(sum(count.values()) for count in counts)
    shared = sum((counts[0] & counts[1]).values())
    return total > 1 and shared >= (total if total < LEAST_BATCHES else SAME_BATCHES * total)


def _batches_ahead(facts: FirstParting, site: int, span: SpanOfDifference) -> int:
    """Return by how many steps B is ahead in a sequence of the same batches; less than 0 if A is, and 0 without that."""
    if len(span.steps) < LEAST_BATCHES or not span.to_the_end:
        return 0
    a, b = _batches(facts, site)
    for distance in range(1, MOST_AHEAD + 1):
        for ahead, one, other in ((distance, b, a), (-distance, a, b)):
            pairs = [
                (one[step], other[step + distance]) for step in one if step + distance in other
            ]
            if len(pairs) >= LEAST_BATCHES and sum(x == y for x, y in pairs) >= SAME_BATCHES * len(
                pairs
            ):
                return ahead
    return 0


def _steps_to_same_total(facts: FirstParting, site: int) -> int | None:
    """Return the number of steps after which all inputs since the first difference have the same sums and sizes.

    Different data seldom do: where sums or sizes of single batches are equal too, as those of
    one-hot vectors, nothing is concluded.
    """
    same = facts.sites[site]
    rows = [facts.comparison.a.rows(same.a), facts.comparison.b.rows(same.b)]
    places = [np.flatnonzero(own.step >= facts.step) for own in rows]
    n = min(map(len, places))
    a, b = places[0][:n], places[1][:n]
    steps = np.arange(facts.step, facts.step + n)
    n = int(np.argmin([*((rows[0].step[a] == steps) & (rows[1].step[b] == steps)), False]))
    counts, sums, sizes = (
        [np.cumsum(getattr(own, name)[where[:n]]) for own, where in zip(rows, (a, b), strict=True)]
        for name in ("count", "sum", "sumsq")
    )
    near = np.minimum(
        SAME_TOTALS, 1e-3 / np.sqrt(np.maximum(counts[0], 1))
    )  # far less than totals differ by chance
    same_sums = np.abs(sums[0] - sums[1]) <= near * np.sqrt(counts[0] * sizes[0])
    same_sizes = np.abs(sizes[0] - sizes[1]) <= near * sizes[0]
    found = np.flatnonzero(same_sums & same_sizes & (counts[0] == counts[1]))
    if (
        not len(found)
        or same_sums[: found[0]].any()
        or same_sizes[: found[0]].any()
        or not found[0]
    ):
        return None
    return int(found[0]) + 1


def _at(facts: FirstParting) -> str:
    return f", at step {facts.step}"
