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
from kedge.store.rows import Floats, Ints, Rows

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
    known = facts.compared("param")
    if begins is None or (known and not facts.parted("param")):
        return None
    now = "the parameters were not measured in both"
    if known:
        now = "the parameters differ already"
    return PartingCause(
        "unseen",
        f"they diverge after step {begins}, in steps that were not measured in both",
        f"all measured values are {facts.equal_before()} up to step {begins}, "
        f"and at step {facts.step} {now}; "
        "to see where it begins, record both with --every 1 --budget none",
    )


def late(facts: FirstParting) -> PartingCause | None:
    """The cause if they parted before the first step that both have."""
    if not facts.parted("param") or facts.at_start:
        return None
    return PartingCause(
        "late",
        f"they diverge before step {facts.step}, the first that was measured in both",
        "its parameters differ already; "
        "to see where it begins, record both with --every 1 --budget none",
    )


def dtype_of_parameters(facts: FirstParting) -> PartingCause | None:
    """The cause if the same parameters have another dtype."""
    parted = facts.parted("param")
    other = facts.differing_dtypes(parted)
    if not other or not all(map(facts.fits_dtypes, parted)):
        return None
    a, b = facts.dtypes(other[0])
    chosen = facts.paths(other)
    known = facts.paths(facts.compared("param"))
    which = "parameters"
    if len(chosen) < len(known):
        which = f"parameters of {names_of_parameters(chosen, known)}"
    return PartingCause(
        "dtype",
        f"another dtype: {which} are {a} in A and {b} in B",
        f"{share_of(chosen, known)}, equal at step {facts.step} "
        f"up to the rounding of {coarser(a, b)}",
    )


def seed(facts: FirstParting) -> PartingCause | None:
    """The cause if all parameters with random initial values have other ones."""
    known = facts.compared("param")
    drawn = [i for i in known if len(facts.sites[i].a.shape) > 1]
    parted = set(facts.parted("param"))
    if not drawn or not parted.issuperset(drawn):
        return None
    ratios = facts.ratios(drawn)
    counts = np.array([facts.pair(i, "count")[0] for i in drawn])
    alike = np.abs(ratios - 1) <= DEVIATIONS / np.sqrt(2 * counts)
    differ = f"{len(parted)} of {counted(len(known), 'parameter')} differ at step {facts.step}"
    if alike.all():
        return PartingCause(
            "seed",
            "another seed: the parameters begin with other numbers of the same distribution",
            f"{differ}, among them all matrices, and their scales differ only by chance",
        )
    worst = int(np.argmax(np.abs(np.log(ratios)) * sqrt(2) * np.sqrt(counts)))
    name = facts.sites[drawn[worst]].text
    return PartingCause(
        "init",
        "another initialisation: the parameters begin with another scale",
        f"{differ}; {name} is {ratios[worst]:.3g} times as large in B",
    )


def layers(facts: FirstParting) -> PartingCause | None:
    """The cause if parameters have other initial values because of changed layers."""
    parted = facts.parted("param")
    if not parted:
        return None
    alignment = facts.comparison.alignment
    evidence = (
        f"so {_some_begin(facts, parted)} with other values: "
        "every layer shifts the random numbers of the next"
    )
    for same in alignment.modules:
        if same.a.parameters and same.b.parameters and not same.kept:
            change = change_between(same.a, same.b)
            return PartingCause("layer", f"a changed layer: {change}", evidence)

    sides = (("B", "A", alignment.only_b), ("A", "B", alignment.only_a))
    for side, other, only in sides:
        added = [module for module in only if module.parameters]
        if added:
            headline = f"changed layers: {side} has {names_of_modules(added)}, {other} does not"
            return PartingCause("layer", headline, evidence)
    return None


