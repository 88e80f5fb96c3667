"""The input of a plan: the saved tensors of a step, when each is needed, and how fast bytes move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from kedge.offload.engine.policy import Choice

LUMP = -1
"""The number in the key of a candidate that stands for all tensors of a call."""


class CallKey(NamedTuple):
    """The key of a call of a module that may be run again, the same in each step.

    Attributes:
        path: The module.
        nth: The number of the call among those of this module in the step.
    """

    path: str
    nth: int


class TensorKey(NamedTuple):
    """The key of a saved tensor, the same in each step.

    Attributes:
        path: The innermost module that saves it; None outside of all.
        number: The number of the tensor in that module.
        nth: The number among the step's tensors with the same path and number, for a module that is
            called several times.
        call: The call that saves it, if that may be run again; `number` counts within it then.
    """

    path: str | None
    number: int
    nth: int = 0
    call: CallKey | None = None


class Treatment(NamedTuple):
    """One possible treatment of a saved tensor, with its cost.

    Attributes:
        choice: The choice.
        kept: The bytes that stay in memory.
        moved: The bytes that go over the link, each way.
        seconds: The seconds of computing.
    """

    choice: Choice
    kept: int
    moved: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A saved tensor with its possible treatments.

    Attributes:
        key: Its key.
        nbytes: Its bytes.
        saved: When it is saved, in seconds of computing since the step began.
        asked: When it is read first, in the same seconds.
        rebuild: The seconds that rebuilding takes; None if it cannot be rebuilt.
        extra: The bytes that are kept to rebuild it.
        coded: The bytes of its encoded form; None without a codec, or if the codec does not apply.
        coding: The seconds of encoding and decoding.
        movable: Whether a store takes it.
    """

    key: TensorKey
    nbytes: int
    saved: float
    asked: float
    rebuild: float | None = None
    extra: int = 0
    coded: int | None = None
    coding: float = 0.0
    movable: bool = True

    @property
    def is_lump(self) -> bool:
        """Whether it stands for all tensors of a call, which has only been seen run again."""
        return self.key.number == LUMP

    def treatments(self, link: Link | None) -> Iterator[Treatment]:
        """The treatments other than keeping."""
        if self.rebuild is not None and self.extra < self.nbytes:
            yield Treatment(Choice.REBUILD, self.extra, seconds=self.rebuild)
        if self.coded is not None and self.coded < self.nbytes:
            if link is None or not self.movable:
                yield Treatment(Choice.COMPRESS, self.coded, 0, self.coding)
            else:
                yield Treatment(Choice.COMPRESS, 0, self.coded, self.coding)
        if link is not None and self.movable:
            yield Treatment(Choice.MOVE, 0, self.nbytes)


@dataclass(frozen=True)
class Link:
    """The link to a store and back.

    Attributes:
        name: The store's name.
        write: Bytes a second to the store.
        read: Bytes a second from the store.
        overlaps: Whether bytes move beside the computation; otherwise the computation waits for
            each move.
        window: The bytes in memory that may be on their way.
    """

    name: str
    write: float
    read: float
    overlaps: bool = False
    window: int = 0


class RepeatableCall(NamedTuple):
    """A call of a module that may be run again in place of keeping what it saves.

    Attributes:
        key: Its key.
        seconds: The seconds that its second run takes.
        kept: The bytes that have to be kept for it, its inputs, beside the other candidates.
    """

    key: CallKey
    seconds: float
    kept: int = 0

    def treatments(self, number: int) -> Iterator[Treatment]:
        """The treatments of the tensors that it saves, so many of them: together they have its cost."""
        yield Treatment(Choice.RECOMPUTE, self.kept, seconds=self.seconds)
        for _ in range(number - 1):
            yield Treatment(Choice.RECOMPUTE, 0)


@dataclass(frozen=True)
class StepTable:
    """The measurements of a step that a planner works on.

    Attributes:
        candidates: Its saved tensors, in the order in which they are saved.
        step: The seconds that the step takes with all of them kept.
        link: The link to the store; None without a store.
        calls: The calls that may be run again.
    """

    candidates: tuple[Candidate, ...]
    step: float
    link: Link | None = None
    calls: tuple[RepeatableCall, ...] = ()

    @property
    def nbytes(self) -> int:
        """The bytes of all saved tensors."""
        return sum(each.nbytes for each in self.candidates)

    @cached_property
    def members(self) -> dict[CallKey, list[int]]:
        """The candidates that each call saves, by their indices."""
        found: dict[CallKey, list[int]] = {call.key: [] for call in self.calls}
        for i, each in enumerate(self.candidates):
            call = each.key.call
            if call is not None and call in found:
                found[call].append(i)
        return found


class Limit(NamedTuple):
    """The limit of a plan: one of the two.

    Attributes:
        memory: Bytes that saved tensors may take at the peak.
        slowdown: The longest step, as a multiple of the step with all tensors kept.
    """

    memory: int | None = None
    slowdown: float | None = None

    def __str__(self) -> str:
        """The argument of `kedge.offload` as text."""
        if self.memory is not None:
            return f"max_memory={self.memory:,} bytes"
        return f"max_slowdown={self.slowdown}"
