"""A step of the program, and its kinds.

# Note [Three kinds of steps]
A *measured* step has the statistics of every value. A *guarded* step has the loss and the norm of
all gradients, and checks whether they are finite; it hooks no module. A *skipped* step has its loss
and a check whether that and a few small gradients are finite, see Note [Ends of gradients] in
`kedge.watch.records.gradient_checks`; nothing more. The first steps are all measured,
since most mistakes show there; then as many as the budget pays for.

# Note [Cold caches]
The program's own work empties the processor's caches between two hooks. Then a hook waits for every
function that it calls and every object that it reads: counting a step takes 0.8 microseconds when
repeated, and 7 between the steps of a small model. So the hooks of skipped steps call as few
functions, and read as few objects, as they can.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class StepKind(IntEnum):
    """The kind of a step; see Note [Three kinds of steps]."""

    SKIPPED = 0
    GUARDED = 1
    MEASURED = 2


@dataclass(frozen=True)
class Step:
    """A step that begins; `kedge.watch.step_kinds.StepKinds` passes it to all that prepare for it.

    Attributes:
        kind: Its kind. If it is followed by others of its kind, it stands for all of them.
        finding: Whether it searches for new roots.
        hooked: Whether the hooks of measured steps stay, because it is one or for the sake of
            compiled code.
        by_passes: Whether forward passes may be the steps.
    """

    kind: StepKind
    finding: bool
    hooked: bool
    by_passes: bool

    @property
    def is_measured(self) -> bool:
        """Whether it measures every value."""
        return self.kind is StepKind.MEASURED
