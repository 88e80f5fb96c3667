"""Calls of dropout that are active in evaluation mode."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kedge.store.events import ActiveDropout
from kedge.torch_internals import modes
from kedge.torch_internals.module_tables import modules_in
from kedge.torch_internals.source_lines import source_of
from kedge.watch.models.backward_start import programs_line

_MOST = 50
"""Most calls that are kept."""

_DROPOUTS = (
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
)


class DropoutLook(TorchFunctionMode):
    """Sees the calls of dropout in one forward pass of a model in evaluation mode.

    `torch.nn.functional.dropout` is active unless it is told that there is no training, and so is
    the ``dropout_p`` of `torch.nn.functional.scaled_dot_product_attention`.

    Attributes:
        found: The calls that were active, by module and line.
    """

    def __init__(self, label: Callable[[str], str]) -> None:
        super().__init__()
        self.found: dict[ActiveDropout, None] = {}
        self._label = label
        self._paths: dict[int, str] = {}
        self._is_up = False

    def begin(self, module: nn.Module) -> None:
        """Prepare for the forward of the model."""
        self._paths = {id(inside): path for path, inside in modules_in(module).items()}

    def put_up(self) -> None:
        """Begin to see the thread's operations; outside of own work."""
        if not self._is_up:
            self._is_up = True
            modes.push_function_mode(self)

    def take_down(self) -> None:
        """See nothing any more; outside of own work."""
        if self._is_up:
            self._is_up = False
            modes.take_off(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and keep it if it is an active dropout."""
        kwargs = kwargs or {}
        if self._is_up and len(self.found) < _MOST:
            share = _dropped_share(func, args, kwargs)
            if share > 0:
                self._keep(func.__name__, share)
        return func(*args, **kwargs)

    def _keep(self, name: str, share: float) -> None:
        frame = programs_line(sys._getframe(1))
        if frame is None:
            return
        line = source_of(frame)
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        arguments = (frame.f_locals.get(name) for name in names)
        path = next((self._paths[id(a)] for a in arguments if id(a) in self._paths), None)
        call = ActiveDropout(
            function=name,
            share=share,
            module=None if path is None else self._label(path),
            file=line.file,
            line=line.line,
            text=line.text,
        )
        self.found[call] = None


def _dropped_share(func: Any, args: Any, kwargs: Any) -> float:
    """Return the share of elements that a call drops; 0 if it is no dropout, or not active."""
    if func is functional.scaled_dot_product_attention:
        share = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    elif func in _DROPOUTS:
        given = _signature(func).bind(*args, **kwargs)
        given.apply_defaults()
        share = given.arguments["p"] * bool(given.arguments["training"])
    else:
        return 0.0
    return float(share) if isinstance(share, (int, float)) else 0.0


@cache
def _signature(func: Any) -> inspect.Signature:
    return inspect.signature(func)
