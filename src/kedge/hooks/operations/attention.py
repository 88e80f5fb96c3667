"""Operations inside attention, which PyTorch hides from function modes, or changes under one.

# Note [Inside attention]
`F.multi_head_attention_forward` passes itself to the mode as one operation and then runs with the
mode off. So Kedge runs a copy of the function with the same code, in which the check for modes
returns False, with the mode on: the same operations on the same tensors. Nothing in PyTorch
changes.

# Note [Fused attention]
Without grad, `nn.MultiheadAttention` has a fused path with other bits, which it does not take under
a mode. So no mode is on in a call that would take it. The forward's own code decides: it runs up to
the decision.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.modules import activation


class _Globals(dict[str, Any]):
    """The global names of a module, some of them replaced.

    The others are looked up on access.
    """

    def __init__(self, names: Mapping[str, Any], **replaced: Any) -> None:
        super().__init__(replaced, __builtins__=names["__builtins__"])
        self.names = names

    def __missing__(self, name: str) -> Any:
        try:
            return self.names[name]
        except KeyError:  # so that Python goes on to its builtins
            raise KeyError(name) from None


class _Namespace:
    """A module with some of its attributes replaced."""

    def __init__(self, module: Any, **replaced: Any) -> None:
        self.__dict__.update(replaced)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Decided(Exception):
    """Raised when attention has decided on a path.

    Attributes:
        fused: Whether it is the fused path.
    """

    def __init__(self, *, fused: bool) -> None:
        self.fused = fused


def _decide(*, fused: bool) -> Any:
    def decided(*args: Any, **kwargs: Any) -> None:
        raise _Decided(fused=fused)

    return decided


def _twin(function: Any, **replaced: Any) -> Any:
    """Return a function with the code of another, and some of its global names replaced."""
    names = _Globals(function.__globals__, **replaced)
    twin = FunctionType(
        function.__code__, names, function.__name__, function.__defaults__, function.__closure__
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


ATTENTION: Any = functional.multi_head_attention_forward
INSIDE = _twin(ATTENTION, has_torch_function=lambda tensors: False)
"""Runs attention so that a mode sees the operations inside."""
_deciding = _twin(
    nn.MultiheadAttention.forward,
    torch=_Namespace(torch, _native_multi_head_attention=_decide(fused=True)),
    F=_Namespace(functional, multi_head_attention_forward=_decide(fused=False)),
)


def is_inside(frame: FrameType) -> bool:
    """Whether a frame is one of `INSIDE`."""
    return isinstance(frame.f_globals, _Globals)


def is_fused(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call of a module takes the fused path, which it would not take under a mode."""
    if module.training or type(module).forward is not activation.MultiheadAttention.forward:
        return False
    try:
        with torch.no_grad() if not torch.is_grad_enabled() else torch.enable_grad():
            _deciding(module, *args, **kwargs)
    except _Decided as outcome:
        return outcome.fused
    except Exception:  # noqa: BLE001 - the call itself is going to raise it
        return False
    return False
