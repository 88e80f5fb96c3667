"""Relations of sizes: the ranges of inputs, losses, activations, gradients and updates.

# Note [Ranges]
Sizes are compared as powers of ten. At the beginning, runs with other seeds differ only by chance:
the medians of the first measured steps are compared. Later, a run has to stay within the range that
the good run had in the same steps, with a margin: the median of its last quarter is asked. The
margins were measured on healthy repetitions by benchmarks/against.py: each is about one and a half
times the largest distance that was seen there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kedge.compare.against.run_pair import LEAST_STEPS, Departure, RunPair, values_of
from kedge.compare.alignment.sites import SameSite
from kedge.compare.first_parting import is_from_outside
from kedge.rules.recorded.evaluated import size_in_training
from kedge.rules.recorded.once import once
from kedge.rules.recorded.optimizers import events_of
from kedge.short_text import compact, counted, listed
from kedge.store.events import EvaluatedOutputsEvent, OutputSize
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Floats, Ints

#: The steps of the beginning.
BEGINNING = 5
#: The least size that is compared; smaller ones count as zero.
LEAST = 1e-12
#: The margin of outputs in evaluation, relative to those in training, in powers of ten.
EVALUATED = 0.9
#: The number of powers of ten by which a loss has to fall to count as falling.
FALLS = 0.2
#: The share of the good run's fall that a run has to reach in the same steps.
FELL = 0.3


@dataclass(frozen=True)
class Scale:
    """Sizes of one kind.

    Attributes:
        kind: The kind of the departure.
        what: Words for the values.
        sites: The kinds of the sites.
        at_first: The margin at the beginning, in powers of ten.
        later: The margin later; None if they are not asked later.
        remedy: What to look at.
    """

    kind: str
    what: str
    sites: tuple[str, ...]
    at_first: float
    later: float | None
    remedy: str


INPUTS = Scale(
    "inputs",
    "inputs",
    ("in",),
    0.2,
    None,
    "Look how the data are scaled before the model gets them.",
)
SCALES = (
    Scale(
        "loss",
        "losses",
        ("loss",),
        0.3,
        None,
        "Look how the loss is reduced and scaled, and at the targets.",
    ),
    Scale(
        "activations",
        "outputs",
        ("out",),
        0.9,
        0.6,
        "Look at the initial values of this module and at what it gets.",
    ),
    Scale(
        "gradients",
        "gradients",
        ("param.grad",),
        1.2,
        0.8,
        "Look at the scale of the loss, and at what stands between it and this parameter.",
    ),
    Scale(
        "updates",
        "updates, relative to the weights",
        ("update",),
        1.2,
        0.8,
        "Look at the learning rate and the settings of the optimizer.",
    ),
)


@dataclass(frozen=True)
class SizePair:
    """The sizes of one site in both runs, as powers of ten.

    Attributes:
        same: The site.
        good_steps: The steps in which the good run measured it.
        good: Its sizes there.
        steps: Those of the other run, up to the good run's last one.
        here: Its sizes there.
    """

    same: SameSite
    good_steps: Ints
    good: Floats
    steps: Ints
    here: Floats

    @property
    def at_first(self) -> tuple[float, float]:
        """The medians of the beginning, in the good run and here."""
        return float(np.median(self.good[:BEGINNING])), float(np.median(self.here[:BEGINNING]))

    @property
    def later(self) -> float:
        """The median of the last quarter here."""
        return float(np.median(self.here[-max(LEAST_STEPS, len(self.here) // 4) :]))

    @property
    def beyond(self) -> float:
        """How far that lies outside of the good run's range; negative inside."""
        later = self.later
        return max(float(self.good.min()) - later, later - float(self.good.max()))


def finite(pair: RunPair) -> Iterator[Departure]:
    """The sites all of whose values are finite."""
    broken: list[tuple[int, SameSite]] = []
    for same in pair.alignment.sites:
        if not pair.good.rows(same.a).clean.all():
            continue
        rows = pair.run.rows(same.b)
        steps = rows.step[~rows.clean & (rows.count > 0)]
        if len(steps):
            broken.append((int(steps[0]), same))
    if not broken:
        return
    first = min(step for step, _ in broken)
    names = [same.b.site for step, same in broken if step == first]
    yield Departure(
        kind="finite",
        site=names[0],
        step=first,
        message=f"all values of {listed(names, 3)} were finite in the good run, and are not here.",
        good="finite",
        here="not finite",
        paths=tuple(names),
        remedy="See NAN-BORN, which names the first operation.",
    )


