"""What taps and gates need of the session that they belong to."""

from __future__ import annotations

from collections import deque
from typing import Protocol

from kedge.errors import ActionDisabled
from kedge.flow import Event
from kedge.hooks.firing.schedule import StepClock
from kedge.hooks.placing.installed import InstalledHooks


class ShownTap(Protocol):
    """A tap, as a timeline shows it."""

    @property
    def label(self) -> str:
        """The action's name in messages."""


class Owner(Protocol):
    """The session of taps and gates.

    Attributes:
        on_error: What an action's failure does: "raise" it, or "warn" and disable the action.
        clock: Counts the steps and the backward passes.
        mounts: What the session has put into PyTorch's tables.
        fired: The latest firings, for the timeline; None where none is kept.
        ended: Whether the session is over.
    """

    on_error: str
    clock: StepClock
    mounts: InstalledHooks
    fired: deque[tuple[ShownTap, Event]] | None
    ended: bool

    def complain(self, warning: ActionDisabled) -> None:
        """Report that an action was switched off."""
