"""The session's interface for its taps and gates."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from torch import nn

from kedge.errors import ActionDisabled
from kedge.flow import Event
from kedge.hooks.firing.schedule import StepClock
from kedge.hooks.placing.installed import InstalledHooks


class ShownTap(Protocol):
    """A tap, with the label that a timeline shows."""

    @property
    def label(self) -> str:
        """The action's name in messages."""


Fired: TypeAlias = tuple[ShownTap, Callable[..., Event], Sequence[Any]]
"""A firing: the tap, and a function that returns the event, whenever it is called, with its arguments."""


def known(event: Event) -> Event:
    """Return an event that was made when its tap fired, as the function of `Fired`."""
    return event


class Owner(Protocol):
    """The session of taps and gates.

    Attributes:
        on_error: The effect of an action's failure: "raise" it, or "warn" and disable the action.
        clock: Counts the steps and the backward passes.
        installed: The session's hooks in PyTorch's tables.
        fired: The latest firings, for the timeline; None without one.
        ended: Whether the session has ended.
        in_graph: How many operators of its hooks compiled code has run.
        measuring: Seconds that its hooks have taken to measure values.
    """

    on_error: str
    clock: StepClock
    installed: InstalledHooks
    fired: deque[Fired] | None
    ended: bool
    in_graph: int
    measuring: float

    def module_of(self, gate: Any) -> nn.Module | None:
        """Return the module of a gate.

        None for a tensor or node, and if the model no longer exists.
        """

    def complain(self, warning: ActionDisabled) -> None:
        """Warn that an action was switched off."""
