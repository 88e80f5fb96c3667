"""What the tests of watching share."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import pytest

from kedge.watch.models.optimizers import living
from kedge.watch.steps.budget import Budget
from kedge.watch.steps.kind import StepKind


@pytest.fixture(autouse=True)
def no_optimizer_of_another_test() -> None:
    """Free the optimizers that earlier tests left: whose names a model has depends on those that are alive."""
    if living():
        gc.collect()
        for optimizer in living():  # hooks of tensors hold it, through which no cycle is found
            optimizer.param_groups.clear()


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return what fixes the kind of each step after the first, over and over."""

    def fix(*kinds: StepKind) -> None:
        order = itertools.cycle(kinds)

        def choose(self: Budget, step: int, now: float) -> StepKind:
            self.kind, self.run, self._planned, self._wished = next(order), 1, 1, False
            return self.kind

        monkeypatch.setattr(Budget, "_choose", choose)

    return fix
