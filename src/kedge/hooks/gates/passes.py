"""The hooks that count a model's forward passes."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.gates import compiled
from kedge.hooks.placing.concealed import KedgeHook
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.source_lines import is_running


class PassBegins(KedgeHook):
    """Forward-pre hook that begins a model's forward pass; a model that calls itself stays in the same pass."""

    def __init__(self, passes: PassCounter) -> None:
        self.passes = passes
        self.key = next(compiled.numbers)
        compiled.followed[self.key] = passes

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The forward-pre hook."""
        if torch.compiler.is_compiling():
            compiled.begin(self.key)
        elif not in_backward():
            here, frame = self.passes.here, sys._getframe(1)
            if here.inside and is_running(here.frame, frame):  # an interrupt may have skipped the end
                here.past = {}
            else:
                here.frame = frame
                self.passes.begin()


class PassEnds(KedgeHook):
    """Forward hook that ends a model's forward pass."""

    def __init__(self, begin: PassBegins) -> None:
        self.begin = begin

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook."""
        if torch.compiler.is_compiling():
            compiled.end(self.begin.key)
        elif not in_backward():
            here, frame = self.begin.passes.here, sys._getframe(1)
            if here.frame is frame or not is_running(here.frame, frame):
                here.frame = None
                self.begin.passes.end()


def follow(owner: Owner, model: nn.Module, passes: PassCounter) -> PassBegins:
    """Count the forward passes of a model; returns the hook that begins one."""
    begin = PassBegins(passes)
    owner.mounts.put_around(model, begin, PassEnds(begin))
    return begin


untraced(PassBegins.__call__, PassEnds.__call__)
