"""The shield: work of Kedge's that fails costs only the thing that it is about, and the program goes on."""

from __future__ import annotations

import gc
import os
import threading

import pytest

from kedge.actions.measure.meter import Meter
from kedge.watch.steps.costs import Costs
from kedge.watch.steps.shield import STEP, WatchShield, stop_in_children


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
    assert (note.what, note.detail.name) == ("failed", "a step")


class InterruptedAtItsEnd(Costs):
    """Costs whose first block an interrupt leaves open."""

    interrupts = 1

    def __exit__(self, *error: object) -> None:
        if self.interrupts:
            self.interrupts -= 1
            raise KeyboardInterrupt
        super().__exit__(*error)


def test_an_interrupt_in_the_midst_leaves_nothing_changed() -> None:
    """Wherever it comes, garbage is collected afterwards, and the next work is timed alone."""
    meter = Meter()
    costs = InterruptedAtItsEnd(meter)
    shield, collects = WatchShield(meter, costs), []
    hook = shield.around(lambda: collects.append(gc.isenabled()), STEP)

    with pytest.raises(KeyboardInterrupt):
        hook()
    assert gc.isenabled()
    hook()
    assert gc.isenabled()
    assert collects == [False, False]
    timed = costs.timed
    assert costs.timed == timed  # no block is open, whose time would go on


def test_a_program_that_collects_no_garbage_goes_on_without() -> None:
    """What the program has switched off stays off."""
    meter = Meter()
    gc.disable()
    try:
        WatchShield(meter, Costs(meter)).around(lambda: None, STEP)()
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_that_is_forked_during_work_collects_garbage() -> None:
    """The thread at work does not exist there, and would never switch it on again."""
    meter = Meter()
    shield, ends = WatchShield(meter, Costs(meter)), []
    stop_in_children(shield)

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(7 if gc.isenabled() else 8)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    def work() -> None:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()

    shield.around(work, STEP)()
    assert ends == [7]
