"""Time that Kedge spends on a program: counted once, and while it passes."""

from __future__ import annotations

import time

import pytest

from kedge.actions.measure.meter import Meter
from kedge.watch.steps.costs import Costs
from tests.marks import measured

pytestmark = [pytest.mark.timing, measured]


def test_time_within_time_is_counted_once() -> None:
    """And while it passes."""
    costs = Costs(Meter())
    start = time.perf_counter()
    with costs:
        with costs:
            time.sleep(0.02)
        assert costs.timed >= 0.02
        time.sleep(0.01)
    passed = time.perf_counter() - start
    assert 0.03 <= costs.timed <= passed
