"""The folder of a recording: made once, replaced only on request."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.errors import RecordingError, RecordingExists
from kedge.store.events import EndEvent, NoteEvent
from kedge.store.recording import FORMAT, Recording
from kedge.store.writing.folder import create

NOBODY = 65534


def test_a_new_folder_holds_a_manifest_at_once(tmp_path: Path) -> None:
    """Before the first step there is a recording that can be opened."""
    with create(tmp_path / "r.kedge", {"script": "train.py", "rank": 2}, force=False):
        found = sorted(path.name for path in (tmp_path / "r.kedge").iterdir())
        manifest = json.loads((tmp_path / "r.kedge" / "manifest.json").read_text())

        assert found == ["events-2.jsonl", "manifest.json", "stats-2.arrows", "writers.lock"]
        assert manifest == {"format": FORMAT, "script": "train.py", "rank": 2}
        assert Recording.open(tmp_path / "r.kedge").manifest == manifest


def test_arguments_that_are_no_text_are_kept(tmp_path: Path) -> None:
    """A command line with bytes that are no UTF-8 comes back as Python had it."""
    argument = os.fsdecode(b"caf\xe9")
    create(tmp_path / "r.kedge", {"command": [argument]}, force=False).close()

    assert Recording.open(tmp_path / "r.kedge").manifest["command"] == [argument]


def test_a_recording_is_not_replaced_unasked(tmp_path: Path) -> None:
    """Without force an existing recording is an error that names both ways out, and stays."""
    path = tmp_path / "r.kedge"
    create(path, {"script": "old.py"}, force=False).close()
    with pytest.raises(RecordingExists) as caught:
        create(path, {"script": "new.py"}, force=False)

    assert str(caught.value) == (
        f"cannot create the recording {path}: there is one already; "
        "name another place, or replace it with --force (in code: force=True)"
    )
    assert Recording.open(path).manifest["script"] == "old.py"


def test_force_replaces_a_recording(tmp_path: Path) -> None:
    """With force nothing of the old recording is left."""
    path = tmp_path / "r.kedge"
    with create(path, {"script": "old.py"}, force=False) as writer:
        writer.sites([{"id": 0, "site": "a:out"}], [])
        writer.stats(0, {"site": [0]})
        writer.event(EndEvent())
    create(path, {"script": "new.py"}, force=True).close()
    recording = Recording.open(path)

    assert (recording.manifest["script"], recording.sites, recording.end) == ("new.py", (), None)
    assert len(recording.steps) == 0


def test_force_replaces_a_damaged_recording(tmp_path: Path) -> None:
    """A folder whose manifest names a format is a recording, however damaged the rest is."""
    path = tmp_path / "r.kedge"
    create(path, {}, force=False).close()
    (path / "stats-0.arrows").write_text("spoilt")
    create(path, {}, force=True).close()

    assert Recording.open(path).steps.tolist() == []


def _file(path: Path) -> None:
    path.write_text("mine")


def _foreign_folder(path: Path) -> None:
    path.mkdir()
    (path / "thesis.tex").write_text("mine")


def _foreign_manifest(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"name": "mine"}')


def _broken_manifest(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text("mine")


def _link(path: Path) -> None:
    create(path.parent / "elsewhere.kedge", {}, force=False).close()
    path.symlink_to("elsewhere.kedge")


def _dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        _file,
        Path.mkdir,
        _foreign_folder,
        _foreign_manifest,
        _broken_manifest,
        _link,
        _dangling_link,
    ],
)
def test_what_is_no_recording_is_never_touched(tmp_path: Path, make: object, force: bool) -> None:
    """A file, a link or any other folder in the way is an error with and without force, and stays."""
    path = tmp_path / "r.kedge"
    assert callable(make)
    make(path)
    before = _contents(tmp_path)
    with pytest.raises(RecordingExists) as caught:
        create(path, {}, force=force)

    assert str(caught.value) == (
        f"cannot create the recording {path}: something that is not a recording is there and is left alone; "
        "name another place"
    )
    assert _contents(tmp_path) == before


def _contents(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*"))
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in found}


def test_a_missing_parent_is_named(tmp_path: Path) -> None:
    """A recording in a folder that is not there is an error that says to make it."""
    path = tmp_path / "no" / "r.kedge"
    with pytest.raises(RecordingError) as caught:
        create(path, {}, force=False)

    assert str(caught.value) == (
        f"cannot create the recording {path}: No such file or directory; create the folder first, or name another place"
    )


def test_a_file_is_no_parent(tmp_path: Path) -> None:
    """A recording inside a file is an error that says to name a folder."""
    (tmp_path / "file").touch()
    with pytest.raises(
        RecordingError, match=r"Not a directory; name a place that is inside a folder$"
    ):
        create(tmp_path / "file" / "r.kedge", {}, force=False)


UNPRIVILEGED = """
import os, sys
from kedge.errors import RecordingError
from kedge.store.writing.folder import create

