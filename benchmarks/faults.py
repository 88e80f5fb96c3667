"""What `plants.py` plants: changes of a model, of its data, of its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from nets import Fault, mlp
from torch import Tensor, nn


class Apply(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def after(
    place: Callable[[nn.Module], bool], function: Callable[[Tensor], Tensor], nth: int = 0
) -> Fault:
    """Put a function or a module behind the nth module of a kind."""

    def change(model: nn.Module) -> None:
        name, found = [(n, m) for n, m in model.named_modules() if place(m)][nth]
        parent = model.get_submodule(name.rpartition(".")[0])
        setattr(
            parent,
            name.rpartition(".")[2],
            nn.Sequential(found, function if isinstance(function, nn.Module) else Apply(function)),
        )

    return Fault(model=change)


def is_weighted(module: nn.Module) -> bool:
    """Tell linear maps."""
    return isinstance(module, nn.Linear | nn.Conv2d)


def every_weight(change: Callable[[nn.Module], Any]) -> Fault:
    """Change every linear map."""
    return Fault(model=lambda model: [change(m) for m in model.modules() if is_weighted(m)])


def normal(std: float) -> Fault:
    """Draw all weights from a normal distribution, biases zero."""

    def change(module: nn.Module) -> None:
        nn.init.normal_(module.weight, std=std)
        if module.bias is not None:
            nn.init.zeros_(module.bias)

    return every_weight(change)


def rate(when: int, factor: float, until: int = 10**9) -> Fault:
    """Multiply the learning rate from a step on."""

    def change(step: int, model: nn.Module, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] *= factor if when <= step < until else 1.0

    return Fault(before_step=change)


class Around(nn.Module):
    """A module behind another, and from some call on an operation beside it, in their container's own forward."""

    def __init__(
        self,
        first: nn.Module,
        inner: nn.Module,
        operation: Callable[[Tensor], Tensor] | None,
        since: int = 0,
    ) -> None:
        super().__init__()
        self.first, self.inner, self.operation, self.left = first, inner, operation, since

    def forward(self, x: Tensor) -> Tensor:
        taken = self.first(x)
        self.left -= 1
        if self.operation is None or self.left >= 0:
            return self.inner(taken)
        return self.inner(taken) + self.operation(taken)


def rooted(x: Tensor) -> Tensor:
    """Give x, and to its gradient the infinite slope of a root at zero."""
    return x + (x - x.detach()).square().sum(-1, keepdim=True).sqrt()


class Lift(nn.Module):
    """Scale a value until its largest element is near the end of a format."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: Tensor) -> Tensor:
        highest = x.detach().abs().max().float()
        return (x.float() / highest * (self.limit * (0.4 + 0.4 * torch.rand(())))).to(x.dtype)


class Direct(nn.Module):
    """A network that calls the forward of what it holds, past everybody's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(2, "relu")

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.forward(x)


class Wide(nn.Module):
    """A detour that saves some 80 MiB."""

    def forward(self, x: Tensor) -> Tensor:
        whole = x.sum() * torch.ones(20 * 2**20, device=x.device)
        return x + 0 * whole.sigmoid().mean()
