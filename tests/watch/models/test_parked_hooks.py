"""What programs do to PyTorch's tables of hooks while those of measured steps are taken out and put back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.watch.watched import watch


def trained(model: nn.Module, meanwhile: Callable[[int], None], steps: int = 20) -> Any:
    """Train for some steps, of which one in four is measured, with something done before each; returns the log."""

    def program() -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if not nn.parameter.is_lazy(p)], 0.01)
        for step in range(steps):
            meanwhile(step)
            model(torch.randn(8, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return watch(program, every=4)


def layers() -> nn.Sequential:
    """Return a small model."""
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.mark.parametrize("at", [1, 5, 8])
def test_hooks_that_the_program_clears_come_back_with_the_next_measured_step(at: int) -> None:
    """Whether they were up or out when it did."""
    model = layers()

    def clear(step: int) -> None:
        for module in model.modules() if step == at else ():
            module._forward_hooks.clear()
            module._forward_pre_hooks.clear()

    log = trained(model, clear)
    missing = {4 * -(-at // 4)} if at % 4 == 0 else set()
    assert set(log.recording().rows("0:out").step.tolist()) >= set(range(0, 20, 4)) - missing
    assert not any(hooks for module in model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks))


def test_hooks_of_the_program_stay_in_their_tables_while_others_come_back() -> None:
    """Another thread may be calling the module: at no moment is one of them in no table."""
    model, gaps = layers(), []

    class Watching(type(model[0]._forward_hooks)):
        """A table that notes when a hook of the program's is taken out."""

        def pop(self, key: int, *default: Any) -> Any:
            gaps.extend([key] if key in own else [])
            return super().pop(key, *default)

        def __delitem__(self, key: int) -> None:
            gaps.extend([key] if key in own else [])
            super().__delitem__(key)

    model[0]._forward_hooks = Watching()
    own: list[int] = []
    calls: list[int] = []

    def add(step: int) -> None:
        if step == 2:
            own.extend(model[0].register_forward_hook(lambda *_, i=i: calls.append(i)).id for i in range(3))

    log = trained(model, add)
    assert set(log.recording().rows("0:out").step.tolist()) >= set(range(0, 20, 4))
    assert gaps == []
    assert calls == [0, 1, 2] * 18


def test_a_lazy_part_that_is_never_called_ends_nothing() -> None:
    """It has no shape to the end, whoever holds it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = nn.Linear(4, 2), nn.LazyLinear(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.body(x)

    log = trained(Net(), lambda step: None)
    assert not log.watch.failed
    assert log.recording().steps.tolist()[:2] == [0, 1] or len(log.recording().steps) >= 5
