"""The plan: the treatment of each saved tensor, and the predicted cost. Prints as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from kedge.offload.engine.policy import Choice
from kedge.offload.plan.predict import PredictedCost
from kedge.offload.plan.tables import CallKey, Limit, Link, StepTable, TensorKey, Treatment

_ORDER = (Choice.KEEP, Choice.REBUILD, Choice.RECOMPUTE, Choice.MOVE, Choice.COMPRESS)


@dataclass(frozen=True)
class PlanToCome:
    """The place of a plan that is not decided yet: false, and prints as what it waits for.

    Attributes:
        limit: The limit that the plan will be made for.
    """

    limit: Limit

    def __bool__(self) -> bool:
        """Return False."""
        return False

    def __str__(self) -> str:
        """The reason as text."""
        return (
            f"plan for {self.limit}: not decided yet; "
            "it is made from the times of a whole step, the second one or a later one"
        )


@dataclass(frozen=True)
class OffloadPlan:
    """A choice for each saved tensor of a step.

    Attributes:
        table: The step that it was made from.
        limit: The limit that it was made for.
        treatments: The treatment of each candidate of the table, in its order.
        outcome: The predicted cost.
        peak: The most bytes that saved tensors take, with those on their way.
        hidden: The bytes that the link could move each way fully hidden behind the computation.
        everything: The seconds that would be exposed if all tensors were moved.
        measured: The time of a step as a multiple of the time with all tensors kept, as measured;
            None if it was not.
    """

    table: StepTable
    limit: Limit
    treatments: tuple[Treatment, ...]
    outcome: PredictedCost
    peak: int
    hidden: int
    everything: float
    measured: float | None = None

    @cached_property
    def choices(self) -> dict[TensorKey, tuple[Choice, int]]:
        """The choice for each saved tensor, and the bytes that it was planned for."""
        pairs = zip(self.table.candidates, self.treatments, strict=True)
        return {each.key: (treatment.choice, each.nbytes) for each, treatment in pairs}

    @cached_property
    def once(self) -> frozenset[CallKey]:
        """The calls that are not run again, of those that may be."""
        found = set()
        for key, members in self.table.members.items():
            if all(self.treatments[i].choice is not Choice.RECOMPUTE for i in members):
                found.add(key)
        return frozenset(found)

    @cached_property
    def repeats(self) -> bool:
        """Whether it runs calls again."""
        return any(one.choice is Choice.RECOMPUTE for one in self.treatments)

    @cached_property
    def is_known(self) -> bool:
        """Whether it treats no lump as tensors that are kept: see Note [Calls] in `measured_step`."""
        pairs = zip(self.table.candidates, self.treatments, strict=True)
        return not any(each.is_lump and one.choice is Choice.KEEP for each, one in pairs)

    @property
    def slowdown(self) -> float:
        """The predicted time of a step as a multiple of the time with all tensors kept.

        It is a lower bound.
        """
        return self._times(self.outcome.exposed)

    @property
    def freed(self) -> int:
        """The bytes that are not kept."""
        return self.table.nbytes - self.outcome.kept

    def _times(self, exposed: float) -> float:
        if not self.table.step:
            return 1.0
        return 1 + exposed / self.table.step

    @property
    def feasible(self) -> bool:
        """Whether the plan stays within its limit.

        Always true of a limit of time, because keeping all costs none.
        """
        return self.limit.memory is None or self.peak <= self.limit.memory

    def bytes_of(self, choice: Choice) -> tuple[int, int]:
        """The number of tensors with a choice, and their bytes."""
        pairs = zip(self.table.candidates, self.treatments, strict=True)
        sizes = [each.nbytes for each, treatment in pairs if treatment.choice is choice]
        return len(sizes), sum(sizes)

    def __str__(self) -> str:
        """The table: tensors and bytes of each choice, and the predicted cost."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        table = self.table
        count = len(table.candidates)
        yield f"plan for {self.limit}: {count} saved tensors of {size(table.nbytes)}"
        for choice in _ORDER:
            number, nbytes = self.bytes_of(choice)
            if number:
                yield f"  {choice.value:9}{number:6}  {size(nbytes):>9}{self._remark(choice)}"
        yield (
            f"  predicted: {size(self.peak)} at the peak instead of {size(table.nbytes)},"
            f" a step of {self.slowdown:.2f} x {table.step * 1e3:.0f} ms at least"
        )
        if self.measured is not None:
            yield f"  measured: a step of {self.measured:.2f} x that with everything kept"
        if table.link is not None:
            yield from self._floor(table.link)
        if not self.feasible:
            yield f"  {size(self.peak)} is the least possible: every possible measure is taken"

    def _remark(self, choice: Choice) -> str:
        if choice is Choice.KEEP:
            return ""
        treatments = [each for each in self.treatments if each.choice is choice]
        kept = sum(each.kept for each in treatments)
        seconds = sum(each.seconds for each in treatments)

        parts = []
        if kept:
            parts.append(f"{size(kept)} of it stay")
        if seconds:
            parts.append(f"{seconds * 1e3:.1f} ms")
        if not parts:
            return ""
        return f"  ({', '.join(parts)})"

    def _floor(self, link: Link) -> Iterator[str]:
        rates = f"  {link.name}: {size(link.write)}/s out, {size(link.read)}/s back"
        if link.overlaps:
            hidden = f"which hides {size(self.hidden)} each way in a step"
            yield f"{rates}, beside the computation, {hidden}"
        else:
            yield f"{rates}; a step waits for each move"

        total = size(self.table.nbytes)
        all_moved = self._times(self.everything)
        if all_moved > 1.005:
            yield (
                f"  moving all {total} would take {all_moved:.2f} x at least: "
                "no order of moves hides this; "
                "move fewer bytes (rebuild, a codec, checkpoints)"
            )
        else:
            yield f"  the computation could hide moving all {total}"


def size(nbytes: float) -> str:
    """Return bytes as text, in MB or GB."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.1f} MB"
