"""The steps in which something was not finite, each as the state of every site.

# Note [Recovered]
A run has recovered from a step if the optimizer later got finite gradients of the roots that were
hurt: gradients of steps that loss scaling skips never reach it. A step without rows shows nothing:
of several bad steps in a row not all are written. Finite gradients of another model say nothing
about the one that was hurt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from kedge.rules.recorded.losses import LOSS
from kedge.rules.recorded.once import once
from kedge.rules.recorded.roots import by_root, root_paths
from kedge.rules.recorded.wiring import ModuleSites, Wiring
from kedge.store.events import BadBackwardEvent
from kedge.store.recording import Recording, Rows, SiteInfo

#: The states of a row, in the order of their severity.
ABSENT, FINITE, INFINITE, NAN = 0, 1, 2, 3

#: The kind of the site that stands for all gradients of a root at the end of the backward pass.
TOTAL = "grad.norm"

#: Sites whose values show that a root was hurt; inputs may be bad without harm.
_JUDGED = ("out", "param", "param.grad", "update", TOTAL, LOSS)

#: Modules that make NaN of a row of -inf, and finite values of a row with some -inf.
_OF_MASKED = ("Softmax",)

States = NDArray[np.int8]


@dataclass(frozen=True)
class BadStep:
    """One step in which something was not finite.

    Attributes:
        step: The step.
        states: One of ``ABSENT``, ``FINITE``, ``INFINITE``, ``NAN`` for every site.
        bad_params: Parameters that were not finite when last recorded, in this step or before it.
        sound: Whether all of this step's gradients, updates and outputs of the model were usable.
        full: Whether the step was measured. Other steps leave some sites out on purpose.
        steps: The number of steps in a row with the same states.
        last_sound: The last recorded step before it that was sound; -1 if there is none.
        inferred: Sites without a row, with a state inferred from others.
        excused: Sites whose infinities count as finite values.
        in_backward: Whether a backward pass of a finite loss made gradients that were not finite at
            its end, in a step that was not measured.
    """

    step: int
    states: States
    bad_params: frozenset[int]
    sound: bool
    full: bool
    steps: int
    last_sound: int = -1
    inferred: frozenset[int] = frozenset()
    excused: frozenset[int] = frozenset()
    in_backward: bool = False

    def are_finite(self, sites: Iterable[int]) -> bool | None:
        """Whether all of some sites were finite; None if none of them has a row."""
        known = [self.states[site] for site in sites if self.states[site] != ABSENT]
        if not known:
            return None
        return bool(max(known) == FINITE)

    def nonfinite(self, sites: Iterable[int]) -> list[int]:
        """Return those of some sites that were not finite."""
        return [site for site in sites if self.states[site] > FINITE]

    def nonfinite_of(self, recording: Recording) -> list[SiteInfo]:
        """Return the sites of a recording that were not finite."""
        return [recording.sites[site] for site in np.flatnonzero(self.states > FINITE)]

    def is_unmeasured(self, sites: Iterable[int]) -> bool:
        """Whether none of some sites has a row in this step."""
        return all(self.states[site] == ABSENT or site in self.inferred for site in sites)


@dataclass(frozen=True)
class BadSteps:
    """The steps of a recording with non-finite values.

    Attributes:
        steps: The steps; of neighbouring ones with the same states only the first.
        last_sound: For each root, its last sound step; see Note [Recovered].
        habitual: Sites that hold an infinity in sound steps, such as a masked attention.
    """

    steps: tuple[BadStep, ...]
    last_sound: dict[int, int]
    habitual: frozenset[int]

    def recovered(self, recording: Recording, bad_step: BadStep) -> bool:
        """Whether every root that a step hurt was sound later, or in that step itself."""
        if bad_step.sound:
            return True
        hurt = {
            recording.sites[site].root
            for site in bad_step.nonfinite(s.id for s in recording.sites if s.kind in _JUDGED)
        }
        last = [self.last_sound[root] for root in hurt & set(self.last_sound)] or list(
            self.last_sound.values()
        )
        return min(last, default=-1) >= bad_step.step


@once
def find_bad_steps(recording: Recording) -> BadSteps:
    """Return the steps in which something was not finite."""
    every = recording.all_rows
    states = states_of(every.rows)
    steps = np.unique(every.rows.step[states > FINITE])
    table = np.zeros((len(recording.sites), len(steps)), dtype=np.int8)
    then = np.isin(every.rows.step, steps)
    table[every.site[then], np.searchsorted(steps, every.rows.step[then])] = states[then]
    wrong, known = _judge(recording, steps, table)
    sound = np.asarray(known.any(axis=0) & ~wrong.any(axis=0))
    return BadSteps(
        steps=tuple(_bad_steps(recording, steps, table, sound)),
        last_sound=_last_sound(recording, steps, wrong),
        habitual=_habitual(recording, table, sound),
    )


def _habitual(recording: Recording, table: States, sound: NDArray[np.bool_]) -> frozenset[int]:
    """Return the sites that held an infinity in sound steps.

    If a parameter's gradient held one too, the step was sound only because the optimizer never got
    it.
    """
    gradients = [site.id for site in recording.of_kind("param.grad")]
    clean = ~(table[gradients] > FINITE).any(axis=0)
    found = np.flatnonzero((table[:, sound & clean] == INFINITE).any(axis=1))
    values = np.flatnonzero((table[:, sound] == INFINITE).any(axis=1))
    forward = {int(i) for i in values if recording.sites[i].kind in ("in", "out")}
    losses = {site.id for site in recording.of_kind(LOSS)}  # an infinite loss is never by design
    return frozenset((forward | set(found.tolist())) - losses)


def excuse(bad_step: BadStep, habitual: Iterable[int]) -> BadStep:
    """Return a step in which the infinities of some sites count as finite values."""
    states = bad_step.states.copy()
    excused = [site for site in habitual if states[site] == INFINITE]
    states[excused] = FINITE
    return replace(bad_step, states=states, excused=frozenset(excused))


def infer_states(bad_step: BadStep, wiring: Wiring) -> BadStep:
    """Return a step with the states that follow from those of its rows.

    Between measured steps not all sites have rows. An input that is the output of a watched module
    has the state of that output. The output of a module with inputs of one state has that state
    too; a non-finite input makes it non-finite. A softmax of masked scores may be either.
    """
    if bad_step.full:
        return bad_step
    states = bad_step.states.copy()
    for module in wiring:
        for site in module.ins:
            if states[site] == ABSENT:
                states[site] = _state_of_input(wiring, states, module, site)
        given = {int(states[site]) for site in module.ins}
        if module.type in _OF_MASKED and not bad_step.excused.isdisjoint(module.ins):
            continue
        if not wiring.inside(module) and (given == {FINITE} or max(given, default=ABSENT) > FINITE):
            states[[site for site in module.outs if states[site] == ABSENT]] = max(given)
    inferred = np.flatnonzero((states != ABSENT) & (bad_step.states == ABSENT))
    return replace(bad_step, states=states, inferred=frozenset(inferred.tolist()))


def _state_of_input(wiring: Wiring, states: States, module: ModuleSites, site: int) -> int:
    """Return the state of an input: that of the outputs that it was in other steps.

    If another module's output in between is bad in this step, the input may have been that one this
    time.
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
    if unknown:
        return ABSENT
    return state