def inputs(pair: RunPair) -> Iterator[Departure]:
    """The sizes of what the program gives to its models."""
    own = [
        each
        for each in _sizes(pair, INPUTS)
        if each.same.a.node is None
        and is_from_outside(pair.good, each.same)
        and _has_parameters(pair.good, each.same.a)
    ]
    yield from _other_beginning(INPUTS, own)


def _has_parameters(recording: Recording, site: SiteInfo) -> bool:
    """Whether the model of a site has parameters: a loss has none, and gets predictions."""
    if site.root >= len(recording.roots):
        return True
    return recording.roots[site.root].parameters > 0


def evaluated(pair: RunPair) -> Iterator[Departure]:
    """The sizes of outputs in evaluation, relative to those of the training around it."""
    known = _evaluated(pair.good)
    found = _evaluated(pair.run)
    for root, other in pair.roots.items():
        good = [size for _, size in known.get(root, ())]
        here = [each for each in found.get(other, ()) if each[0].step <= pair.last_good_step]
        if not good or not here:
            continue
        low, high = min(good), max(good)
        far = [(each, size) for each, size in here if not low - EVALUATED < size < high + EVALUATED]
        if not far:
            continue
        first, size = far[0]
        yield Departure(
            kind="evaluation",
            site=first.site,
            step=first.step,
            message=f"in {len(far)} of {counted(len(here), 'evaluated output')} {first.site} has a "
            f"size far from that in the training around, first {_size(size)} times as large; in the good "
            f"run it was {_size(low)} to {_size(high)} times as large.",
            good=f"{_size(low)} to {_size(high)} times as in training",
            here=f"{_size(size)} times as in training",
            paths=(first.site,),
            remedy="Look when the program evaluates, and at what the model estimates in training: "
            "batch norms, spectral norms.",
            inferred=True,
        )


def _evaluated(recording: Recording) -> dict[int, list[tuple[OutputSize, float]]]:
    """Return the outputs of evaluations of each root, relative to training, as powers of ten."""
    found = {}
    for event in events_of(recording, EvaluatedOutputsEvent):
        beside = [(each, size_in_training(recording, event.root, each)) for each in event.sizes]
        found[event.root] = [
            (each, float(np.log10(max(each.rms, LEAST) / trained)))
            for each, trained in beside
            if trained > LEAST and np.isfinite(each.rms)
        ]
    return found


def sizes(pair: RunPair) -> Iterator[Departure]:
    """The sizes of losses, activations, gradients and updates."""
    for scale in SCALES:
        found = _sizes(pair, scale)
        departed = list(_other_beginning(scale, found))
        if not departed and scale.later is not None:
            departed = list(_out_of_range(scale, found, scale.later))
        if not departed and scale.kind == "loss":
            departed = list(_losses_that_stay(found, _share_of_batch(pair)))
        yield from departed


def _other_beginning(scale: Scale, known: list[SizePair]) -> Iterator[Departure]:
    def far(each: SizePair) -> float:
        good, here = each.at_first
        return abs(here - good)

    found = [each for each in known if far(each) > scale.at_first]
    if not found:
        return
    shown = _shown(scale, found, far)
    good, here = shown.at_first
    name = shown.same.b.site
    yield Departure(
        kind=scale.kind,
        site=name,
        step=int(shown.steps[0]),
        message=f"{scale.what}: {name} has a size of {_size(here)} in the first steps here, and of "
        f"{_size(good)} in those of the good run{_more(found)}.",
        good=_size(good),
        here=_size(here),
        paths=tuple(each.same.b.site for each in found),
        remedy=scale.remedy,
        inferred=True,
    )


def _out_of_range(scale: Scale, known: list[SizePair], margin: float) -> Iterator[Departure]:
    long = [each for each in known if len(each.here) > 2 * BEGINNING]
    found = [each for each in long if each.beyond > margin]
    if not found:
        return
    shown = _shown(scale, found, lambda each: each.beyond)
    low, high = float(shown.good.min()), float(shown.good.max())
    outside = (shown.here > high + margin) | (shown.here < low - margin)
    name = shown.same.b.site
    yield Departure(
        kind=scale.kind,
        site=name,
        step=int(shown.steps[np.argmax(outside)]),
        message=f"{scale.what}: {name} has a size of {_size(shown.later)} at the end here, and had "
        f"{_size(low)} to {_size(high)} in the good run{_more(found)}.",
        good=f"{_size(low)} to {_size(high)}",
        here=_size(shown.later),
        paths=tuple(each.same.b.site for each in found),
        remedy=scale.remedy,
        inferred=True,
    )


