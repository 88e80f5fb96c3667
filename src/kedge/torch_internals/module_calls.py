"""The code with which PyTorch calls a module, its hooks and its forward.

It identifies calls among the running frames.

# Note [The forward of one call]
PyTorch reads ``module.forward`` before it calls the forward-pre hooks, and keeps what it found in a
variable of the call, which the function that calls the hooks and then the forward shares with it.
So a forward-pre hook can put another function there: for this call alone, on its thread, and with
nothing in the module or its class.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import CellType, CodeType, FrameType
from typing import Any

from torch import nn

from kedge.torch_internals.corners import find


class _CallFinder(nn.Module):
    """A module that finds the code of a module call when it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.code: CodeType | None = None

    def forward(self) -> None:
        """Keep the code of PyTorch's outermost frame around this, except that of ``__call__``."""
        frame: FrameType | None = sys._getframe(1)
        begun = getattr(nn.Module.__call__, "__code__", None)
        while frame is not None and frame.f_locals.get("self") is self:
            if self.code is None or frame.f_code is not begun:
                self.code = frame.f_code
            frame = frame.f_back


def _found_by_calling() -> CodeType | None:
    asked = _CallFinder()
    asked()
    return asked.code


_named: Any = find("torch.nn:Module._call_impl")
CALL: CodeType | None = _found_by_calling() if _named is None else _named.__code__
"""The code of a module's call, with the arguments ``self``, ``args`` and ``kwargs``."""

SLOW: Any = getattr(find("torch.nn:Module._slow_forward"), "__code__", "none")
"""The code between a call and the forward while `torch.jit.trace` is under way."""


def calls_around(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames of the module calls that run in or around a frame, the innermost first."""
    while frame is not None:
        if frame.f_code is CALL:
            yield frame
        frame = frame.f_back


def has_raised(module: nn.Module) -> bool:
    """Whether the forward hooks of a module run because its call raised an error.

    PyTorch then calls those that were registered with ``always_call``, while it handles the error.
    """
    error = sys.exception()
    if error is None:
        return False
    caught = error.__traceback__
    if caught is None or caught.tb_frame.f_code is not CALL:
        return False
    return caught.tb_frame.f_locals["self"] is module


def raised_from(frame: int) -> bool:
    """Whether the error that is handled has passed through a frame of a module's call, given the frame's id.

    For forward hooks that run while their module's call handles its error: the outermost frames of
    the error are those of that call.
    """
    error = sys.exception()
    passed = None if error is None else error.__traceback__
    while passed is not None and id(passed.tb_frame.f_code) in CALLS:
        if id(passed.tb_frame) == frame:
            return True
        passed = passed.tb_next
    return False


def inside(code: CodeType | None, name: str) -> Iterator[int]:
    """Yield the ids of the code of a function defined inside another."""
    for constant in getattr(code, "co_consts", ()):
        if isinstance(constant, CodeType) and constant.co_name == name:
            yield id(constant)


CALLS = frozenset(() if CALL is None else (id(CALL), *inside(CALL, "inner")))
"""The ids of all code from which a module's hooks and its forward are called."""


_FORWARD = "forward_call"
"""The name of the variable; see Note [The forward of one call]."""


def forward_cell(module: nn.Module, frame: FrameType | None) -> CellType | None:
    """Return the variable in which the call of a module that runs in a frame keeps the forward.

    None if there is no such call or variable; see Note [The forward of one call].
    """
    call = next(calls_around(frame), None)
    if call is None:
        return None
    here = call.f_locals
    if here["self"] is not module:
        return None
    within: Any = here.get("inner")
    shared = getattr(getattr(within, "__code__", None), "co_freevars", ())
    if _FORWARD not in shared:
        return None
    cell: CellType = within.__closure__[shared.index(_FORWARD)]
    return cell


def shows_forward() -> bool:
    """Whether this PyTorch keeps the forward of a call where a forward-pre hook can put another."""
    constants = getattr(CALL, "co_consts", ())
    return any(_FORWARD in getattr(constant, "co_freevars", ()) for constant in constants)


def module_frame(frame: FrameType) -> FrameType:
    """Return the frame that calls a module's hooks and its forward, searched outwards from another.

    It is that other one if there is none.
    """
    within: FrameType | None = frame
    while within is not None and id(within.f_code) not in CALLS:
        within = within.f_back
    return within or frame
