"""The shield: work of Kedge's that fails is the last, and the program goes on."""

from __future__ import annotations

from kedge.actions.measure.meter import Meter
from kedge.watch.steps.costs import Costs
from kedge.watch.steps.shield import WatchShield


def test_work_that_fails_is_the_last() -> None:
    """The program goes on, and nothing more is done."""
    meter = Meter()
    shield, calls = WatchShield(meter, Costs(meter)), []

    def work() -> None:
        calls.append(1)
        raise OSError("no")

    hook = shield.around(work)
    hook()
    hook()
    assert isinstance(shield.failure, OSError)
    assert calls == [1]
