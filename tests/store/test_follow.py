"""Following a recording: whatever is polled, and when, is what opening it would give."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.errors import NewerFormat, NotARecording
from kedge.store.columns import BINARY, COLUMNS
from kedge.store.events import EndEvent, NoteEvent, Position, PositionEvent
from kedge.store.follow import Follower
from kedge.store.recording import Recording
from kedge.store.writing.folder import RecordingWriter, create

pytestmark = pytest.mark.timing

Alone = Callable[..., list[str]]

ROOT = {"name": "Net", "prefix": "", "parameters": 9}


def site(number: int) -> dict[str, Any]:
    """Describe one site."""
    return {"id": number, "site": f"m{number}:out", "channels": 24}


def write(writer: RecordingWriter, step: int, sites: list[int]) -> None:
    """Write a step in which these sites fired."""
    rng = np.random.default_rng([step, *sites])
    many = len(sites)
    columns: dict[str, Any] = {
        "site": sites,
        "count": np.full(many, 4),
        "sum": rng.normal(size=many),
    }
    columns |= {
        name: [rng.bytes(3 if name == "active" else int(2 * rng.integers(3)) + 1) for _ in sites]
        for name in BINARY
    }
    columns["exponents"] = [bytes([7]) + held[1:] for held in columns["exponents"]]
    writer.stats(step, columns)


def assert_same(left: Recording, right: Recording) -> None:
    """Two recordings hold the same, to the last bit."""
    assert (left.sites, left.roots, left.events, left.truncated) == (
        right.sites,
        right.roots,
        right.events,
        right.truncated,
    )
    assert left.steps.tolist() == right.steps.tolist()
    for each in left.sites:
        ours, theirs = left.rows(each), right.rows(each)
        for name in COLUMNS:
            if name != "site":
                np.testing.assert_array_equal(
                    getattr(ours, name), getattr(theirs, name), err_msg=name
                )
        assert [getattr(ours, name) for name in BINARY] == [
            getattr(theirs, name) for name in BINARY
        ]


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(1, 4), st.booleans(), st.booleans()), max_size=40),
    polled=st.sets(st.integers(0, 40)),
)
def test_however_often_it_is_polled_it_is_what_opening_gives(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, bool, bool]], polled: set[int]
) -> None:
    """Steps of few and many sites, in orders of their own, polled at any moments, create the recording that is opened."""
    path = tmp_path_factory.mktemp("follow") / "r.kedge"
    follower, last = Follower(path), None
    with create(path, {}, force=False) as writer:
        writer.sites([site(i) for i in range(4)], [ROOT])
        for step, (many, turned, noted) in enumerate(steps):
            sites = list(range(many))
            write(writer, step, sites[::-1] if turned else sites)
            if noted:
                writer.event(NoteEvent(step=step, text="ä"))
            if step in polled:
                last = follower.poll()
                assert last is not None
                assert last.steps.tolist() == list(range(step + 1))
    last = follower.poll() or last
    assert last is not None

    assert_same(last, Recording.open(path))
    assert follower.poll() is None


def test_what_was_polled_before_does_not_change(tmp_path: Path) -> None:
    """A recording that a poll gave stays what it was while the run goes on."""
    follower = Follower(tmp_path / "r.kedge")
    polled = []
    with create(tmp_path / "r.kedge", {}, force=False) as writer:
        writer.sites([site(0)], [ROOT])
        for step in range(20):
            write(writer, step, [0])
            polled.append(follower.poll())

    for step, recording in enumerate(polled):
        assert recording is not None
        assert recording.rows("m0").step.tolist() == list(range(step + 1))


def test_what_was_read_outlives_its_folder(tmp_path: Path) -> None:
    """Rows that were found but not yet looked at can be read after the recording was removed."""
    with create(tmp_path / "r.kedge", {}, force=False) as writer:
        writer.sites([site(0), site(1)], [ROOT])
        for step in range(5):
            write(writer, step, [0, 1])
    expected = Recording.open(tmp_path / "r.kedge").series("m1", "mean").tolist()
    recording = Recording.open(tmp_path / "r.kedge")
    shutil.rmtree(tmp_path / "r.kedge")

    assert recording.series("m1", "mean").tolist() == expected
    assert len(recording.exponents("m1")[0]) == len(recording.rows("m1"))


def test_it_waits_for_what_is_not_there(tmp_path: Path) -> None:
    """Before the run begins, and while nothing is written, there is nothing; then there is what was written."""
    follower = Follower(tmp_path / "r.kedge")
    assert follower.poll() is None
    (tmp_path / "r.kedge").mkdir()
    assert follower.poll() is None
    (tmp_path / "r.kedge").rmdir()

    with create(tmp_path / "r.kedge", {"script": "a.py"}, force=False) as writer:
        begun = follower.poll()
        assert begun is not None
        assert (begun.manifest["script"], len(begun.steps)) == ("a.py", 0)
        assert follower.poll() is None
        writer.sites([site(0)], [ROOT])
        assert follower.poll() is not None
        write(writer, 0, [0])
        grown = follower.poll()
        assert grown is not None
        assert grown.steps.tolist() == [0]


def test_sites_that_come_later_are_found(tmp_path: Path) -> None:
    """A site that is described while the run goes on has its rows, and no recording before knows it."""
    follower = Follower(tmp_path / "r.kedge")
    with create(tmp_path / "r.kedge", {}, force=False) as writer:
        writer.sites([site(0)], [ROOT])
        write(writer, 0, [0])
        first = follower.poll()
        writer.sites([site(0), site(1)], [ROOT])
        write(writer, 1, [0, 1])
        second = follower.poll()

    assert first is not None
    assert second is not None
    assert (len(first.sites), len(second.sites)) == (1, 2)
    assert second.rows("m1").step.tolist() == [1]


def test_a_torn_step_is_read_when_it_is_whole(tmp_path: Path) -> None:
    """A step and an event that are half written are left out, and are there once they are whole."""
    path = tmp_path / "r.kedge"
    with create(path, {}, force=False) as writer:
        writer.sites([site(0)], [ROOT])
        write(writer, 0, [0])
        write(writer, 1, [0])
        writer.event(NoteEvent(step=1, text="x"))
    contents = {name: (path / name).read_bytes() for name in ("stats-0.arrows", "events.jsonl")}
    for name, cut in (("stats-0.arrows", 300), ("events.jsonl", 4)):
        (path / name).write_bytes(contents[name][:-cut])
    follower = Follower(path)
    torn = follower.poll()
    assert torn is not None
    assert (torn.steps.tolist(), torn.events, torn.truncated) == ([0], (), True)
    assert follower.poll() is None

    for name, content in contents.items():
        with (path / name).open("r+b") as file:
            file.write(content)
    whole = follower.poll()
    assert whole is not None
    assert (whole.steps.tolist(), len(whole.events), whole.truncated) == ([0, 1], 1, False)


def test_a_run_that_takes_its_place_is_followed_from_its_start(tmp_path: Path) -> None:
    """After --force the new run is read, and nothing of the old one with it."""
    follower = Follower(tmp_path / "r.kedge")
    with create(tmp_path / "r.kedge", {"script": "old.py"}, force=False) as writer:
        writer.sites([site(0), site(1)], [ROOT])
        for step in range(5):
            write(writer, step, [0, 1])
        writer.event(EndEvent(exit=0))
    old = follower.poll()
    with create(tmp_path / "r.kedge", {"script": "new.py"}, force=True) as writer:
        writer.sites([site(0)], [ROOT])
        write(writer, 7, [0])
        new = follower.poll()

    assert old is not None
    assert new is not None
    assert (new.manifest["script"], new.steps.tolist(), new.events, len(new.sites)) == (
        "new.py",
        [7],
        (),
        1,
    )
    assert old.rows("m1").step.tolist() == [0, 1, 2, 3, 4]


def test_the_files_of_all_ranks_are_followed(tmp_path: Path) -> None:
    """A rank that begins later, and numbers its sites otherwise, is read with the others."""
    path = tmp_path / "r.kedge"
    follower = Follower(path)
    with create(path, {}, force=False) as writer:
        writer.sites([site(0), site(1)], [ROOT])
        write(writer, 0, [0, 1])
        assert follower.poll() is not None
        other = tmp_path / "other.kedge"
        with create(other, {"rank": 1}, force=False) as second:
            second.sites([{"id": 0, "site": "m1:out"}, {"id": 1, "site": "extra:out"}], [ROOT])
            second.stats(0, {"site": [0, 1], "count": [6, 2], "sum": [1.0, 2.0]})
        for file in other.glob("*-1.*"):
            file.rename(path / file.name)
        both = follower.poll()

    assert both is not None
    assert both.rows("m1").count.tolist() == [10]
    assert both.rows("extra").sum.tolist() == [2.0]
    assert_same(both, Recording.open(path))


def test_what_can_never_be_a_recording_is_an_error(tmp_path: Path) -> None:
    """Waiting for a file to become a recording, or for this version to become a newer one, is refused at once."""
    (tmp_path / "notes.txt").touch()
    with pytest.raises(NotARecording, match="it is a file; name a folder"):
        Follower(tmp_path / "notes.txt").poll()
    (tmp_path / "new.kedge").mkdir()
    (tmp_path / "new.kedge" / "manifest.json").write_text('{"format": 999}')
    with pytest.raises(NewerFormat, match="upgrade Kedge"):
        Follower(tmp_path / "new.kedge").poll()


def test_damage_is_reported_while_a_recording_is_followed(tmp_path: Path) -> None:
    """A file that is spoilt under the follower's eyes is named."""
    with create(tmp_path / "r.kedge", {}, force=False) as writer:
        writer.sites([site(0)], [ROOT])
    follower = Follower(tmp_path / "r.kedge")
    follower.poll()
    with (tmp_path / "r.kedge" / "events.jsonl").open("a") as file:
        file.write("{\n")

    with pytest.raises(NotARecording, match=r"events\.jsonl is damaged: line 1 is not JSON"):
        follower.poll()


