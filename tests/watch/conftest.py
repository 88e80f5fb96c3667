"""What the tests of watching share."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable

import pytest

from kedge.watch.models.optimizers import living
from tests.watch.watched import fix_kinds


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
    return functools.partial(fix_kinds, monkeypatch)
