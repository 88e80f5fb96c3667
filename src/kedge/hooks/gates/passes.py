"""The hooks that count a model's forward passes, and the steps of its optimizer."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.gates import compiled
from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.installed import InstalledHook
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_calls import has_raised
from kedge.torch_internals.module_tables import parameters_in
from kedge.torch_internals.source_lines import is_running


class PassBegins(KedgeHook):
    """Forward-pre hook that begins a model's forward pass.

    A model that calls itself stays in the same pass.
    """

    def __init__(self, passes: PassCounter) -> None:
        self.passes = passes
        self.key = next(compiled.numbers)
        compiled.followed[self.key] = passes

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The forward-pre hook."""
        if torch.compiler.is_compiling():
            compiled.begin(self.key)
        elif not in_backward():
            here = self.passes.here
            frame = sys._getframe(1)
            if here.inside and is_running(
                here.frame, frame
            ):  # an interrupt may have skipped the end
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
            here = self.begin.passes.here
            frame = sys._getframe(1)
            if here.frame is frame or not is_running(here.frame, frame):
                here.frame = None
                self.begin.passes.end(raised=output is None and has_raised(module))


def follow(owner: Owner, model: nn.Module, prefix: str = "") -> PassBegins:
    """Count the forward passes of a model and the steps of its optimizer.

    Returns the hook that begins a pass.
    """
    alive = weakref.ref(model)
    begin = PassBegins(owner.clock.follow(lambda: has_optimizer(alive()), prefix))
    owner.installed.put_around(model, begin, PassEnds(begin))
    count_steps(owner, model)
    return begin


def has_optimizer(model: nn.Module | None) -> bool:
    """Whether an optimizer exists that holds one of a model's parameters.

    Looks through all objects.
    """
    if model is None:
        return False
    held = {id(p) for p in parameters_in(model).values()}
    if not held:
        return False

    for found in gc.get_objects():
        if not issubclass(type(found), Optimizer):  # isinstance runs code of odd objects
            continue
        for group in getattr(found, "param_groups", ()):  # none after a failed __init__
            if any(id(p) in held for p in group["params"]):
                return True
    return False


def count_steps(owner: Owner, model: nn.Module) -> None:
    """Count, for a session, the steps of the first optimizer to step that holds one of this model's parameters."""
    clock = owner.clock
    held = {id(p) for p in parameters_in(model).values()}
    whose = id(held)  # not the model's: a session may hook it twice
    if not held or not clock.by_models:
        return

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if clock.optimizer is None:
            params = (p for group in optimizer.param_groups for p in group["params"])
            if any(id(p) in held for p in params):
                clock.optimizer = id(optimizer), whose
        if clock.optimizer == (id(optimizer), whose):
            clock.optimized()

    def gone() -> None:
        # A model may end before its session: the next optimizer to step counts.
        if clock.optimizer is not None and clock.optimizer[1] == whose:
            clock.optimizer = None

    owner.installed.install(InstalledHook(register_optimizer_step_post_hook(stepped)))
    owner.installed.cleanup.callback(gone)


untraced(PassBegins.__call__, PassEnds.__call__)
