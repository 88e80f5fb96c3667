"""Modules that are skipped: what runs in place of a forward.

# Note [Skipped modules]
PyTorch has no hook that keeps a forward from running. So the forward-pre hook puts another function
in the place of the forward of its call. What it returns is the output of the call: all forward
hooks see it. It is called with the inputs as the last forward-pre hook has left them. As at any
site, several actions run in the order of their attachment; since none needs the value of the one
before, only the last is called.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from kedge.errors import EditError
from kedge.flow import Event
from kedge.hooks.firing.fire import failed
from kedge.hooks.firing.gate import Gate
from kedge.hooks.firing.tap import Spec, Tap, skips
from kedge.hooks.forward_source import structure_returned
from kedge.hooks.placing.forward_calls import forward_call
from kedge.sites.site import Site
from kedge.torch_internals.module_calls import shows_forward


class SkippedForward:
    """Runs in place of a module's forward in one call.

    Attributes:
        forward: The forward.
        skips: The taps that skip it, each with the event of the call.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.skips: list[tuple[Tap, Event]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the last tap; that of the forward if each has failed and is switched off."""
        __tracebackhide__ = True
        while self.skips:
            tap, event = self.skips[-1]
            try:
                output = tap.action(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - raised with its place, or reported
                self.skips.pop()
                given: Any = next(iter((*args, *kwargs.values())), None)
                failed(tap, given, event, error)
                continue
            for each, seen in self.skips:
                each.fired += 1
                each.edited = True
                each.note(seen)
            return output
        return self.forward(*args, **kwargs)


def skip_forward(gate: Gate, module: nn.Module, call: int, recompute: bool) -> None:
    """Put the taps of a gate that are due in the place of the forward of a module's call.

    Called in a forward-pre hook; see Note [Skipped modules].
    """
    event = gate.passes.event(Site(gate.passes.label(gate.path)), call, recompute)
    for tap in gate.taps["out"]:
        on = tap.repeats() if recompute else tap.on
        if not (on and tap.means(event)):
            continue
        running = forward_call(module, sys._getframe(1))
        if running is None:
            raise EditError(
                f"{tap.label} at {event.site}: its forward-pre hooks run outside of a call of "
                "PyTorch's, so its forward cannot be kept from running"
            )
        if not isinstance(running.forward, SkippedForward):
            running.forward = SkippedForward(running.forward)
        running.forward.skips.append((tap, event))


def apart(spec: Spec) -> tuple[Spec | None, Spec | None]:
    """Return the actions that skip a module, and all others; None without any."""
    skipping = tuple(action for action in spec.actions if skips(action))
    if not skipping:
        return None, spec
    others = tuple(action for action in spec.actions if not skips(action))
    if not others:
        return spec, None
    return spec._replace(actions=skipping), spec._replace(actions=others)


def check_skipped(module: nn.Module, site: Site, actions: tuple[Any, ...]) -> None:
    """Refuse to skip a module where that cannot be done, or where its input cannot be its output.

    Raises:
        EditError: If this PyTorch does not show the forward of a call; or if the first input would
            be the output of a module whose source shows that it returns another structure.
    """
    if not shows_forward():
        raise EditError(
            f"{actions[0]!r} at {site}: this PyTorch does not let a hook replace the forward of a "
            "call; put another module in its place"
        )
    for action in actions:
        returned = structure_returned(module) if getattr(action, "passes_on", False) else None
        if returned is not None:
            raise EditError(
                f"{action!r} at {site}: its first input cannot be its output, because the forward "
                f"of {type(module).__name__} returns {returned}; give the whole output, as in "
                "kedge.skip(lambda x, *args, **kwargs: (x, None))"
            )
