"""Nobody replaces a recording that somebody writes."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.errors import BeingWritten, RecordingError, RecordingExists
from kedge.files import file_lock
from kedge.store.events import NoteEvent
from kedge.store.recording import Recording
from kedge.store.writing import destination, lock
from kedge.store.writing.destination import check_place
from kedge.store.writing.folder import create, join

pytestmark = pytest.mark.timing

Alone = Callable[..., list[str]]
RUN = {"run": "a", "attempt": "here:1/0", "world": 2}


def test_a_recording_under_way_is_not_replaced(tmp_path: Path) -> None:
    """With force too it is refused, by the name of the process, and untouched."""
    path = tmp_path / "r.kedge"
    with create(path, {"script": "old.py"}, force=False) as writer:
        with pytest.raises(
            BeingWritten,
            match=rf"it is being written by process {os.getpid()} on \S+; name another place",
        ):
            create(path, {"script": "new.py"}, force=True)
        with pytest.raises(BeingWritten):
            check_place(path, force=True)
        writer.stats(0, {"site": []})

        assert Recording.open(path).manifest["script"] == "old.py"
        assert [entry.name for entry in tmp_path.iterdir()] == ["r.kedge"]
    create(path, {"script": "new.py"}, force=True).close()
    assert Recording.open(path).manifest["script"] == "new.py"


def test_half_a_line_of_a_writer_is_no_writer(tmp_path: Path) -> None:
    """A rank whose line did not fit on the disk any more keeps nobody from reading the others."""
    path = tmp_path / "r.kedge"
    with create(path, {"script": "old.py"}, force=False):
        with (path / lock.LOCK).open("a") as file:
            file.write('{"rank": 1, "pi')
        assert [writer["rank"] for writer in lock.writers(path)] == [0]
        with pytest.raises(BeingWritten):
            check_place(path, force=True)


RACE = """
import os, sys
from kedge.errors import BeingWritten, RecordingExists
from kedge.store.writing.folder import create
from kedge.store.recording import Recording

had = 0
while had < 5:
    try:
        writer = create(sys.argv[1], {"who": os.getpid()}, force=True)
    except (BeingWritten, RecordingExists):
        continue
    with writer:
        writer.sites([{"id": 0, "site": "a:out"}], [])
        writer.stats(had, {"site": [0]})
        found = Recording.open(sys.argv[1])
        assert (found.manifest["who"], found.steps.tolist()) == (os.getpid(), [had]), found.manifest
    had += 1
print(had)
"""


def test_of_many_that_replace_a_recording_at_once_one_has_it(tmp_path: Path, alone: Alone) -> None:
    """Whoever has made it finds his own and whole, until he has closed it; and nothing is left behind."""
    path = tmp_path / "r.kedge"
    processes = [
        subprocess.Popen(
            alone(RACE, path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    outputs = [process.communicate() for process in processes]

    assert [error for _, error in outputs] == [""] * 4
    assert [said for said, _ in outputs] == ["5\n"] * 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.kedge"]


def test_a_forked_child_holds_no_lock(tmp_path: Path) -> None:
    """A child that outlives the writer, such as a worker, keeps nobody out."""
    path = tmp_path / "r.kedge"
    writer = create(path, {}, force=False)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        writer.close()
        create(path, {}, force=True).close()
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)


@pytest.fixture
def lockless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as a file system that has no locks."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(file_lock.fcntl, "flock", refuse)


@pytest.mark.usefixtures("lockless")
def test_without_locks_the_end_decides(tmp_path: Path) -> None:
    """On such a file system a recording without an end counts as being written, one with an end may be replaced."""
    path = tmp_path / "r.kedge"
    create(path, {}, force=False).close()
    with pytest.raises(BeingWritten, match="if that process is gone, remove the folder by hand"):
        create(path, {}, force=True)
    with (path / "events.jsonl").open("a") as events:
        events.write(json.dumps({"kind": "end"}) + "\n")

    create(path, {"script": "new.py"}, force=True).close()
    assert Recording.open(path).manifest["script"] == "new.py"


def test_a_recording_without_a_lock_may_be_replaced(tmp_path: Path) -> None:
    """A copy that lacks the file is nobody's."""
    path = tmp_path / "r.kedge"
    create(path, {}, force=False).close()
    (path / lock.LOCK).unlink()
    check_place(path, force=True)

    create(path, {}, force=True).close()


def test_a_quicker_one_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What appears between the look and the move stays, and the error is that of a place that is taken."""
    path = tmp_path / "r.kedge"
    rename = Path.rename

    def slow(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        create(path, {"script": "quick.py"}, force=False).close()
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", slow)
    with pytest.raises(RecordingExists, match="another process has just created one there"):
        create(path, {"script": "slow.py"}, force=False)

    assert Recording.open(path).manifest["script"] == "quick.py"
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.kedge"]


def test_a_rank_takes_part_in_the_recording_of_its_run(tmp_path: Path) -> None:
    """In no other, in none that is not there, and in none in which its place is taken."""
    path = tmp_path / "r.kedge"
    assert join(path, {**RUN, "rank": 1}) is None
    with create(path, {**RUN, "rank": 0}, force=False):
        assert join(path, {**RUN, "run": "b", "rank": 1}) is None
        assert join(path, {**RUN, "attempt": "here:1/1", "rank": 1}) is None
        second = join(path, {**RUN, "rank": 1})
        assert second is not None
        assert join(path, {**RUN, "rank": 1}) is None
    with pytest.raises(BeingWritten):
        create(path, {}, force=True)
    second.close()
    create(path, {}, force=True).close()


def test_a_rank_that_comes_too_late_gets_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the folder was replaced while the rank took hold of it, it has no part in the new one."""
    path = tmp_path / "r.kedge"
    create(path, {**RUN, "rank": 0}, force=False).close()
    monkeypatch.setattr(lock, "_is_still", lambda *_: False)

    with pytest.raises(BeingWritten, match="another process has just replaced it"):
        join(path, {**RUN, "rank": 1})


def test_what_was_removed_is_an_error_for_its_writer(tmp_path: Path) -> None:
    """A file without a name would take all in and keep nothing."""
    path = tmp_path / "r.kedge"
    with create(path, {}, force=False) as writer:
        for name in ("stats-0.arrows", "events.jsonl"):
            (path / name).unlink()
        for write in (
            lambda: writer.stats(0, {"site": []}),
            lambda: writer.event(NoteEvent()),
        ):
            with pytest.raises(
                RecordingError,
                match=r"it was removed while it was being written; leave the folder alone",
            ):
                write()
        with pytest.raises(RecordingError, match="it was removed"):
            writer.close()


def test_what_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old recording is there again if the new one cannot be put in its place."""
    path = tmp_path / "r.kedge"
    create(path, {"who": 1}, force=False).close()

    def refuse(fresh: Path, folder: Path) -> None:
        raise RecordingError(f"cannot move {fresh} to {folder}")

    monkeypatch.setattr(destination, "_move", refuse)
    with pytest.raises(RecordingError, match="cannot move"):
        create(path, {"who": 2}, force=True)

    assert Recording.open(path).manifest["who"] == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.kedge"]
