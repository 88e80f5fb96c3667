"""The shield: work of Kedge's that fails costs only the thing that it is about, and the program goes on."""

from __future__ import annotations

import pytest

from kedge.actions.measure.meter import Meter
from kedge.watch.steps.costs import Costs
from kedge.watch.steps.shield import STEP, WatchShield


def test_work_that_fails_costs_the_thing_that_it_is_about(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The program goes on; the work is done again, other work too; the loss is reported and noted once, with its cause."""
    meter = Meter()
    shield, calls = WatchShield(meter, Costs(meter)), []

    def work() -> None:
        calls.append("failing")
        raise OSError(f"no {len(calls)}")

    failing, other = (
        shield.around(work, STEP),
        shield.around(lambda: calls.append("other"), "the optimizer"),
    )
    failing()
    failing()
    other()
    assert isinstance(shield.failure, OSError)
    assert str(shield.failure) == "no 1"
    assert calls == ["failing", "failing", "other"]
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith("[kedge] a step cannot be watched: OSError: no 1")
    assert said[0].endswith("; everything else is")
    (note,) = shield.notes()
    assert (note["kind"], note["what"], note["detail"]["name"]) == ("unseen", "failed", "a step")
