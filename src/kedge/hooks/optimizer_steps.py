"""The optimizer whose steps are the steps of a session."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from kedge.hooks.firing.owner import Owner
from kedge.hooks.placing.installed import InstalledHook


def has_optimizer(model: nn.Module | None) -> bool:
    """Whether an optimizer exists that holds one of a model's parameters; looks through all objects."""
    held = {id(p) for p in model.parameters()} if model is not None else set()
    optimizers = (o for o in gc.get_objects() if issubclass(type(o), Optimizer))  # isinstance runs code of odd objects
    groups = (group for o in optimizers for group in getattr(o, "param_groups", ()))  # none after a failed __init__
    return bool(held) and any(id(p) in held for group in groups for p in group["params"])


def count_steps(owner: Owner, model: nn.Module) -> None:
    """Count, for a session, the steps of the first optimizer to step that holds one of this model's parameters."""
    held, whose, clock = {id(p) for p in model.parameters()}, id(model), owner.clock
    if not held or not clock.by_models:
        return

    def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if clock.optimizer is None and any(id(p) in held for group in optimizer.param_groups for p in group["params"]):
            clock.optimizer = id(optimizer), whose
        if clock.optimizer == (id(optimizer), whose):
            clock.optimized()

    owner.mounts.mount(InstalledHook(register_optimizer_step_post_hook(stepped)))