WRITER = """
import sys
import numpy as np
from kedge.store.events import NoteEvent
from kedge.store.writing.folder import create

writer = create(sys.argv[1], {}, force=True)
sites = []
for step in range(1_000_000):
    if step % 50 == 0 and len(sites) < 200:
        sites += [{"id": len(sites) + i, "site": f"m{len(sites) + i}:out"} for i in range(20)]
        writer.sites(sites, [{"name": "Net"}])
    rows = len(sites)
    writer.stats(step, {"site": np.arange(rows), "count": np.full(rows, 2), "sum": np.arange(rows) + step * 1000.0})
    if step % 20 == 0:
        writer.event(NoteEvent(step=step, text="x" * 500))
    print(step, flush=True)
"""


def test_a_process_that_writes_as_fast_as_it_can_is_followed(tmp_path: Path, alone: Alone) -> None:
    """Each poll of a growing recording gives whole steps; after a kill the follower has what opening gives."""
    process = subprocess.Popen(
        alone(WRITER, tmp_path / "r.kedge"), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "0\n"
        follower, polled = Follower(tmp_path / "r.kedge"), []
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            polled.append(follower.poll())
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    found = [recording for recording in [*polled, follower.poll()] if recording is not None]

    lengths = [len(recording.steps) for recording in found]
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 3
    for recording in found[:: max(1, len(found) // 8)]:
        steps = recording.steps
        assert steps.tolist() == list(range(len(steps)))
        for each in recording.sites[::37]:
            rows = recording.rows(each)
            assert rows.step.tolist() == list(range(50 * (each.id // 20), len(steps)))
            np.testing.assert_array_equal(rows.sum, each.id + rows.step * 1000.0)
    assert_same(found[-1], Recording.open(tmp_path / "r.kedge"))


def test_only_a_program_that_stands_still_is_news_by_its_position(tmp_path: Path) -> None:
    """Each second there is another one; after the end the file does not count."""

    def note(since: str, seen: str, end: str = "\n") -> None:
        at = Position(step=3, module="fc", direction="forward")
        line = json.dumps(PositionEvent(position=at, since=since, seen=seen).entry())
        file = folder / "position.json"
        file.write_text(f"{line:300}{end}", encoding="utf-8")
        os.utime(file, ns=(next(times), next(times)))  # the clock of files is a coarse one

    times = itertools.count()
    folder = tmp_path / "it.kedge"
    with create(folder, {}, force=False) as writer:
        writer.sites([site(0)], [ROOT])
        write(writer, 0, [0])
        follower = Follower(folder)
        assert follower.poll() is not None

        note("10:00:01", "10:00:01", end="")
        assert follower.poll() is None
        note("10:00:02", "10:00:02")
        assert follower.poll() is None
        note("10:00:02", "10:00:03")
        standing = follower.poll()
        assert follower.poll() is None

        writer.event(EndEvent(exit=1))
        ended = follower.poll()

    assert standing is not None
    assert ended is not None
    assert [look.seen for look in standing.of(PositionEvent)] == ["10:00:03"]
    assert ended.of(PositionEvent) == ()
    assert_same(ended, Recording.open(folder))
