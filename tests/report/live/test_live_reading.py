"""What is known of a run at a moment: its state, its pace, its findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.report.live.detail import detail
from kedge.report.live.heading import heading
from kedge.report.live.reading import QUIET, RunReader, RunState
from kedge.report.module_lines import lines
from kedge.report.what_ran import is_written
from kedge.store.events import event_from
from kedge.store.recording import Recording
from kedge.store.writing.lock import LOCK


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        """Return the time."""
        return self.now


@pytest.fixture
def clock():
    """A clock."""
    return Clock()


def test_a_run_is_waited_for_and_followed_to_its_end(run, clock) -> None:
    """The state goes from waiting to running to ended, and each reading tells whether anything is new."""
    reader = RunReader(run.path, clock=clock)
    assert (reader.read(), reader.state) == (False, RunState.WAITING)
    assert "waiting for the run to begin" in heading(reader).plain

    run.begin()
    run.go_on()
    assert (reader.read(), reader.state) == (True, RunState.RUNNING)
    assert (reader.read(), reader.state) == (False, RunState.RUNNING)
    clock.now += 10
    run.go_on(5)
    assert reader.read()
    head = heading(reader).plain
    assert head.startswith(
        "● running  train.py --lr 1\nstep 50, 6 measured · 5.00 steps/s · at most 3.0 % for watching · cpu"
    )

    run.end()
    assert (reader.read(), reader.state) == (True, RunState.ENDED)
    assert (
        "60 steps, 6 measured · 4 s · 15.0 steps/s · 2.5 % of it for watching"
        in heading(reader).plain
    )


def test_a_run_that_failed_says_with_what(run, clock) -> None:
    """A run that ended with an exit status is distinguished from one that ended well, and its error is shown."""
    run.begin()
    run.go_on()
    run.end(1, "ValueError: too large")
    reader = RunReader(run.path, clock=clock)
    reader.read()

    assert reader.state is RunState.FAILED
    assert "exit status 1: ValueError: too large" in heading(reader).plain


def test_a_run_that_pauses_still_runs(run, clock) -> None:
    """As long as somebody holds the recording, a run that writes nothing for long is running."""
    run.begin()
    run.go_on()
    reader = RunReader(run.path, clock=clock)
    reader.read()
    clock.now += 10 * QUIET
    reader.read()

    assert reader.state is RunState.RUNNING


def test_a_killed_run_is_reported(run, clock) -> None:
    """A recording without an end that nobody writes was killed: when it is opened, and while it is followed."""
    run.begin()
    run.go_on()
    reader = RunReader(run.path, clock=clock)
    reader.read()
    run.go_on()
    reader.read()
    run.close()
    assert reader.state is RunState.RUNNING
    clock.now += 2 * QUIET
    assert (reader.read(), reader.state) == (True, RunState.KILLED)
    assert "the program was killed" in heading(reader).plain
    assert reader.shown_run.judgement.ended

    late = RunReader(run.path, clock=clock)
    late.read()
    assert late.state is RunState.KILLED

    (run.path / LOCK).unlink()
    unknown = RunReader(run.path, clock=clock)
    unknown.read()
    assert unknown.state is RunState.UNCLEAR
    assert is_written(Recording.open(run.path)) is None


def test_a_curve_is_true_to_scale_over_the_steps() -> None:
    """The last of three sampled steps is nine times as far from the second as that from the first."""
    figures = {"count": 1, "nonzero": 1}
    rows = [
        figures | {"site": "fc:out", "step": step, "sum": x, "sumsq": x * x}
        for step, x in ((0, 1), (10, 1), (100, 9))
    ]
    (line,) = lines(Recording.build(["fc:out"], rows))

    drawn = detail(line, (0, 0), (), 120).plain.splitlines()
    top = next(row for row in drawn if row.strip().startswith("9.00"))
    wide = drawn[11].index("100") + 3

    assert len(top) - len(top[9:].lstrip("⠀ ")) > 0.9 * wide


def test_findings_come_when_they_are_due(run, clock) -> None:
    """The rules run at once, then not at every reading, and at the end in any case."""
    run.begin()
    run.go_on(3)
    reader = RunReader(run.path, clock=clock)
    reader.read()
    assert reader.shown_run is not None
    assert reader.shown_run.findings == ()
    run.go_on(1, broken="blocks.1.attn")
    reader.read()
    assert reader.shown_run.findings == ()
    clock.now += 60
    assert reader.read()
    assert [finding.site for finding in reader.shown_run.findings] == ["blocks.1.attn:out"]

    run.go_on(1, broken="embed")
    run.end()
    reader.read()
    assert reader.shown_run.recording.end is not None
    assert len(reader.shown_run.findings) >= 1


def test_a_run_that_is_replaced_is_followed(run, clock) -> None:
    """The new run's findings and pace have nothing of the old one's."""
    run.begin()
    run.go_on(3, broken="embed")
    reader = RunReader(run.path, clock=clock)
    reader.read()
    assert reader.shown_run is not None
    assert reader.shown_run.findings
    run.close()
    run.begin(force=True)
    run.go_on(1)
    clock.now += 1
    assert reader.read()

    assert (reader.shown_run.findings, reader.shown_run.pace, reader.state) == (
        (),
        None,
        RunState.RUNNING,
    )


def test_a_place_that_is_no_recording_is_an_error(tmp_path: Path) -> None:
    """A file is not waited for."""
    (tmp_path / "a.txt").touch()
    with pytest.raises(Exception, match="it is a file"):
        RunReader(tmp_path / "a.txt").read()


def test_logged_values_are_in_the_head(run, clock) -> None:
    """The newest one of each name, beside its curve."""
    run.begin()
    run.go_on()
    logged = {"kind": "logged", "name": "accuracy", "steps": [0, 9], "values": [0.5, 0.75]}
    run.writer.event(event_from(logged))
    reader = RunReader(run.path, clock=clock)
    reader.read()

    assert "accuracy 0.750 ▁█" in heading(reader).plain
