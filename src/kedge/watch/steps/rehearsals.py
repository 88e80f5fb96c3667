"""The calls by which PyTorch's pipelines learn the shapes of values, before the first micro-batch.

Each stage is called, and its backward run, on memory that holds nothing: such values belong to no
step.
"""

from __future__ import annotations

import sys
from types import FrameType

_PIPELINES = "torch.distributed.pipelining.stage"
_REHEARSAL = "_forward_metadata_inference"
_DEPTH = 24
"""Most frames between a stage's call and that of its module."""


class Rehearsals:
    """Recognizes the end of such calls."""

    def __init__(self) -> None:
        self._rehearsing = False

    def ended(self) -> bool:
        """Called when a forward pass begins: whether it is the first one after a rehearsal."""
        now = _PIPELINES in sys.modules and _is_rehearsal(sys._getframe(1))
        ended, self._rehearsing = self._rehearsing and not now, now
        return ended


def _is_rehearsal(frame: FrameType | None) -> bool:
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == _REHEARSAL and frame.f_globals.get("__name__") == _PIPELINES:
            return True
        frame = frame.f_back
    return False
