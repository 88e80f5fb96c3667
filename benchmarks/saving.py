"""What it costs that Kedge is asked about every saved tensor: microseconds for each, and for each call of a module.

Run ``python benchmarks/saving.py`` on an idle machine. Each figure is the least of many rounds,
forward and backward.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import kedge
from kedge.hooks.saved.keeper import SavingPlace, keep

NUMBER, ROUNDS = 300, 60
_ONES = torch.ones(4)


class Leaves:
    """A keeper that leaves everything where it is."""

    def pack(self, value: Tensor, place: SavingPlace) -> None:
        """Leave it."""

    def unpack(self, packed: Any) -> Tensor:
        """Never called: nothing was packed."""
        raise AssertionError(packed)


class Chain(nn.Module):
    """Saves a small tensor many times."""

    def forward(self, x: Tensor) -> Tensor:
        """Take the sine again and again."""
        for _ in range(NUMBER):
            x = x.sin()
        return x


def least(model: nn.Module) -> float:
    """Return the least microseconds of a round, for each of its steps."""
    x = torch.ones(4, requires_grad=True)
    times = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - begun)
    return min(times) / NUMBER * 1e6


def keeping(model: nn.Module) -> AbstractContextManager[Any]:
    """Ask a keeper that leaves everything."""
    stack = ExitStack()
    keep(stack, model, Leaves(), ambient=True)
    return stack


def main() -> None:
    """Print the figures."""
    torch.set_num_threads(1)
    cases: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
        "no hooks": lambda model: nullcontext(),
        "empty hooks": lambda model: saved_tensors_hooks(lambda value: 0, lambda packed: _ONES),
        "hooks that detach": lambda model: saved_tensors_hooks(
            lambda value: value.detach(), lambda packed: packed
        ),
        "a keeper that leaves all": keeping,
        "an action at :saved": lambda model: kedge.hook(
            model, "**:saved", lambda value, event: None
        ),
    }
    for what, model in (
        ("saved tensor", Chain()),
        ("module that saves one", nn.Sequential(*(nn.Tanh() for _ in range(NUMBER)))),
    ):
        least(model)
        bare = least(model)
        for name, block in cases.items():
            with block(model):
                cost = least(model)
            print(f"{what:22} {name:26} {cost:6.2f} us, {cost - bare:+.2f}")


if __name__ == "__main__":
    main()
