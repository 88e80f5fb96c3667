"""The call that an event belongs to: its module, inputs and output, found among the running frames when asked for.

Nothing is kept for it, so an action that does not ask pays nothing, and no value lives longer
because of an event.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn

from kedge.errors import EventError

_LOOP = "kedge.hooks.firing.fire"
"""The file whose frames run an action; they hold the event, the tap and the value as it is now."""


class CallOfEvent:
    """What an event shows of its call while its action runs."""

    __slots__ = ()

    @property
    def module(self) -> nn.Module:
        """The module; for a parameter its owner, for an operation or a saved tensor the module whose forward runs.

        Raises:
            EventError: If the action is over, or there is no module, as for a tensor.
        """
        module: nn.Module = _call_of(self, "module").module
        return module

    @property
    def args(self) -> tuple[Any, ...]:
        """The module's arguments by position, as it was given them; at ``:in`` with the edits so far.

        Tensors that an in-place module has overwritten are copies made before.

        Raises:
            EventError: If the action is over, or the call is, as for gradients; or if the module
                has overwritten a tensor, which could not be known before.
        """
        args: tuple[Any, ...] = _call_of(self, "args").given[0]
        return args

    @property
    def kwargs(self) -> dict[str, Any]:
        """The module's arguments by name; otherwise as `args`."""
        kwargs: dict[str, Any] = _call_of(self, "kwargs").given[1]
        return kwargs

    @property
    def output(self) -> Any:
        """The module's whole output, with the edits so far; at ``:out`` alone.

        Raises:
            EventError: If the action is over, or the site is another.
        """
        return _call_of(self, "output").output


def _call_of(event: Any, what: str) -> Any:
    """Return the `PresentCall` of an event whose action runs on this thread."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") == _LOOP:
            here = frame.f_locals
            if here.get("event") is event and "tap" in here:
                return here["tap"].call(here["value"], event, frame)
        frame = frame.f_back
    raise EventError(
        f"event.{what} of {event.site} was read after its action had returned, or on another thread; nothing of a call is "
        "kept for its events, so read it inside the action"
    )
