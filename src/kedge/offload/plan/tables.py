"""What a plan is made of: the saved tensors of a step, when each is needed, and how fast bytes move."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kedge.offload.engine.policy import Choice


class TensorKey(NamedTuple):
    """Which saved tensor: the same one in each step.

    Attributes:
        path: The innermost module that saves it; None outside of all.
        number: Which one of that module it is.
        nth: Which one of that name it is in the step, where a module is called several times.
    """

    path: str | None
    number: int
    nth: int = 0


class Treatment(NamedTuple):
    """One thing that can be done with a saved tensor.

    Attributes:
        choice: What.
        kept: The bytes that stay in memory.
        moved: The bytes that go over the link, each way.
        seconds: What it computes for it.
    """

    choice: Choice
    kept: int
    moved: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Candidate:
    """A saved tensor that something can be done with.

    Attributes:
        key: Which one.
        nbytes: Its bytes.
        saved: When it is saved, in seconds of computing since the step began.
        asked: When it is asked for first.
        rebuild: The seconds that computing it again takes; None if it cannot be.
        extra: The bytes that are kept to compute it again.
        coded: The bytes that a codec makes of it; None without one, or if it does not apply.
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

    def ways(self, link: Link | None) -> Iterator[Treatment]:
        """Yield what can be done with it besides keeping it."""
        if self.rebuild is not None and self.extra < self.nbytes:
            yield Treatment(Choice.REBUILD, self.extra, seconds=self.rebuild)
        if self.coded is not None and self.coded < self.nbytes:
            in_memory = link is None or not self.movable
            yield Treatment(
                Choice.COMPRESS, self.coded if in_memory else 0, 0 if in_memory else self.coded, self.coding
            )
        if link is not None and self.movable:
            yield Treatment(Choice.MOVE, 0, self.nbytes)


@dataclass(frozen=True)
class Link:
    """The way to a store and back.

    Attributes:
        name: The store's name.
        write: Bytes a second that go out.
        read: Bytes a second that come back.
        overlaps: Whether bytes move beside the computation, or it waits for each.
        window: The bytes in memory that may be on their way.
    """

    name: str
    write: float
    read: float
    overlaps: bool = False
    window: int = 0


@dataclass(frozen=True)
class StepTable:
    """A step as a planner sees it.

    Attributes:
        candidates: Its saved tensors, in the order in which they are saved.
        step: How long the step takes when all of them are kept, in seconds.
        link: Where bytes can go; None: nowhere.
    """

    candidates: tuple[Candidate, ...]
    step: float
    link: Link | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all saved tensors."""
        return sum(each.nbytes for each in self.candidates)


class Limit(NamedTuple):
    """What a plan has to stay within; one of the two.

    Attributes:
        memory: Bytes that saved tensors may take at the peak.
        slowdown: How many times as long as with all kept a step may take.
    """

    memory: int | None = None
    slowdown: float | None = None

    def __str__(self) -> str:
        """As it was given."""
        return f"max_memory={self.memory:,} bytes" if self.memory is not None else f"max_slowdown={self.slowdown}"
