"""What an operation fills after autograd has saved it.

# Note [Filled later]
`torch.rrelu` saves its noise while that is still blank, then draws it, and no version counts that. Where the tensor itself is
held it is right in backward; bytes that were taken when it was saved are not. The hook is not told which operation saves: the
code that calls it names it.
"""

from __future__ import annotations

import sys
from types import FrameType

from torch import Tensor

_FILLING = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})
_PASSING = frozenset({"__torch_function__", "__call__"})
"""What may lie between ours and the call: a mode, or an overload, calls the operation for the program."""


def is_filled_later(value: Tensor) -> bool:
    """Tell whether a tensor that is being saved may not have its values yet; see Note [Filled later]."""
    if value.requires_grad or not value.is_floating_point():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("kedge."):
        frame = frame.f_back
    while frame is not None and _FILLING.isdisjoint(frame.f_code.co_names):
        if frame.f_code.co_name not in _PASSING:
            return False
        frame = frame.f_back
    return frame is not None