def judged(recording: Recording) -> tuple[list[SiteInfo], list[SiteInfo]]:
    """Return the sites that decide whether a step was sound: gradients, and the outputs of the roots."""
    heads = root_paths(recording)
    returned = [site for site in recording.of_kind("out") if site.path in heads]
    return [*recording.of_kind("param.grad"), *recording.of_kind(TOTAL)], returned


def states_of(rows: Rows) -> States:
    """Return the state of each row."""
    clean = rows.clean
    if clean.all():
        return np.full(len(rows), FINITE, dtype=np.int8)
    return np.where(clean, FINITE, np.where(rows.has_nan, NAN, INFINITE)).astype(np.int8)


def _judge(
    recording: Recording, steps: NDArray[np.int64], table: States
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return for each root and step whether it was hurt, and whether that is known; see Note [Recovered]."""
    roots = max((site.root for site in recording.sites), default=0) + 1
    wrong = np.zeros((roots, len(steps)), dtype=bool)
    known = np.zeros((roots, len(steps)), dtype=bool)
    total = np.zeros((roots, len(steps)), dtype=np.int8)
    for site in recording.of_kind(TOTAL):
        total[site.root] = table[site.id]
    for root, states in _by_root(recording, "param.grad", table):
        known[root] |= (states == FINITE).any(axis=0)
        wrong[root] |= (states > FINITE).any(axis=0)
    has_total = total != ABSENT
    known, wrong = (
        np.where(has_total, total == FINITE, known),
        np.where(has_total, total > FINITE, wrong),
    )
    trained = (known & ~wrong).any(axis=0)
    for root, states in _by_root(recording, "update", table):
        wrong[root] |= (states > FINITE).any(axis=0)
    for site in recording.of_kind(LOSS):
        # It belongs to no root: none is sound in such a step, even if its gradients are.
        wrong |= table[site.id] > FINITE
    for site in judged(recording)[1]:
        masked = _only_below(recording.rows(site), steps) & trained & (len(site.shape) > 0)
        known[site.root] |= table[site.id] == FINITE
        wrong[site.root] |= (table[site.id] > FINITE) & ~masked
    return wrong, known


def _by_root(recording: Recording, kind: str, table: States) -> Iterator[tuple[int, States]]:
    """Yield each root with the states of its sites of one kind."""
    for root, sites in by_root(recording.of_kind(kind), lambda site: site.root):
        yield root, table[[site.id for site in sites]]


def _only_below(rows: Rows, steps: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return the steps in which -inf was the only non-finite value, as in masked scores."""
    below = (rows.sum == -np.inf) & ~(rows.max == np.inf)
    return np.isin(steps, rows.step[below])


def _last_sound(
    recording: Recording, steps: NDArray[np.int64], wrong: NDArray[np.bool_]
) -> dict[int, int]:
    """Return the last sound step of each root with recorded gradients or outputs.

    If any root has gradients, roots without are left out: a finite loss shows nothing.
    """
    gradients, returned = judged(recording)
    every = recording.all_rows
    good: dict[int, int] = {}
    for root, sites in by_root(gradients or returned, lambda site: site.root):
        own = np.zeros(len(recording.sites), dtype=bool)
        own[[site.id for site in sites]] = True
        clean = np.unique(every.rows.step[own[every.site] & every.rows.clean])
        good[root] = int(
            np.setdiff1d(clean, steps[wrong[root]], assume_unique=True).max(initial=-1)
        )
    return good


def _bad_steps(
    recording: Recording, steps: NDArray[np.int64], table: States, sound: NDArray[np.bool_]
) -> Iterator[BadStep]:
    if not len(steps):
        return
    changed = np.ones(len(steps), dtype=bool)
    changed[1:] = (table[:, 1:] != table[:, :-1]).any(axis=0)
    kept = np.flatnonzero(changed)
    lengths = np.diff(np.append(kept, len(steps)))
    unusable = recording.all_rows.any(~usable(recording.all_rows.rows))
    suspects = [site for site in recording.of_kind("param") if unusable[site.id]]
    full = set(recording.steps.tolist())
    in_backward = {event.step for event in recording.of(BadBackwardEvent)}
    every = recorded_steps(recording)
    usable_steps = np.union1d(np.setdiff1d(every, steps), steps[sound])
    for column, length in zip(kept.tolist(), lengths.tolist(), strict=True):
        step = int(steps[column])
        bad = (site.id for site in suspects if _bad_by(recording.rows(site), step))
        bad_params = frozenset(bad)
        before = usable_steps[: np.searchsorted(usable_steps, step)]
        last_sound = int(before.max(initial=-1))
        yield BadStep(
            step, table[:, column], bad_params, bool(sound[column]), step in full, length, last_sound,
            in_backward=step in in_backward,
        )  # fmt: skip


def recorded_steps(recording: Recording) -> NDArray[np.int64]:
    """Return the steps of which anything was recorded."""
    return np.unique(recording.all_rows.rows.step)


def _bad_by(rows: Rows, step: int) -> bool:
    """Whether a parameter was not finite when last recorded, in this step or before it."""
    latest = int(np.searchsorted(rows.step, step, side="right")) - 1
    return latest >= 0 and not bool(usable(rows)[latest])


def usable(rows: Rows) -> NDArray[np.bool_]:
    """Return which rows of a parameter are finite, or only have a sum of squares that is too large for float32."""
    overflown = np.isinf(rows.sumsq) & np.isnan(rows.sum) & (rows.nonfinite < 0)
    return np.asarray(rows.clean | overflown)
