"""The program, run again until it comes to the backward pass that was kept.

# Note [Where a step runs again]
A kept step has the values of its variables, models and optimizers, and not what they are: classes,
functions, devices. That is in the program's code, which is run again until it is about to begin a
backward pass on the same line, in its first iteration as a rule. There everything stands where it
stood in the kept step: the values are put in, and the lines of the loss are run. The program does
not go on, so this replaces `torch.autograd.backward`, as `kedge examine` does.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer

from kedge.hooks.placing.module_calls import running
from kedge.hooks.roots import unwrapped
from kedge.repro.kept.kept_pass import KeptPass
from kedge.repro.kept.step_inputs import MOST_TRIES, line_below
from kedge.repro.step.program_lines import StatementsAgain, position_in, statements_before
from kedge.watch.models.optimizers import living
from kedge.watch.run.block import WatchBlock


@dataclass(frozen=True)
class ProgramAtPass:
    """The program at a backward pass.

    Attributes:
        tries: Ever more of the statements that led to it.
        models: The models that were called until then, in their order.
        optimizers: The optimizers that exist.
        backward: PyTorch's own `torch.autograd.backward`.
    """

    tries: list[StatementsAgain]
    models: list[nn.Module]
    optimizers: list[Optimizer]
    backward: Callable[..., None]


class ProgramAgain:
    """Takes over the program that runs in this process; see Note [Where a step runs again].

    Args:
        kept: The pass.
        reached: Called when the program is about to begin it; does not return.
    """

    def __init__(self, kept: KeptPass, reached: Callable[[ProgramAtPass], None]) -> None:
        self._kept = kept
        self._reached = reached
        self._models: list[nn.Module] = []
        self._is_over = False

    def begin(self) -> None:
        """Follow the program; PyTorch has just been imported."""
        WatchBlock.is_off = True
        register_module_forward_pre_hook(self._module_called)
        plain: Any = torch.autograd.backward

        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            frame = sys._getframe()  # noqa: SLF001
            if not self._is_over and self._is_kept_line(frame):
                self._is_over = True
                tries = list(islice(statements_before(frame), MOST_TRIES))
                torch.autograd.backward = plain
                WatchBlock.is_off = False
                self._reached(ProgramAtPass(tries, self._models, living(), plain))
            return plain(tensors, *args, **kwargs)

        torch.autograd.backward = backward

    def _module_called(self, module: nn.Module, _: Any) -> None:
        if self._is_over or torch.compiler.is_compiling():
            return
        around = running()
        if len(around) != 1 or around[0] is not module:
            return
        model = unwrapped(module)
        if all(each is not model for each in self._models):
            self._models.append(model)

    def _is_kept_line(self, frame: FrameType) -> bool:
        line = line_below(frame)
        kept = self._kept.inputs.line
        if line is None:
            return False
        code = line.f_code
        here = Path(code.co_filename).name, code.co_qualname, line.f_lineno
        _, column = position_in(line)
        is_there = self._kept.inputs.column in (None, column)
        return is_there and here == (Path(kept.file).name, kept.function, kept.line)
