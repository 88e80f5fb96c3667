"""A recording under another process's eyes, and after its writer was killed."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kedge.store.recording import Recording
from tests.marks import sampled

pytestmark = pytest.mark.timing

Alone = Callable[..., list[str]]

WRITER = """
import sys
import numpy as np
from kedge.store.events import NoteEvent
from kedge.store.writing.folder import create

writer = create(sys.argv[1], {}, force=True)
sites = []
for step in range(1_000_000):
    if step % 50 == 0 and len(sites) < 200:
        sites += [{"id": len(sites) + i, "site": f"m{len(sites) + i}:out", "channels": 64} for i in range(20)]
        writer.sites(sites, [{"name": "Net"}])
    rows = len(sites)
    site = np.arange(rows)
    writer.stats(step, {
        "site": site, "count": np.full(rows, 2), "sum": site + step * 1000.0, "active": [b"12345678"] * rows,
    })
    if step % 20 == 0:
        writer.event(NoteEvent(step=step, text="x" * 500))
    print(step, flush=True)
"""


@contextmanager
def writing(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program that writes steps as fast as it can, and prints each one that was written."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "0\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def assert_whole(recording: Recording) -> None:
    """Every step up to the last is there, with all its sites and the right values."""
    steps = recording.steps
    assert steps.tolist() == list(range(len(steps)))
    for site in recording.sites[:: max(1, len(recording.sites) // 5)]:
        rows = recording.rows(site)
        first = 50 * (site.id // 20)
        assert rows.step.tolist() == list(range(first, len(steps)))
        np.testing.assert_array_equal(rows.sum, site.id + rows.step * 1000.0)
        assert set(rows.active) <= {b"12345678"}
    assert [event.step for event in recording.events] == list(
        range(0, 20 * len(recording.events), 20)
    )


@pytest.mark.parametrize("seed", sampled(range(20), range(5)))
def test_a_kill_at_any_moment_costs_at_most_the_last_step(
    tmp_path: Path, alone: Alone, seed: int
) -> None:
    """After kill -9 every step whose writing had returned is read, with its sites and events."""
    with writing(alone(WRITER, tmp_path / "r.kedge")) as process:
        time.sleep(random.Random(seed).uniform(0, 0.25))
        process.send_signal(signal.SIGKILL)
        assert process.stdout is not None
        said = process.stdout.read().split("\n")
    finished = [int(line) for line in said[:-1]]
    recording = Recording.open(tmp_path / "r.kedge")

    assert_whole(recording)
    written = finished[-1] + 1 if finished else 1
    assert written <= len(recording.steps) <= written + 1
    assert len(recording.events) in (
        (len(recording.steps) + 19) // 20,
        (len(recording.steps) - 1 + 19) // 20,
    )
    assert recording.end is None


def test_a_recording_is_read_while_another_process_writes_it(tmp_path: Path, alone: Alone) -> None:
    """Each reading gives whole steps, never fewer than the one before, and takes no lock."""
    with writing(alone(WRITER, tmp_path / "r.kedge")) as process:
        lengths = []
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            recording = Recording.open(tmp_path / "r.kedge")
            assert_whole(recording)
            lengths.append(len(recording.steps))
        assert process.poll() is None

    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3


def test_a_killed_recording_can_be_replaced(tmp_path: Path, alone: Alone) -> None:
    """What a killed writer left is a recording that force may replace."""
    with writing(alone(WRITER, tmp_path / "r.kedge")) as process:
        process.send_signal(signal.SIGKILL)
    with writing(alone(WRITER, tmp_path / "r.kedge")):
        recording = Recording.open(tmp_path / "r.kedge")

    assert_whole(recording)
