"""GRAD-ZERO: gradients that are exactly zero."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kedge.rules.evidence import Evidence, said, unsaid
from kedge.rules.naming import NAMED
from kedge.rules.parameters.update_ratio import FROM_ZERO, UpdateRatio
from kedge.rules.recorded.losses import steps_without_loss
from kedge.rules.recorded.roots import by_root
from kedge.rules.recorded.samples import measured, too_few
from kedge.rules.recorded.trained import recorded_gradients, trained_sites
from kedge.rules.recorded.weights import weight_courses
from kedge.rules.recorded.wiring import wire
from kedge.rules.rule import Finding, Lack, Rule, Severity
from kedge.short_text import listed
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL, Ints


@dataclass(frozen=True, kw_only=True)
class GradZeroEvidence(Evidence):
    """The parameters without a gradient, and the next one towards the loss that has one.

    Attributes:
        idle: Their modules, if all of these were called without a sample.
    """

    parameters: Sequence[str] = said("parameters {}")
    of: int = said("of {} in all")
    next_with_gradient: str | None = said("the next with a gradient is {}")
    idle: Sequence[str] = unsaid(unless=())


@dataclass(frozen=True)
class GradZero(Rule):
    """A parameter gets a gradient that is exactly zero, step after step.

    Meaning:
        The parameter took part in backward and got only zeros: no optimizer can train it. An
        operation on the way has slope zero: rounding, a comparison, argmax, a clamp beyond its
        bounds, dead or saturated units, a product with zero, or a dtype too narrow for the
        gradient.

    Formula:
        A gradient is zero in a step if the sum of its squares is 0 and so are its extremes, if
        these were measured. Reported if it was zero in each of the last samples measured steps that
        had it; few are enough if all gradients of the model were always zero.

    Window:
        The last samples measured steps in which the parameter got a finite gradient. If the model
        ever got another gradient, steps in which every loss is exactly zero are left out: a hinge
        or triplet loss that every sample satisfies has nothing more to teach. A bias is left out if
        the weight of its module gets a gradient: then the gradient does arrive there, and the loss
        depends only on differences, which a bias does not change. UNUSED-PARAM reports parameters
        without any gradient.

    Thresholds:
        - samples (20): a factor that starts at zero, as in LoRA or ReZero, blocks the gradient of
          its branch for one step, and an expert of a mixture may get no token for a few.
        - few (5): if all gradients are zero, neither of these can be the reason.

    Severity:
        - error: all gradients of the root were always zero; the model does not change.
        - warning: some of them are zero, or all of them have become zero although the loss is not.

    Evidence:
        Whether all gradients of the root were always zero, the parameters without a gradient, the
        number of the root's parameters, and the next parameter towards the loss that did get a
        gradient: the operation that cuts the gradient is before that parameter, or in its module.

    Remedy:
        Initialise weights that are zero in every step, if any are named. Give a softmax that
        returns nothing but 1 the dimension of the classes, or use sigmoid for a single number. Of a
        recurrent weight:
        read an output that has seen more than one step. Of a module that is called without a sample,
        as an expert that no gate chooses: balance the choice. Else look between the named module and the
        one before it for an operation with slope zero: round, sign, argmax, a comparison, clamp, a
        product with zero, dead units (DEAD-CHANNEL), saturated ones (SATURATED).

    Cannot see:
        Which operation between two modules has slope zero; a gradient that is almost zero.
    """

    samples: int = 20
    few: int = 5

    code = "GRAD-ZERO"
    name = "a gradient is exactly zero"
    severity = "error"
    of_training = True
    follows = (
        "NEVER-INITIALISED INPUT-SCALE INIT-SCALE DOUBLE-SOFTMAX LOSS-BELOW-ZERO "
        "GRADS-KEPT BATCH-OF-ONE RATE-TOO-LARGE UNDERFLOW DEAD-CHANNEL SATURATED"
    )

    def check(self, recording: Recording) -> Iterable[Finding]:
        """Yield at most one finding for every root."""
        grads = trained_sites(recording, "param.grad")
        for _, own in by_root(grads, lambda site: site.root):
            judged = _zeros_of(recording, own)
            if any(course.moved for course in judged.values()):
                judged = _zeros_of(recording, own, steps_without_loss(recording))
            enough = self.few
            if any(course.moved for course in judged.values()):
                enough = self.samples
            still = {site for site, course in judged.items() if course.length >= enough}
            still |= self._stuck(recording, judged)
            driven = {site for site, course in judged.items() if course.moved} - still
            still -= {site for site in still if _is_shift(site, driven)}
            if still:
                enough = min(enough, *(judged[site].length for site in still))
                yield self._finding(recording, judged, still, enough)

    def lacking(self, recording: Recording) -> Lack | None:
        """Return the lack of measured gradients; without gradients there is nothing to judge."""
        grads = recorded_gradients(recording)
        if not grads:
            return None
        return too_few(self.code, measured(recording, grads), self.samples)

    def _stuck(
        self, recording: Recording, judged: Mapping[SiteInfo, _Zeros]
    ) -> frozenset[SiteInfo]:
        """Return the gradients of weights that are zero for good: two factors of zero keep each other so."""
        zero = _weights_of_zero(recording, {site.path for site in judged}, 0)
        found = frozenset(
            site
            for site, course in judged.items()
            if site.path in zero and course.length >= self.few and not course.moved
        )
        if len(found) < 2:
            return frozenset()
        return found

    def _finding(
        self, recording: Recording, judged: dict[SiteInfo, _Zeros], zero: set[SiteInfo], enough: int
    ) -> Finding:
        modules = wire(recording).modules
        order = sorted(judged, key=lambda site: modules[site.owner].position)
        still = [site for site in order if site in zero]
        last = still[-1]
        later = [
            site
            for site in order[order.index(last) + 1 :]
            if modules[site.owner] is not modules[last.owner]
        ]
        next_one = next(iter(later), None)
        next_path = None if next_one is None else next_one.path
        names = ", ".join(site.name for site in still[-NAMED:])
        step = max(judged[site].since for site in still)
        seen = _sources_of_zeros(recording, still, later, step)
        before = _long_step_before(recording, last.root, step)
        if before:
            seen += _SHORTER
        remedy = _REMEDY
        if seen:
            remedy = f"{seen}Otherwise l{_REMEDY[1:]}"
        idle = _modules_without_samples(recording, still, {s: judged[s].since for s in still})
        without = ""
        if idle:
            were = "was"
            if len(idle) > 1:
                were = "were"
            without = f" {listed(idle, NAMED)} {were} called without a sample in these steps."
            if last.owner in {*idle}:
                next_one = None
            remedy = _ROUTED

        severity: Severity = "warning"
        kind = "some"
        has_moved = any(course.moved for course in judged.values())
        if len(still) == len(judged) and not has_moved:
            severity = "error"
            kind = "all"
        return Finding(
            code=self.code,
            severity=severity,
            site=last.site,
            step=step,
            message=f"{_gradients(len(still))} exactly zero in at least the last "
            f"{enough} measured steps, since step {step}: "
            f"{names}{_rest(len(still))}.{without}{_nearer(next_one)}{before}",
            evidence=GradZeroEvidence(
                kind=kind,
                parameters=[site.path for site in still],
                of=len(judged),
                next_with_gradient=next_path,
                idle=tuple(idle),
            ),
            confidence=0.95,
            remedy=remedy,
        )


def _sources_of_zeros(
    recording: Recording, still: list[SiteInfo], later: list[SiteInfo], since: int
) -> str:
    """Return what is seen to make a product zero: weights of zero, or a recurrent weight that saw no state but zero.

    Args:
        recording: The recording.
        still: The gradients that are zero, in the order of the forward.
        later: The gradients behind them.
        since: The step from which on they are zero.
    """
    says = _sums_of_one(recording, still[0].root)
    paths = {site.path for site in (*still, *later)}
    zero = [*_weights_of_zero(recording, paths, since).values()]
    from_when = ""
    if since > 0:
        from_when = f" from step {since} on"
    if zero:
        verb = "are"
        if len(zero) == 1:
            verb = "is"
        says += (
            f"{listed(zero, NAMED)} {verb} zero in every measured step{from_when}: a product with "
            "it is zero, so initialise it. "
        )
    states = []
    for site in still:
        last = site.path.rpartition(".")[2]
        beside = [each for each in still if each.owner == site.owner and "_ih" in each.path]
        if last.startswith("weight_hh") and not beside:
            states.append(site.name)
    if states:
        says += (
            f"{listed(states, NAMED)}: its gradient is a product with the state "
            "before, which is zero in the first step of a sequence; if only that "
            "output is read, as of the reverse direction in out[:, -1], read another "
            "one. "
        )
    return says


def _long_step_before(recording: Recording, root: int, since: int) -> str:
    """Return that one of the last measured steps before the zeros changed a weight by a good part of its size."""
    courses = weight_courses(recording)
    rows = [row for row, weight in enumerate(courses.weights) if weight.root == root]
    near = np.flatnonzero(courses.steps < since)[-_JUST_BEFORE:]
    update = courses.update[rows][:, near]
    update = np.where(courses.size[rows][:, near] > FROM_ZERO, update, 0.0)
    largest = np.fmax.reduce(update, axis=1, initial=0)
    if largest.max(initial=0) < UpdateRatio.high:
        return ""
    name = courses.weights[rows[int(largest.argmax())]].param.name
    return (
        f" Just before, a step changed {name} by {largest.max():.2g} times its size: so long a step "
        "can leave units where they never fire again."
    )


def _weights_of_zero(recording: Recording, paths: Collection[str], since: int) -> dict[str, str]:
    """Return the names, by path, of those weights that were zero in every measured step from one on."""
    zero = {}
    for site in recording.of_kind("param"):
        rows = recording.rows(site)
        full = (rows.level == FULL) & (rows.step >= since)
        if site.path not in paths or len(site.shape) < 2:
            continue
        if full.any() and not rows.sumsq[full].any():
            zero[site.path] = site.name
    return zero


def _sums_of_one(recording: Recording, root: int) -> str:
    """Return that an output is 1 whatever the model was given, as what is divided by its sum over one element is."""
    found = []
    for site in recording.of_kind("out"):
        rows = recording.rows(site)
        full = rows.level == FULL
        if site.root != root or 1 not in site.shape or not full.any():
            continue
        if (rows.min[full] == 1).all() and (rows.max[full] == 1).all():
            found.append(site.site)
    if not found:
        return ""
    return (
        f"{found[0]} is 1 in all elements in every measured step, as a softmax over a dimension "
        "of one element is: give it the dimension of the classes, or use sigmoid for a single "
        "number. "
    )


_JUST_BEFORE = 5
"""Measured steps before the zeros in which a long step may have made them."""

_SHORTER = (
    "Lower the learning rate or warm it up, clip gradients, scale the targets, and take the mean "
    "of a loss and not its sum. "
)

_REMEDY = (
    "Look from there towards the loss for an operation with slope zero: round, sign, "
    "argmax, a comparison, clamp beyond its bounds, a product with zero, dead units "
    "(DEAD-CHANNEL), saturated ones (SATURATED), or float16 without a loss scale "
    "(UNDERFLOW)."
)


def _modules_without_samples(
    recording: Recording, still: Iterable[SiteInfo], since: Mapping[SiteInfo, int]
) -> list[str]:
    """Return the modules whose outputs had no elements in every measured step of the zeros; empty unless all of them are such."""
    outputs = {(site.root, site.path): site for site in recording.of_kind("out")}
    idle: dict[str, None] = {}
    for site in still:
        output = outputs.get((site.root, site.owner))
        if output is None:
            return []
        rows = recording.rows(output)
        counts = rows.count[(rows.step >= since[site]) & (rows.level == FULL)]
        if not len(counts) or counts.any():
            return []
        idle[site.owner] = None
    return list(idle)


_ROUTED = (
    "Look at what chooses the samples of each of these modules, such as the gate of a mixture of "
    "experts: one that is not chosen is not trained, and is chosen ever less. Give the loss that "
    "balances them more weight, add noise to the gate, or take fewer of them."
)


def _is_shift(site: SiteInfo, driven: Iterable[SiteInfo]) -> bool:
    """Whether a site is that of a bias beside another parameter of its module that gets a gradient."""
    return site.path.rpartition(".")[2] == "bias" and any(
        other.owner == site.owner for other in driven
    )


def _zeros_of(
    recording: Recording, sites: Sequence[SiteInfo], without: Ints | None = None
) -> dict[SiteInfo, _Zeros]:
    """Return the course of each gradient over the measured steps in which it was finite, except some steps."""
    rows = recording.all_rows.rows
    known = (rows.level == FULL) & rows.clean & (rows.count > 0)
    if without is not None:
        known &= ~np.isin(rows.step, without)
    low, high = np.nan_to_num(rows.min), np.nan_to_num(rows.max)
    extremes = np.maximum(np.abs(low), np.abs(high))
    zero = (rows.sumsq == 0) & (extremes == 0)
    places = np.flatnonzero(known)
    owners = recording.all_rows.site[places]
    last = np.full(len(recording.sites), -1)
    moving = ~zero[places]
    last[owners[moving]] = np.flatnonzero(moving)  # the later of two stays
    ends = np.searchsorted(owners, np.arange(len(recording.sites)), side="right")
    starts = np.searchsorted(owners, np.arange(len(recording.sites)))
    begins = np.maximum(starts, last + 1)
    courses = {}
    for site in sites:
        begin = int(begins[site.id])
        end = int(ends[site.id])
        since = int(rows.step[places[begin]]) if begin < end else -1
        courses[site] = _Zeros(end - begin, since, bool(last[site.id] >= 0))
    return courses


@dataclass(frozen=True)
class _Zeros:
    """The number of samples for which a gradient has been zero, the first of them, and whether it ever was not zero."""

    length: int
    since: int
    moved: bool


def _gradients(number: int) -> str:
    if number == 1:
        return "The gradient of one parameter was"
    return f"The gradients of {number} parameters were"


def _rest(number: int) -> str:
    if number > NAMED:
        return f" and {number - NAMED} before them"
    return ""


def _nearer(site: SiteInfo | None) -> str:
    if not site:
        return ""
    return f" {site.name}, nearer to the loss, gets a gradient."