def parameters(facts: FirstParting) -> PartingCause | None:
    """The cause if some parameters have other initial values."""
    parted = facts.parted("param")
    if not parted:
        return None
    known = facts.compared("param")
    telling = []
    for i in known:
        fits_every_scale = np.isnan(facts.ratios([i])).all()  # as zeros do
        if i in parted or not fits_every_scale:
            telling.append(i)
    names = names_of_parameters(facts.paths(parted), facts.paths(telling))
    rest = "everything before is"
    if len(parted) < len(known):
        rest = "the others are"
    return PartingCause(
        "parameters",
        f"{_some_begin(facts, parted)} {_otherwise(facts, parted)}: {names}",
        f"at step {facts.step} {rest} {facts.equal_before()}",
    )


def _otherwise(facts: FirstParting, parted: list[int]) -> str:
    """Return words for the difference of some parameters: another scale, zeros, or other values."""
    sizes = np.array([facts.pair(i, "rms") for i in parted])
    if not sizes[:, 0].any():
        return "with zeros in A"
    if not sizes[:, 1].any():
        return "with zeros in B"
    statistics: tuple[Compared, ...] = ("rms", "min", "max")
    factor = _other_scale([facts.ratios(parted, statistic) for statistic in statistics])
    if factor is None:
        return "with other values"
    return f"{factor:.4g} times as large in B"


def _other_scale(ratios: Sequence[Floats]) -> float | None:
    """Return the factor that all ratios equal; None if they differ, or it is one."""
    factor = common_factor(np.concatenate(ratios), SCALED)
    if factor is None or abs(factor - 1) <= SCALED:
        return None
    return factor


def _some_begin(facts: FirstParting, parted: list[int]) -> str:
    known = counted(len(facts.compared("param")), "parameter")
    if len(parted) == 1:
        return f"1 of {known} begins"
    return f"{len(parted)} of {known} begin"


def batch_size(facts: FirstParting) -> PartingCause | None:
    """The cause if the batches have other sizes."""
    for i in _inputs(facts):
        a, b = facts.pair(i, "count")
        if a == b:
            continue
        same = facts.sites[i]
        evidence = f"at step {facts.step}"
        span = SpanOfDifference.of(facts, i)
        if not span.to_the_end:
            evidence = span.words
        if same.a.shape != same.b.shape:
            shape_a = text_of_shape(same.a.shape)
            shape_b = text_of_shape(same.b.shape)
            evidence = f"first shape {shape_a} in A, {shape_b} in B, {evidence}"
        return PartingCause(
            "batch",
            f"inputs of another size: {same.text} holds {a:,.0f} numbers in A and {b:,.0f} in B",
            evidence,
        )
    return None


