"""The steps in which something was not finite, each as the state of every site.

# Note [Recovered]
A run has recovered from a step if later the gradients of the roots that were hurt were finite again, as the optimizer
got them: steps that loss scaling skips never reach it. A step that is not mentioned shows nothing: of steps that go on
as badly as the one before not all are written. Another model that does well says nothing about the one that was hurt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kedge.rules.wiring import Module, Wiring
from kedge.store.recording import Recording, Rows, SiteInfo

#: What a row says of its elements. A row of an infinity without a NaN comes before one with a NaN.
ABSENT, FINITE, INFINITE, NAN = 0, 1, 2, 3

#: The kind of the site that stands for all gradients of a root at the end of the backward pass.
TOTAL = "grad.norm"

#: Sites whose values show that a root was hurt, and not only what it computed with.
_JUDGED = ("out", "param", "param.grad", "update", TOTAL)

#: Modules that make a NaN of a row that is -inf all over, and finite values of one that is so in places.
_OF_MASKED = ("Softmax",)

States = NDArray[np.int8]


@dataclass(frozen=True)
class Moment:
    """One step in which something was not finite.

    Attributes:
        step: The step.
        states: One of ``ABSENT``, ``FINITE``, ``INFINITE``, ``NAN`` for every site.
        tainted: Parameters that were not finite when last seen, in this step or before it.
        sound: Whether all of this step's gradients and updates, and what the model returned, were fit
            for use.
        full: Whether the step was on schedule. Off schedule some sites are left out on purpose.
        steps: In how many steps in a row the same sites were not finite.
        before: The last step before it of which anything was recorded; -1 if there is none.
        sane: The last one of those in which all that counts was fit for use; -1 if there is none.
        worked: Sites that were not looked at, whose state was worked out.
        excused: Sites whose infinities are taken for finite values.
    """

    step: int
    states: States
    tainted: frozenset[int]
    sound: bool
    full: bool
    steps: int
    before: int = -1
    sane: int = -1
    worked: frozenset[int] = frozenset()
    excused: frozenset[int] = frozenset()

    def finite(self, sites: Iterable[int]) -> bool | None:
        """Tell whether all of some sites were finite; None where none of them was seen."""
        seen = [self.states[site] for site in sites if self.states[site] != ABSENT]
        return bool(max(seen) == FINITE) if seen else None

    def bad(self, sites: Iterable[int]) -> list[int]:
        """List those of some sites that were not finite."""
        return [site for site in sites if self.states[site] > FINITE]


@dataclass(frozen=True)
class Course:
    """The moments of a recording, and how long all was well.

    ``sound`` gives for each root the last step in which it was; see Note [Recovered]. ``habitual`` are sites
    that held an infinity while all was well, as a masked attention does on purpose.
    """

    moments: tuple[Moment, ...]
    sound: dict[int, int]
    habitual: frozenset[int]

    def recovered(self, recording: Recording, moment: Moment) -> bool:
        """Tell whether every root that was hurt in a moment was sound later, or in that step after all."""
        if moment.sound:
            return True
        hurt = {recording.sites[site].root for site in moment.bad(s.id for s in recording.sites if s.kind in _JUDGED)}
        last = [self.sound.get(root, -1) for root in hurt & set(self.sound)] or list(self.sound.values())
        return min(last, default=-1) >= moment.step


def course(recording: Recording) -> Course:
    """Find the steps in which something was not finite.

    Of neighbouring ones with the same sites in the same states only the first is kept.
    """
    states = [states_of(recording.rows(site)) for site in recording.sites]
    steps = _steps_not_finite(recording, states)
    table = np.zeros((len(recording.sites), len(steps)), dtype=np.int8)
    for site, state in zip(recording.sites, states, strict=True):
        _place(table[site.id], steps, recording.rows(site).step, state)
    wrong, known = _judge(recording, steps, table)
    sound = np.asarray(known.any(axis=0) & ~wrong.any(axis=0))
    return Course(
        moments=tuple(_moments(recording, steps, table, sound)),
        sound=_last_sound(recording, steps, wrong),
        habitual=_habitual(recording, table, sound),
    )


def _habitual(recording: Recording, table: States, sound: NDArray[np.bool_]) -> frozenset[int]:
    """Find the sites that held an infinity while all was well.

    Where a parameter's gradient held one too, the step was sound only because the optimizer never got it.
    """
    clean = ~(table[[site.id for site in recording.of_kind("param.grad")]] > FINITE).any(axis=0)
    found = np.flatnonzero((table[:, sound & clean] == INFINITE).any(axis=1))
    values = np.flatnonzero((table[:, sound] == INFINITE).any(axis=1))
    forward = {int(i) for i in values if recording.sites[i].kind in ("in", "out")}
    return frozenset(forward | set(found.tolist()))


def excuse(moment: Moment, habitual: Iterable[int]) -> Moment:
    """Take the infinities of some sites for finite values."""
    states = moment.states.copy()
    excused = [site for site in habitual if states[site] == INFINITE]
    states[excused] = FINITE
    return replace(moment, states=states, excused=frozenset(excused))


def complete(moment: Moment, wiring: Wiring) -> Moment:
    """Work out what was left out of a step because it says nothing new.

    Off schedule an input that is some watched module's output is not measured, and neither is the
    output of a module such as ReLU that makes finite values of finite ones. What a module made of an
    input that is not finite, and nobody could look at any more, is taken to be not finite either.
    A softmax of masked scores may be either.
    """
    if moment.full:
        return moment
    states = moment.states.copy()
    for module in wiring:
        for site in module.ins:
            if states[site] == ABSENT:
                states[site] = _given(wiring, states, module, site)
        given = {int(states[site]) for site in module.ins}
        if module.type in _OF_MASKED and not moment.excused.isdisjoint(module.ins):
            continue
        if not wiring.inside(module) and (given == {FINITE} or max(given, default=ABSENT) > FINITE):
            states[[site for site in module.outs if states[site] == ABSENT]] = max(given)
    worked = np.flatnonzero((states != ABSENT) & (moment.states == ABSENT))
    return replace(moment, states=states, worked=frozenset(worked.tolist()))


def _given(wiring: Wiring, states: States, module: Module, site: int) -> int:
    """Work out the state of an input from the outputs that it was in other steps.

    If something in between went wrong in this step, it may have been that for once.
    """
    sources = wiring.sites[site].sources
    if not sources or None in sources:
        return ABSENT
    known = [source for source in sources if source is not None]
    start = wiring.start(module)
    between = [m for m in wiring if max(known) < m.position < start]
    state = max(int(states[source]) for source in known)
    spoiled = any(states[out] > FINITE for m in between for out in m.outs)
    unknown = any(states[source] == ABSENT for source in known) or (spoiled and state == FINITE)
    return ABSENT if unknown else state


def judged(recording: Recording) -> tuple[list[SiteInfo], list[SiteInfo]]:
    """List the sites that decide whether a step was sound: gradients, and what the roots return."""
    heads = {root.prefix.rstrip(".") for root in recording.roots} or {""}
    returned = [site for site in recording.of_kind("out") if site.path in heads]
    return [*recording.of_kind("param.grad"), *recording.of_kind(TOTAL)], returned


def has_nan(rows: Rows) -> NDArray[np.bool_]:
    """Tell rows that hold a NaN from those that hold infinities alone.

    A NaN makes every figure of its row NaN, so an infinite one shows that there is none.
    """
    figures = np.stack([rows.sum, rows.sumsq, rows.min, rows.max])
    without = np.isinf(rows.sum) | np.isinf(rows.sumsq) | ~np.isnan(rows.min) | ~np.isnan(rows.max)
    return np.asarray(np.isnan(figures).any(axis=0) & ~without)


def states_of(rows: Rows) -> States:
    """Give the state of each row."""
    clean = rows.clean
    if clean.all():
        return np.full(len(rows), FINITE, dtype=np.int8)
    return np.where(clean, FINITE, np.where(has_nan(rows), NAN, INFINITE)).astype(np.int8)


def _steps_not_finite(recording: Recording, states: list[States]) -> NDArray[np.int64]:
    found = [recording.rows(s).step[state > FINITE] for s, state in zip(recording.sites, states, strict=True)]
    return np.unique(np.concatenate(found)) if found else np.zeros(0, dtype=np.int64)


def _place(course: States, steps: NDArray[np.int64], at: NDArray[np.int64], state: States) -> None:
    """Write the states of one site, known at some steps, into its course over others."""
    where = np.isin(at, steps, assume_unique=True)
    course[np.searchsorted(steps, at[where])] = state[where]


def _judge(
    recording: Recording, steps: NDArray[np.int64], table: States
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Tell for each root and step whether something that counts was not finite, and whether it is known; see Note [Recovered]."""
    roots = max((site.root for site in recording.sites), default=0) + 1
    wrong, known = np.zeros((roots, len(steps)), dtype=bool), np.zeros((roots, len(steps)), dtype=bool)
    total = np.zeros((roots, len(steps)), dtype=np.int8)
    for site in recording.of_kind(TOTAL):
        total[site.root] = table[site.id]
    for site in recording.of_kind("param.grad"):
        known[site.root] |= table[site.id] == FINITE
        wrong[site.root] |= table[site.id] > FINITE
    told = total != ABSENT
    known, wrong = np.where(told, total == FINITE, known), np.where(told, total > FINITE, wrong)
    trained = (known & ~wrong).any(axis=0)
    for site in recording.of_kind("update"):
        wrong[site.root] |= table[site.id] > FINITE
    for site in judged(recording)[1]:
        masked = _only_below(recording.rows(site), steps) & trained & (len(site.shape) > 0)
        known[site.root] |= table[site.id] == FINITE
        wrong[site.root] |= (table[site.id] > FINITE) & ~masked
    return wrong, known


