"""What is known before an optimizer's step: whether it would train on values that are not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.optim import Optimizer

from kedge import native
from kedge.sites.leaves import own_part
from kedge.watch.models.optimizers import params_of
from kedge.watch.records.optimizer_updates import squares_of


def has_bad_gradients(optimizer: Optimizer, losses: Iterable[Tensor | float]) -> bool:
    """Whether a gradient that an optimizer is about to use, or a loss before it, is not finite.

    On a device this waits. A `torch.amp.GradScaler` tells an optimizer that deals with scaled
    gradients itself if it must leave the parameters alone: then it uses none.

    Args:
        optimizer: The optimizer.
        losses: The losses of the last backward pass.
    """
    told = getattr(optimizer, "found_inf", None)
    if told is not None and bool(told):
        return False
    values = [loss for loss in losses if isinstance(loss, Tensor)]
    numbers = [loss for loss in losses if not isinstance(loss, Tensor)]
    if not all(map(math.isfinite, numbers)):
        return True
    for param in params_of(optimizer):
        grad = param.grad
        if grad is not None:
            values.append(own_part(grad))
    return not are_finite(values)


def are_finite(values: Iterable[Tensor]) -> bool:
    """Whether all numbers of some tensors are finite."""
    here: list[Tensor] = []
    away: list[Tensor] = []
    for value in values:
        dense = value
        if value.layout is torch.sparse_coo:
            dense = value.detach().coalesce().values()
        if dense.is_cpu:
            here.append(dense)
        else:
            away.append(dense)
    if here and native.all_finite_and_norm(here)[1]:
        return False
    if not away:
        return True
    squares, _ = squares_of(away)
    # The squares of finite numbers may be infinite.
    return math.isfinite(float(squares)) or all(bool(torch.isfinite(v).all()) for v in away)
