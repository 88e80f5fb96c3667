"""Where a thread is: the modules whose calls it runs, and whether it is in a backward pass."""

from __future__ import annotations

from collections.abc import Iterable
from types import CodeType, FrameType
from typing import NamedTuple

from torch import nn

from kedge.frames import is_between, is_installed
from kedge.torch_internals.corners import find
from kedge.torch_internals.graph_task import RUN
from kedge.torch_internals.module_calls import CALL


class RunningCalls(NamedTuple):
    """What the frames of a thread say. Nothing here keeps a frame, and so nothing keeps the program's tensors.

    Attributes:
        modules: The modules that are called, the innermost first.
        in_backward: Whether a backward pass is under way.
        code: The code of the innermost frame that is the program's own; None without one.
        line: Its line.
    """

    modules: tuple[nn.Module, ...]
    in_backward: bool
    code: CodeType | None
    line: int


def running_calls(frames: Iterable[tuple[FrameType, int | None]]) -> RunningCalls:
    """Read the calls from frames with their lines, the innermost first."""
    run = find(RUN)
    modules: list[nn.Module] = []
    in_backward = False
    code: CodeType | None = None
    line = 0
    for frame, number in frames:
        if frame.f_code is CALL:
            modules.append(frame.f_locals["self"])
        elif frame.f_code is run:
            in_backward = True
        elif code is None and _is_own(frame.f_code.co_filename):
            code = frame.f_code
            line = number or code.co_firstlineno
    return RunningCalls(tuple(modules), in_backward, code, line)


def _is_own(file: str) -> bool:
    return not is_between(file) and not is_installed(file)
