"""The kinds of steps.

# Note [Three kinds of steps]
A *measured* step has the statistics of every value. A *guarded* step has the loss and the norm of all gradients, and
checks whether they are finite; it hooks no module. A *skipped* step is counted and, on a CPU, its loss checked for
being finite; nothing more. The first steps are all measured, since most mistakes show there; then as many as the budget
pays for.
"""

from __future__ import annotations

from enum import IntEnum


class StepKind(IntEnum):
    """The kind of a step; see Note [Three kinds of steps]."""

    SKIPPED = 0
    GUARDED = 1
    MEASURED = 2
