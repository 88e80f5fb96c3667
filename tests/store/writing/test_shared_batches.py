"""Rows of light steps share batches: nothing is lost, what matters is there at once, and a file is small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc
import pytest

from kedge.store.events import NoteEvent
from kedge.store.recording import Recording
from kedge.store.rows import FULL, LIGHT
from kedge.store.writing import arrow
from kedge.store.writing.arrow import StatsWriter
from kedge.store.writing.folder import create
from tests.store.tables import columns_of, read_table


def light(value: float, rows: int = 2) -> dict[str, Any]:
    """Make rows of a light step."""
    return {"site": np.arange(rows), "sumsq": np.full(rows, value), "level": np.full(rows, LIGHT)}


def full(value: float, rows: int = 3) -> dict[str, Any]:
    """Make rows of a step that was measured in full."""
    return {"site": np.arange(rows), "sumsq": np.full(rows, value), "level": np.full(rows, FULL)}


def sizes(path: Path) -> list[int]:
    """The rows of each batch but the first, which is empty."""
    with pyarrow.ipc.open_stream(path) as stream:
        return [batch.num_rows for batch in stream][1:]


def steps(path: Path) -> list[int]:
    """List the steps that are on disk."""
    return np.unique(columns_of(read_table(path)[0])["step"]).tolist()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A place for a file of statistics."""
    return tmp_path / "stats-0.arrows"


@pytest.fixture
def writer(path: Path) -> Any:
    """A writer of that file, closed at last."""
    writer = StatsWriter(path)
    yield writer
    writer.close()


def test_light_steps_share_a_batch_until_a_full_one_comes(path: Path, writer: StatsWriter) -> None:
    """A full step is on disk when its write returns, and all light steps before it are, in one batch."""
    writer.write(0, full(1.0))
    for step in range(1, 10):
        writer.write(step, light(step))
    assert steps(path) == [0]
    writer.write(10, full(2.0))
    assert steps(path) == list(range(11))
    assert sizes(path) == [3, 18, 3]


@pytest.mark.parametrize(
    "urgent", [light(np.nan), light(np.inf), light(1.0) | {"nonfinite": [0, 1]}, light(1.0, 9)]
)
def test_what_is_not_finite_or_large_does_not_wait(
    urgent: dict[str, Any], path: Path, writer: StatsWriter
) -> None:
    """A light step in which something broke, or of which much is written, is on disk when its write returns."""
    writer.write(0, light(1.0))
    writer.write(1, urgent)
    assert steps(path) == [0, 1]


def test_no_more_than_so_many_wait(path: Path, writer: StatsWriter) -> None:
    """Of light steps alone some dozens wait at most, and none when the file is closed."""
    for step in range(100):
        writer.write(step, light(1.0))
        assert len(steps(path)) > step - 32
    writer.close()
    assert steps(path) == list(range(100))
    assert len(sizes(path)) == 4


def test_none_waits_long(path: Path, writer: StatsWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a step has waited for a second, the next one takes it along."""
    clock = iter([0.0, 0.0, 0.9, 1.1])
    monkeypatch.setattr(arrow, "monotonic", lambda: next(clock))
    writer.write(0, light(1.0))
    writer.write(1, light(1.0))
    assert steps(path) == []
    writer.write(2, light(1.0))
    assert steps(path) == [0, 1, 2]


def test_an_event_comes_after_the_rows_before_it(tmp_path: Path) -> None:
    """Who reads an event finds the steps that were written before it."""
    writer = create(tmp_path / "a.kedge", {}, force=False)
    writer.stats(0, light(1.0))
    writer.event(NoteEvent())
    assert steps(tmp_path / "a.kedge" / "stats-0.arrows") == [0]
    writer.close()


def test_a_site_of_shared_batches_is_read_in_the_order_of_steps(tmp_path: Path) -> None:
    """Batches of several steps, of any number of them, give each site a row a step, in order and with its own value."""
    with create(tmp_path / "a.kedge", {}, force=False) as writer:
        entries = [{"id": i, "site": f"m{i}:out", "path": f"m{i}", "kind": "out"} for i in range(3)]
        writer.sites(entries, [{"name": "Net"}])
        for step in range(200):
            write = full if step % 7 == 0 or step in (100, 101, 104) else light
            writer.stats(step, write(float(step)))
    recording = Recording.open(tmp_path / "a.kedge")
    for name in ("m0:out", "m1:out"):
        rows = recording.rows(name)
        assert rows.step.tolist() == list(range(200))
        assert rows.sumsq.tolist() == [float(step) for step in range(200)]
        assert (rows.calls == 1).all()
    assert recording.rows("m2:out").step.tolist() == sorted({*range(0, 200, 7), 100, 101, 104})
    assert recording.steps.tolist() == sorted({*range(0, 200, 7), 100, 101, 104})


def test_a_curve_takes_little_room(path: Path, writer: StatsWriter) -> None:
    """A row of a light step takes some 130 bytes of the file rather than a thousand."""
    for step in range(320):
        writer.write(step, light(1.0, rows=1))
    writer.close()
    assert path.stat().st_size < 320 * 160
