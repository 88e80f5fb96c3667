"""What the tests of watching share."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from hook_tables import hook_tables
from kedge.watch.budget import Level, Pace


@pytest.fixture
def tables() -> Callable[..., dict[str, Any]]:
    """The function that lists what is hooked on models and tensors."""
    return hook_tables


@pytest.fixture
def paced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Give what fixes the level of each step after the first, over and over."""

    def fix(*levels: Level) -> None:
        order = itertools.cycle(levels)
        monkeypatch.setattr(Pace, "_affordable", lambda self, step, **_: next(order))
        monkeypatch.setattr(Pace, "_may_hide", lambda *_: False)
        ended = Pace.ended

        def awake(self: Pace, step: int, now: float, cost: float, heard: tuple[float, float] | None = None) -> Level:
            level = ended(self, step, now, cost, heard)
            self.wake, self.settling = 0.0, 0
            return level

        monkeypatch.setattr(Pace, "ended", awake)
        monkeypatch.setattr(Pace, "_idle", lambda *_: 0.0)

    return fix