def _share_of_batch(pair: RunPair) -> float:
    """Return how large a batch is, relative to one of the good run; 1 if that is not known."""
    for same in pair.of_kind("in"):
        if not is_from_outside(pair.good, same):
            continue
        _, good = values_of(pair.good, same.a, "count")
        _, here = values_of(pair.run, same.b, "count")
        if len(good) and len(here) and np.median(good) > 0:
            return float(np.median(here) / np.median(good))
    return 1.0


def _losses_that_stay(known: list[SizePair], share: float) -> Iterator[Departure]:
    """Yield the losses that fall in the good run, and not by as many samples here.

    Args:
        known: The losses.
        share: The size of a batch here, relative to one of the good run.
    """
    for each in known:
        within = each.good_steps <= each.steps[-1] * min(share, 1.0)
        if len(each.here) < 4 * BEGINNING or np.count_nonzero(within) < 4 * BEGINNING:
            continue
        first, here_first = each.at_first
        window = each.good[within]
        fell = first - float(np.median(window[-len(window) // 4 :]))
        fell_here = here_first - each.later
        if fell < FALLS or fell_here > FELL * fell:
            continue
        name = each.same.b.site
        yield Departure(
            kind="falls",
            site=name,
            step=int(each.steps[-1]),
            message=f"{name} had fallen to {10**-fell:.0%} of its first values after as many steps and "
            f"samples of the good run, and is at {10**-fell_here:.0%} here.",
            good=f"fell to {10**-fell:.0%}",
            here=f"at {10**-fell_here:.0%}",
            paths=(name,),
            remedy="Look at the data, the targets, the learning rate and the loss.",
            inferred=True,
        )


def _shown(scale: Scale, found: list[SizePair], far: Callable[[SizePair], float]) -> SizePair:
    """Return the site that is named: the first in the order of the data, of gradients the furthest."""
    if scale.kind in ("inputs", "loss", "activations"):
        return found[0]
    return max(found, key=far)


def _more(found: list[SizePair]) -> str:
    if len(found) == 1:
        return ""
    return f"; {counted(len(found) - 1, 'more site')} too"


def _size(power: float) -> str:
    if power <= np.log10(LEAST):
        return "0"
    return compact(10**power)


def _sizes(pair: RunPair, scale: Scale) -> list[SizePair]:
    """Return the sizes of the sites of a scale that both runs have, in the same steps."""
    found = []
    sizes_of = _rms
    if scale.kind == "updates":
        sizes_of = _relative_update
    for same in pair.of_kind(*scale.sites):
        is_of_parameter = scale.kind in ("gradients", "updates")
        if is_of_parameter and _dimensions(pair.good, same.a) < 2:
            continue  # a bias has no size of its own at first, and its gradient may add up to nothing
        good_steps, good = sizes_of(pair.good, same.a)
        steps, here = sizes_of(pair.run, same.b)
        known = steps <= pair.last_good_step
        steps, here = steps[known], here[known]
        if len(good) >= BEGINNING and len(here) >= BEGINNING:
            found.append(SizePair(same, good_steps, good, steps, here))
    return found


def _rms(recording: Recording, site: SiteInfo) -> tuple[Ints, Floats]:
    steps, values = values_of(recording, site, "rms")
    return steps, _powers(values)


def _relative_update(recording: Recording, site: SiteInfo) -> tuple[Ints, Floats]:
    """Return the sizes of the updates of a parameter, relative to its own."""
    parameter = _parameters(recording).get(site.path)
    if parameter is None:
        return np.zeros(0, dtype=np.int64), np.zeros(0)
    steps, updates = values_of(recording, site, "rms")
    others, sizes = values_of(recording, parameter, "rms")
    both, here, there = np.intersect1d(steps, others, return_indices=True)
    return both, _powers(updates[here] / np.maximum(sizes[there], LEAST))


@once
def _parameters(recording: Recording) -> dict[str, SiteInfo]:
    """Return the parameters by their paths."""
    return {site.path: site for site in recording.of_kind("param")}


def _dimensions(recording: Recording, site: SiteInfo) -> int:
    """Return the number of dimensions of the parameter of a site; 0 if it is not known."""
    parameter = _parameters(recording).get(site.path)
    if parameter is None:
        return 0
    return len(parameter.shape)


def _powers(sizes: Floats) -> Floats:
    return np.asarray(np.log10(np.maximum(sizes, LEAST)))