def _only_below(rows: Rows, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Tell the steps in which -inf was the only value that was not finite, as in masked scores."""
    below = (rows.sum == -np.inf) & ~(rows.max == np.inf)
    return np.isin(steps, rows.step[below])


def _last_sound(recording: Recording, steps: NDArray[np.int64], wrong: NDArray[np.bool_]) -> dict[int, int]:
    """Give the last step in which each root was sound, of those whose gradients or returned values were recorded.

    If any root has gradients, those without are not asked: a loss that is finite shows nothing.
    """
    gradients, returned = judged(recording)
    good: dict[int, int] = {}
    for site in gradients or returned:
        rows = recording.rows(site)
        clean = np.setdiff1d(rows.step[rows.clean], steps[wrong[site.root]], assume_unique=True)
        good[site.root] = max(good.get(site.root, -1), int(clean.max(initial=-1)))
    return good


def _moments(
    recording: Recording, steps: NDArray[np.int64], table: States, sound: NDArray[np.bool_]
) -> Iterator[Moment]:
    if not len(steps):
        return
    changed = np.ones(len(steps), dtype=bool)
    changed[1:] = (table[:, 1:] != table[:, :-1]).any(axis=0)
    kept = np.flatnonzero(changed)
    lengths = np.diff(np.append(kept, len(steps)))
    suspects = [site for site in recording.of_kind("param") if not usable(recording.rows(site)).all()]
    full = set(recording.steps.tolist())
    every = seen_steps(recording)
    fit = np.union1d(np.setdiff1d(every, steps), steps[sound])
    for column, length in zip(kept.tolist(), lengths.tolist(), strict=True):
        step = int(steps[column])
        tainted = frozenset(site.id for site in suspects if _bad_by(recording.rows(site), step))
        before, sane = (int(some[: np.searchsorted(some, step)].max(initial=-1)) for some in (every, fit))
        yield Moment(step, table[:, column], tainted, bool(sound[column]), step in full, length, before, sane)


def seen_steps(recording: Recording) -> NDArray[np.int64]:
    """List the steps of which anything was recorded."""
    return np.unique(np.concatenate([recording.rows(site).step for site in recording.sites] or [np.zeros(0, np.int64)]))


def _bad_by(rows: Rows, step: int) -> bool:
    """Tell whether a parameter was not finite when last seen, in this step or before it."""
    latest = int(np.searchsorted(rows.step, step, side="right")) - 1
    return latest >= 0 and not bool(usable(rows)[latest])


def usable(rows: Rows) -> NDArray[np.bool_]:
    """Tell rows of a parameter that are finite, or whose sum of squares alone is too large for float32."""
    overflown = np.isinf(rows.sumsq) & np.isnan(rows.sum) & (rows.nonfinite < 0)
    return np.asarray(rows.clean | overflown)
