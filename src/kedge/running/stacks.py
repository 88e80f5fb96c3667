"""Whether a thread is inside PyTorch's code that goes through tables of hooks, and may not find them changed."""

from __future__ import annotations

import sys
import threading
from types import FrameType

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from kedge.torch_internals.accelerators import is_capturing

_CALL = modules.__file__
_INSIDE = frozenset(
    file
    for file in (
        _CALL,
        optimizers.__file__,
        torch.autograd.__file__,
        torch.autograd.graph.__file__,
        torch.autograd.function.__file__,
    )
    if file is not None
)


def is_outermost_call(frame: FrameType | None) -> bool:
    """Whether a hook before a module's call runs inside no other call, backward pass or optimizer's step.

    Args:
        frame: The frame that called the hook.
    """
    while frame is not None and frame.f_code.co_filename == _CALL:
        frame = frame.f_back
    return not _is_inside(frame) and not is_capturing()


def all_are_outside() -> bool:
    """Whether no thread but this one is inside PyTorch, and this one's callers are not either."""
    mine = threading.get_ident()
    others = (frame for thread, frame in sys._current_frames().items() if thread != mine)
    return (
        not _is_inside(sys._getframe(1)) and not any(map(_is_inside, others)) and not is_capturing()
    )


def _is_inside(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename in _INSIDE:
            return True
        frame = frame.f_back
    return False
