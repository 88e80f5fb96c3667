"""A timed step, as the table that a planner works on.

# Note [Calls]
Of a call that is run again, the tensors that it would save are not seen: one candidate stands for
all of them, a lump. A call that is not run again shows them, and is remembered so when it is run
again in a later timed step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import attrgetter
from typing import Any

from kedge.offload.plan.tables import (
    LUMP,
    CallKey,
    Candidate,
    Link,
    RepeatableCall,
    StepTable,
    TensorKey,
)
from kedge.offload.plan.timing import CallTimes, TensorTimes, Timings


@dataclass
class SeenCall:
    """What timed steps have shown of a call of a module that may be run again.

    Attributes:
        inputs: The bytes of its inputs.
        members: The tensors that it saves, with the times since its beginning; None if they were
            never seen.
    """

    inputs: int = 0
    members: tuple[Candidate, ...] | None = None


class MeasuredStep:
    """A timed step, in the program's own time; see Note [Own time].

    Args:
        timings: What was measured in the step.
        ended: When it ended.

    Attributes:
        seconds: How long it took.
    """

    def __init__(self, timings: Timings, ended: Any) -> None:
        self._clock = timings.clock
        self._started = timings.started
        self._notes = timings.notes
        self._calls = timings.calls

        spans = sorted((self._at(first), self._at(last)) for first, last in self._spans())
        lengths = [max(last - first, 0.0) for first, last in spans]
        self._begun = [first for first, _ in spans]
        self._own = [0.0, *accumulate(lengths)]
        self.seconds = max(self._at(ended) - self._own[-1], 0.0)

    def table(self, link: Link | None, seen: dict[CallKey, SeenCall]) -> StepTable:
        """Return the table that the planner works on.

        Args:
            link: The link to the store.
            seen: What is known of the calls that may be run again; what this step shows is added.
        """
        candidates = [self._candidate(note) for note in self._notes]
        calls = []
        for call in self._calls:
            known = seen.setdefault(call.key, SeenCall())
            kept = 0
            if call.again:
                known.inputs = call.inputs
                candidates += self._members_of(call, known)
            else:
                self._see(call, known, candidates)
                kept = known.inputs
            begun, ended = self._lasted(call)
            calls.append(RepeatableCall(call.key, ended - begun, kept))
        candidates.sort(key=attrgetter("saved"))
        return StepTable(tuple(candidates), self.seconds, link, tuple(calls))

    def _see(self, call: CallTimes, known: SeenCall, candidates: list[Candidate]) -> None:
        """Remember the tensors that a call saved, since it was not run again."""
        begun, _ = self._lasted(call)
        mine = [each for each in candidates if each.key.call == call.key]
        known.members = tuple(replace(each, saved=each.saved - begun) for each in mine)

    def _members_of(self, call: CallTimes, known: SeenCall) -> Iterator[Candidate]:
        """The tensors that a call would have saved; see Note [Calls]."""
        begun, ended = self._lasted(call)
        asked = min((self._own_time(first) for first, _ in call.ran), default=self.seconds)
        if known.members is not None:
            for each in known.members:
                yield replace(each, saved=begun + each.saved, asked=asked)
        elif call.nbytes:
            key = TensorKey(call.key.path, LUMP, call=call.key)
            yield Candidate(key, call.nbytes, ended, asked, movable=False)

    def _lasted(self, call: CallTimes) -> tuple[float, float]:
        """When a call began and ended."""
        assert call.lasted is not None  # noqa: S101 - all calls of a timed step are timed
        begun, ended = call.lasted
        return self._own_time(begun), self._own_time(ended)

    def _candidate(self, note: TensorTimes) -> Candidate:
        rebuilt = note.group == "rebuilt"
        reads = note.ran if rebuilt else note.asked
        asked = [self._own_time(first) for first, _ in reads]
        candidate = Candidate(
            key=note.key,
            nbytes=note.nbytes,
            saved=self._own_time(note.took[0]),
            asked=min(asked, default=self.seconds),
            coded=note.coded,
            coding=self._sum(note.coding),
            movable=rebuilt or note.group == "moved",
        )
        if rebuilt:
            seconds = self._sum(note.ran)
            candidate = replace(candidate, rebuild=seconds, extra=note.extra)
        return candidate

    def _spans(self) -> Iterator[tuple[Any, Any]]:
        for note in self._notes:
            yield note.took
            # Decoding follows the read of its bytes; each has its own span.
            yield from {*note.asked, *note.ran, *note.coding[1:]}
        for call in self._calls:
            yield from call.ran

    def _sum(self, spans: list[tuple[Any, Any]]) -> float:
        return sum(self._clock.between(first, last) for first, last in spans)

    def _at(self, moment: Any) -> float:
        return self._clock.between(self._started, moment)

    def _own_time(self, moment: Any) -> float:
        """The program's own seconds from the step's beginning until a moment."""
        at = self._at(moment)
        return at - self._own[bisect_right(self._begun, at - 1e-9)]
