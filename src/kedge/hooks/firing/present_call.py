"""The module call that a running action belongs to, read from the frames of its gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn

from kedge.errors import EventError
from kedge.flow import Event
from kedge.hooks.firing.given_inputs import InputOverwritten
from kedge.sites import leaves
from kedge.torch_internals.module_calls import calls_around
from kedge.torch_internals.module_tables import is_replica

_HOOKS = __name__.partition(".firing")[0]
"""The package of all gates."""


@dataclass(frozen=True)
class PresentCall:
    """The call behind an event whose action is running; made when the action asks, and dropped at once.

    Attributes:
        gate: The gate that fires.
        value: The value as the action received it.
        event: The event.
        frame: The frame that runs the action.
    """

    gate: Any
    value: Tensor
    event: Event
    frame: FrameType

    @property
    def module(self) -> nn.Module:
        """The module.

        Raises:
            EventError: If there is none, or none any more.
        """
        here = self._within("module")
        module: nn.Module | None = here["module"] if here else self.gate.owner.module_of(self.gate)
        if module is None:
            raise EventError(
                f"{self.event.site} belongs to no module: it is a tensor or an "
                "autograd node, or its model is gone"
            )
        return module

    @property
    def given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The inputs of the call: by position, and by name.

        Raises:
            EventError: If the call is over, or runs as compiled code; or if the module has
                overwritten an input.
        """
        site = self.event.site
        if site.is_gradient:
            raise EventError(
                f"{site} fires in the backward pass, when the module's call is "
                'over, so event.args is gone; record ":in" or '
                '":out" in the forward'
            )
        if site.kind == "in" and site.op is None:
            here = self._within("module", "args", "kwargs")
            if here:
                args, kwargs = here["args"], here["kwargs"]
                return self.gate.replaced(args, kwargs, self._edits())  # type: ignore[no-any-return]
        module = self.module
        for frame in calls_around(self.frame.f_back):
            called = frame.f_locals["self"]
            if called is module or is_replica(called):
                return self._as_given(frame.f_locals["args"], frame.f_locals["kwargs"])
        raise EventError(
            f"{site}: no call of its module is running on this thread, as in "
            "compiled code, so event.args is unknown"
        )

    def _as_given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs as they were before the module ran.

        See Note [Inputs as they were].
        """
        here = self.gate.passes.here
        noted = here.notes.inputs_of(self.gate)
        if noted is None:
            return args, kwargs
        try:
            return noted.as_given(args), noted.as_given(kwargs)
        except InputOverwritten as error:
            self.gate.overwrites = True
            raise EventError(
                f"{self.event.site}: the module has overwritten its input, so "
                "event.args no longer holds what it was given; it is copied from "
                'the next call on. For this call, record ":in" with '
                "record(copy=True)"
            ) from error

    @property
    def output(self) -> Any:
        """The whole output of the call.

        Raises:
            EventError: If the site is no output, or belongs to compiled code.
        """
        site = self.event.site
        if site.kind == "out" and site.op is None:
            here = self._within("module", "args", "output")
            if here:
                return leaves.put(here["output"], self._edits())
        raise EventError(
            'event.output exists only at ":out" of a module outside of '
            f'compiled code, and this is "{site}"'
        )

    def _edits(self) -> dict[str, Tensor]:
        """Return the tensors that earlier actions, and this one's value, have put in place of others."""
        return {
            **self._within("found", "new").get("new", {}),
            self.event.site.leaf or "": self.value,
        }

    def _within(self, *names: str) -> Mapping[str, Any]:
        """Return the variables of the gate's innermost frame that has these; empty without one.

        The variables of the program's frames are not read: before Python 3.13 that would keep their
        values alive.
        """
        frame = self.frame.f_back
        while frame is not None:
            if _is_of_gate(frame, names):
                here = frame.f_locals
                if here["self"] is self.gate and all(name in here for name in names):
                    return here
            frame = frame.f_back
        return {}


def _is_of_gate(frame: FrameType, names: tuple[str, ...]) -> bool:
    """Whether a frame runs a method of Kedge's hooks that has these variables."""
    if not str(frame.f_globals.get("__name__")).startswith(_HOOKS):
        return False
    code = frame.f_code
    return code.co_varnames[:1] == ("self",) and {*code.co_varnames, *code.co_cellvars}.issuperset(
        names
    )
