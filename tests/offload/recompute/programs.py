"""Programs whose modules are run again, and what they leave behind: gradients, state and random numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kedge

Step = Callable[[nn.Module], None]
SIZE = 16


def x_of(step: int = 0, rows: int = 8) -> Tensor:
    """Return the inputs of a step."""
    return torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(step))


def plain_step(model: nn.Module) -> None:
    """Run forward and backward."""
    model(x_of()).square().sum().backward()


def left_behind(model: nn.Module) -> Iterator[Any]:
    """Yield what a program leaves, as values to compare."""
    for name, param in model.named_parameters():
        yield name, param.detach().clone()
        yield f"{name}.grad", None if param.grad is None else param.grad.clone()
    for name, buffer in model.named_buffers():
        yield name, buffer.clone()
    for path, module in model.named_modules():
        for name, held in vars(module).items():
            if isinstance(held, (int, float, str, list, dict, set)) and not name.startswith("_"):
                yield f"{path}:{name}", copy.deepcopy(held)
                yield f"{path}:{name}, in order", list(held) if isinstance(held, dict) else None
            elif isinstance(held, Tensor):
                yield f"{path}:{name}", held.detach().clone()
    yield "torch", torch.get_rng_state()
    yield "python", random.getstate()
    yield "numpy", np.random.get_state()[1].tobytes()  # noqa: NPY002


def run(
    make: Callable[[], nn.Module],
    step: Step = plain_step,
    *,
    steps: int = 3,
    around: Callable[[nn.Module], Any] = lambda _: nullcontext(),
) -> tuple[list[Any], Any]:
    """Run some steps of a program; returns what it leaves after each, and what the block gave."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = make()
    found = []
    with around(model) as account:
        for _ in range(steps):
            model.zero_grad()
            step(model)
            found += left_behind(model)
    return found, account


def assert_same(bare: list[Any], found: list[Any]) -> None:
    """Assert that two runs left the same, to the last bit."""
    assert [name for name, _ in bare] == [name for name, _ in found]
    for (name, one), (_, other) in zip(bare, found, strict=True):
        if isinstance(one, Tensor):
            assert torch.equal(one, other), name
        else:
            assert repr(one) == repr(other), name


def check(
    make: Callable[[], nn.Module],
    recompute: str = "[0-9]*",
    step: Step = plain_step,
    *,
    steps: int = 3,
    **options: Any,
) -> Any:
    """Assert that a program leaves the same with recomputing as without; returns the account."""
    bare, _ = run(make, step, steps=steps)
    options = {"min_bytes": 0, **options}
    found, account = run(
        make,
        step,
        steps=steps,
        around=lambda model: kedge.offload(model, recompute=recompute, **options),
    )
    assert_same(bare, found)
    return account


class Residual(nn.Module):
    """A block with a norm, a hidden layer, and dropout."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.norm = norm(SIZE)
        self.up = nn.Linear(SIZE, 2 * SIZE)
        self.down = nn.Linear(2 * SIZE, SIZE)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        """Add to x."""
        return x + self.drop(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def blocks() -> nn.Module:
    """Return three blocks and a head."""
    return nn.Sequential(Residual(), Residual(), Residual(), nn.Linear(SIZE, 4))