def dtype_of_inputs(facts: FirstParting) -> PartingCause | None:
    """The cause if the same inputs have another dtype."""
    other = facts.differing_dtypes(_inputs(facts))
    if not other or not all(map(facts.fits_dtypes, other)):
        return None
    name = facts.sites[other[0]].text
    a, b = facts.dtypes(other[0])
    return PartingCause(
        "dtype",
        f"another dtype: inputs are {a} in A and {b} in B",
        f"{name} is equal up to the rounding of {coarser(a, b)}, at step {facts.step}",
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
        comparison = facts.comparison
        steps = comparison.steps[facts.column :]
        compared = ~np.isnan(comparison.apart[site, facts.column :])
        parted = comparison.parted[site, facts.column :]
        return SpanOfDifference(steps[compared & parted], steps[compared])

    @property
    def to_the_end(self) -> bool:
        """Whether it differs in every step from the first difference on, and in more than one."""
        return len(self.steps) == len(self.compared) > 1

    @property
    def words(self) -> str:
        """Words for the steps, and for what comes after them."""
        first = int(self.steps[0])
        last = int(self.steps[-1])
        if self.to_the_end:
            return f"from step {first} on"
        if len(self.steps) > 1:
            between = counted(int(np.sum(self.compared <= last)), "compared step")
            when = f"in {len(self.steps)} of {between} from step {first} to {last}"
        else:
            when = f"at step {first} alone"

        after = int(np.sum(self.compared > last))
        if after == 0:
            return f"{when}, the last that was compared"
        if after == 1:
            return f"{when}; 1 compared step after it has equal inputs"
        return f"{when}; {counted(after, 'compared step')} after it have equal inputs"


def data(facts: FirstParting) -> PartingCause | None:
    """The cause if the inputs differ, as far as the steps show it in which they do."""
    inputs = _inputs(facts)
    if not inputs:
        return _unrecorded(facts)
    site = inputs[0]
    span = SpanOfDifference.of(facts, site)
    evidence = f"the inputs differ ({facts.sites[site].text}) {span.words}"
    known = facts.compared("param")
    if known:
        evidence += f", while all {len(known)} parameters are {facts.equal_before()}"
        if not span.to_the_end:
            evidence += f" until step {facts.step}"

    ahead = _batches_ahead(facts, site, span)
    if ahead:
        side = "B" if ahead > 0 else "A"
        headline = (
            f"the same batches, but {side} is {counted(abs(ahead), 'step')} ahead "
            f"from step {facts.step} on: it left some out"
        )
        return PartingCause("order", headline, evidence)
    if _has_same_batches(facts, site, span):
        headline = "another order of the data: the same batches in another sequence"
        return PartingCause("order", headline, evidence)
    steps = _steps_to_same_total(facts, site)
    if steps is not None:
        headline = "another order of the data: the same samples in other batches"
        evidence += f"; in {counted(steps, 'step')} they add up to the same in both"
        return PartingCause("order", headline, evidence)

    factor = _scale_of_inputs(facts, site, span)
    if factor is not None:
        headline = f"another scale of the data: the inputs are {factor:.4g} times as large in B"
        if not span.to_the_end:
            headline += f" {span.words.partition(';')[0].partition(',')[0]}"
        return PartingCause("data", headline, evidence)
    parting = facts.parting(site)
    name = _NAMES[parting.statistic]
    evidence += f"; their {name} is {parting.a:.4g} in A and {parting.b:.4g} in B"
    if span.to_the_end:
        headline = "other data, or the same in another order"
    elif len(span.steps) == 1:
        headline = f"other data in one batch, that of step {facts.step}"
    else:
        headline = f"other data in {len(span.steps)} batches, not in all"
    return PartingCause("data", headline, evidence)


_NAMES: dict[Compared, str] = {
    "rms": "root mean square",
    "max": "largest value",
    "min": "smallest value",
    "mean": "mean",
    "zero": "share of zeros",
    "nonfinite": "number of values that are not finite",
    "count": "size",
}


def _scale_of_inputs(
    facts: FirstParting,
    site: int,
    span: SpanOfDifference,
) -> float | None:
    """Return the factor by which an input is larger in B wherever it differs; None without one."""
    columns = np.searchsorted(facts.comparison.steps, span.steps).tolist()
    statistics: tuple[Compared, ...] = ("rms", "min", "max", "mean")
    ratios = []
    for name in statistics:
        ratios += [facts.ratios([site], name, column) for column in columns]
    return _other_scale(ratios)


def _unrecorded(facts: FirstParting) -> PartingCause | None:
    """The cause if the output of an embedding differs: its whole numbers are not measured."""
    same = facts.first.same
    if same.kind != "out" or "Embedding" not in same.module.a.type or not same.module.kept:
        return None
    return PartingCause(
        "data",
        "other data, or the same in another order",
        f"{same.text} differs from step {facts.step} on, while its parameters are "
        f"{facts.equal_before()}; the indices that it looks up are not measured",
    )


def _inputs(facts: FirstParting) -> list[int]:
    """Return the inputs from outside that differ, if nothing in the data's flow does before."""
    recording = facts.comparison.a
    inputs = [i for i in facts.parted("in") if is_from_outside(recording, facts.sites[i])]
    first = min(facts.parted("in", "out"), default=-1)
    if first not in inputs:
        return []
    return inputs


def _rows(facts: FirstParting, site: int) -> tuple[Rows, Rows]:
    same = facts.sites[site]
    return facts.comparison.a.rows(same.a), facts.comparison.b.rows(same.b)


def _batches(rows: Rows, begin: int) -> dict[int, Batch]:
    """Return the batches from a step on, by their steps: each as its size and its sums."""
    values = zip(rows.count.tolist(), rows.sum.tolist(), rows.sumsq.tolist(), strict=True)
    by_step = zip(rows.step.tolist(), values, strict=True)
    return {step: batch for step, batch in by_step if step >= begin}


def _has_same_batches(facts: FirstParting, site: int, span: SpanOfDifference) -> bool:
    """Whether the batches of the steps that differ are the same on both sides, or nearly all."""
    counts = []
    for rows in _rows(facts, site):
        batches = _batches(rows, facts.step)
        counts.append(Counter(batches[step] for step in span.steps.tolist() if step in batches))
    total = max(counts[0].total(), counts[1].total())
    needed = float(total)
    if total >= LEAST_BATCHES:
        needed = SAME_BATCHES * total
    return total > 1 and (counts[0] & counts[1]).total() >= needed


def _batches_ahead(facts: FirstParting, site: int, span: SpanOfDifference) -> int:
    """Return by how many steps B is ahead in a sequence of the same batches.

    The number is less than 0 if A is, and 0 without such a sequence.
    """
    if len(span.steps) < LEAST_BATCHES or not span.to_the_end:
        return 0
    a, b = (_batches(rows, facts.step) for rows in _rows(facts, site))
    for distance in range(1, MOST_AHEAD + 1):
        if _are_apart(b, a, distance):
            return distance
        if _are_apart(a, b, distance):
            return -distance
    return 0


def _are_apart(one: dict[int, Batch], other: dict[int, Batch], distance: int) -> bool:
    """Whether the batches of one side come so many steps later in the other."""
    both = [step for step in one if step + distance in other]
    same = sum(one[step] == other[step + distance] for step in both)
    return len(both) >= LEAST_BATCHES and same >= SAME_BATCHES * len(both)


def _steps_to_same_total(facts: FirstParting, site: int) -> int | None:
    """Return the number of steps after which all inputs have the same sums and sizes in both.

    They are added up from the first difference on. Different data seldom are the same then: where
    sums or sizes of single batches are equal too, as those of one-hot vectors, nothing is
    concluded.
    """
    one, other = _rows(facts, site)
    begin = int(np.searchsorted(one.step, facts.step))
    begin_other = int(np.searchsorted(other.step, facts.step))

    # Only steps without a gap in either can be added up.
    many = min(len(one.step) - begin, len(other.step) - begin_other)
    steps = facts.step + np.arange(many)
    in_one = one.step[begin : begin + many] == steps
    in_other = other.step[begin_other : begin_other + many] == steps
    many = int(np.argmin([*(in_one & in_other), False]))
    part = slice(begin, begin + many)
    part_other = slice(begin_other, begin_other + many)

    count = np.cumsum(one.count[part])
    same_counts = count == np.cumsum(other.count[part_other])
    size = np.cumsum(one.sumsq[part])
    # Totals differ far more by chance.
    near = np.minimum(SAME_TOTALS, 1e-3 / np.sqrt(np.maximum(count, 1)))
    far = np.abs(np.cumsum(one.sum[part]) - np.cumsum(other.sum[part_other]))
    same_sums = far <= near * np.sqrt(count * size)
    same_sizes = np.abs(size - np.cumsum(other.sumsq[part_other])) <= near * size

    found = np.flatnonzero(same_sums & same_sizes & same_counts)
    if not len(found) or found[0] == 0:
        return None
    first = int(found[0])
    if same_sums[:first].any() or same_sizes[:first].any():
        return None
    return first + 1
