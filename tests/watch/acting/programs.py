"""Small programs whose loss, or whose gradients, are not finite in chosen steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

MakeOptimizer = Callable[[list[nn.Parameter]], Optimizer]


def sgd(params: list[nn.Parameter]) -> Optimizer:
    """Return an optimizer with all that a step may change besides."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


class Training:
    """A training, the same for the same arguments; in bad steps a gradient, or the loss, is NaN.

    Args:
        make: Makes the optimizer.
        bad: The bad steps.
        of_loss: Whether the loss is NaN, and not only a gradient.
    """

    def __init__(
        self, make: MakeOptimizer = sgd, bad: Collection[int] = (), *, of_loss: bool = False
    ) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = make(list(self.model.parameters()))
        self.bad = bad
        self.of_loss = of_loss
        self.at = 0
        self.batches = torch.Generator().manual_seed(1)

    def loss(self) -> Tensor:
        """Return the loss of the next batch; in a bad step its gradient is NaN."""
        x = torch.randn(16, 4, generator=self.batches)
        output = self.model(x)
        loss = output.square().mean()
        if self.at in self.bad:
            zero = (output.sum() * 0).sqrt()  # zero, with an infinite derivative
            loss = loss + zero * float("nan") if self.of_loss else loss + zero
        return loss

    def step(self) -> None:
        """Train for one step."""
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        self.at += 1

    def step_with_closure(self) -> None:
        """Train for one step as the step itself asks for gradients."""

        def closure() -> Tensor:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        self.optimizer.step(closure)  # type: ignore[arg-type]
        self.at += 1

    def step_or_skip(self) -> None:
        """Train for one step, but leave a bad one out by hand."""
        self.optimizer.zero_grad()
        self.loss().backward()
        held = (param for group in self.optimizer.param_groups for param in group["params"])
        grads = [param.grad for param in held]
        if all(bool(torch.isfinite(grad).all()) for grad in grads if grad is not None):
            self.optimizer.step()
        self.at += 1

    def state(self) -> list[bytes]:
        """Return every bit of the parameters, their gradients and the optimizer."""
        params = list(self.model.parameters())
        values = [*params, *(param.grad for param in params)]
        described = self.optimizer.state_dict()
        return [bits(value) for value in (*values, *leaves(described))]


def leaves(value: Any) -> Iterator[Any]:
    """Yield all that is in a nested value, in order."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from leaves(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from leaves(each)
    else:
        yield deepcopy(value)


def bits(value: Any) -> bytes:
    """Return the bits of a tensor, or the text of another value."""
    if isinstance(value, Tensor):
        return value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return repr(value).encode()