if os.getuid() == 0:
    os.setuid(int(sys.argv[2]))
try:
    create(sys.argv[1], {}, force=False)
except RecordingError as error:
    print(error)
"""


def test_a_folder_that_may_not_be_written_is_named(
    tmp_path: Path, alone: Callable[..., list[str]]
) -> None:
    """Where the right to write is missing, the error says so and nothing is left behind."""
    parent = tmp_path / "closed"
    parent.mkdir(mode=0o555)
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(folder.stat().st_mode | 0o555)
    done = subprocess.run(
        alone(UNPRIVILEGED, parent / "r.kedge", NOBODY), capture_output=True, text=True, check=True
    )

    assert done.stdout == (
        f"cannot create the recording {parent}/r.kedge: Permission denied; check the permissions, or name another place\n"
    )
    assert list(parent.iterdir()) == []


def test_sites_are_replaced_as_a_whole(tmp_path: Path) -> None:
    """Describing sites again replaces the file and leaves no temporary one behind."""
    path = tmp_path / "r.kedge"
    with create(path, {}, force=False) as writer:
        writer.sites([{"id": 0, "site": "a:out"}], [{"name": "Net"}])
        writer.sites([{"id": 0, "site": "a:out"}, {"id": 1, "site": "b:out"}], [{"name": "Net"}])

        assert [site.site for site in Recording.open(path).sites] == ["a:out", "b:out"]
        assert sorted(entry.name for entry in path.iterdir()) == [
            "events.jsonl",
            "manifest.json",
            "sites.json",
            "stats-0.arrows",
            "writers.lock",
        ]


def test_each_event_is_a_line_at_once(tmp_path: Path) -> None:
    """An event is on the disk as one line when the call returns, whatever its text holds."""
    path = tmp_path / "r.kedge"
    with create(path, {}, force=False) as writer:
        writer.event(NoteEvent(text="two\nlines, \u2028 and more"))
        writer.event(NoteEvent(text="x" * 100_000))

        assert len((path / "events.jsonl").read_bytes().splitlines()) == 2
        assert [event.text[:9] for event in Recording.open(path).events] == [
            "two\nlines",
            "x" * 9,
        ]


def test_an_event_with_a_number_that_json_lacks_is_refused(tmp_path: Path) -> None:
    """NaN in an event is an error at once: other programs could not read the line."""
    with (
        create(tmp_path / "r.kedge", {}, force=False) as writer,
        pytest.raises(ValueError, match="not JSON compliant"),
    ):
        writer.event(EndEvent(seconds=float("nan")))

    assert (tmp_path / "r.kedge" / "events.jsonl").read_bytes() == b""


def test_a_recording_closes_once(tmp_path: Path) -> None:
    """Closing twice does nothing more, and the recording is whole."""
    writer = create(tmp_path / "r.kedge", {}, force=False)
    writer.close()
    writer.close()

    assert not Recording.open(tmp_path / "r.kedge").truncated
