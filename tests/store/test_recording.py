"""Recording: what it answers, and what it says of folders that are none."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kedge.errors import NewerFormat, NoSuchSite, NotARecording
from kedge.store.events import EndEvent, LedgerLine, NoteEvent, event_from
from kedge.store.recording import FORMAT, Recording, Root, SiteInfo
from kedge.store.writing.folder import create

SITE = {
    "id": 0,
    "site": "conv1:out",
    "path": "conv1",
    "kind": "out",
    "type": "Conv2d",
    "root": 0,
    "shape": [64, 8, 8, 8],
    "dtype": "float32",
    "channels": 8,
    "from": [None],
    "owner": "conv1",
    "node": "ConvolutionBackward0",
}
WEIGHT = {"id": 1, "site": "conv1.weight:param", "owner": "conv1", "from": [0, None]}
ROOT = {"name": "Net", "prefix": "", "parameters": 12345}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recording of two sites and two steps."""
    path = tmp_path / "run.kedge"
    with create(path, {"kedge": "0.1.0", "every": 10}, force=False) as writer:
        writer.sites([SITE, WEIGHT], [ROOT])
        for step in (0, 10):
            writer.stats(
                step,
                {"site": [0, 1], "count": [4, 2], "sum": [step, 1.0], "active": [b"\x81", b""]},
            )
        writer.event(NoteEvent(step=3, text="näh"))
        writer.event(
            event_from(
                {
                    "kind": "ledger",
                    "sites": [{"site": "fc:out", "fired": 0, "cause": "never called"}],
                }
            )
        )
        writer.event(EndEvent(exit=0))
    return path


def test_what_was_written_is_read(folder: Path) -> None:
    """Manifest, roots, sites, events and rows come back as they were given."""
    recording = Recording.open(folder)

    assert recording.path == folder
    assert recording.manifest == {"format": FORMAT, "kedge": "0.1.0", "every": 10}
    assert recording.roots == (Root("Net", "", 12345, type="Net"),)
    assert recording.sites[0] == SiteInfo(
        id=0,
        site="conv1:out",
        path="conv1",
        kind="out",
        type="Conv2d",
        root=0,
        shape=(64, 8, 8, 8),
        dtype="float32",
        channels=8,
        sources=(None,),
        owner="conv1",
        node="ConvolutionBackward0",
    )
    assert recording.sites[1].sources == (0, None)
    assert recording.steps.tolist() == [0, 10]
    assert recording.series("conv1", "mean").tolist() == [0, 2.5]
    assert recording.series("conv1.weight:param", "mean").tolist() == [0.5, 0.5]
    assert recording.rows("conv1").active == (b"\x81", b"\x81")
    assert recording.events[0] == NoteEvent(step=3, text="näh")
    assert recording.end == EndEvent(exit=0)
    assert recording.ledger == (LedgerLine(site="fc:out", fired=0, cause="never called"),)
    assert not recording.truncated


def test_a_built_recording_is_as_one_read(folder: Path) -> None:
    """Tests and rules may build in memory what the reader would give."""
    read = Recording.open(folder)
    rows = [
        {"step": step, "site": site, "count": count, "sum": total, "active": active}
        for step in (10, 0)
        for site, count, total, active in (
            ("conv1:out", 4, step, [1, 0, 0, 0, 0, 0, 0, 1]),
            (1, 2, 1.0, b""),
        )
    ]
    built = Recording.build(
        [SITE, {"site": "conv1.weight:param", "from": [0, None]}], rows, {"every": 10}, [], [ROOT]
    )

    assert built.roots == read.roots
    assert built.sites[0] == read.sites[0]
    assert built.steps.tolist() == read.steps.tolist()
    for site in read.sites:
        np.testing.assert_array_equal(built.series(site, "mean"), read.series(site, "mean"))
        assert built.rows(site).active == read.rows(site).active
    assert (built.end, built.ledger, built.truncated) == (None, (), False)


def test_a_recording_is_a_value(folder: Path) -> None:
    """Nothing of a recording can be assigned, and asking twice gives the same answer."""
    recording = Recording.open(folder)

    with pytest.raises(dataclasses.FrozenInstanceError):
        recording.sites = ()  # type: ignore[misc]
    assert recording.rows("conv1") is recording.rows("conv1")


def test_reading_needs_no_torch(folder: Path, alone: Callable[..., list[str]]) -> None:
    """A recording opens and answers in an interpreter that has no torch."""
    code = (
        "import sys\nfrom kedge.store.recording import Recording\n"
        "print(Recording.open(sys.argv[1]).series('conv1', 'mean').tolist())"
    )
    done = subprocess.run(alone(code, folder), capture_output=True, text=True, check=True)

    assert done.stdout == "[0.0, 2.5]\n"


def test_sites_are_found_by_text_and_kind(folder: Path) -> None:
    """A path alone means the output; kinds are listed in data-flow order."""
    recording = Recording.open(folder)

    assert recording.site("conv1") is recording.site("conv1:out")
    assert recording.of_kind("param") == (recording.sites[1],)
    assert recording.of_kind("in") == ()


def test_the_output_of_the_root_is_found() -> None:
    """The root's path is empty: its output is ':out'."""
    recording = Recording.build([":out"], [{"step": 0, "site": 0, "count": 1, "sum": 3.0}])

    assert recording.series(":out", "mean").tolist() == [3.0]


def test_an_unknown_site_names_the_nearest(folder: Path) -> None:
    """A site that is not there is a LookupError with the nearest names."""
    with pytest.raises(NoSuchSite) as caught:
        Recording.open(folder).series("conv2:out", "mean")

    assert (
        str(caught.value)
        == "run.kedge has no site 'conv2:out': it holds 2 sites, the nearest is conv1:out"
    )
    assert isinstance(caught.value, LookupError)


def test_an_unknown_site_like_none_there_is_says_so() -> None:
    """Where nothing is near, no name is offered."""
    with pytest.raises(
        NoSuchSite, match=r"^this recording has no site 'zzz': it holds 1 site, none is near it$"
    ):
        Recording.build(["conv1:out"]).site("zzz")


def test_a_site_without_rows_is_absent_everywhere(folder: Path) -> None:
    """A site that is described but never fired has no rows and a series of NaN."""
    document = {"roots": [], "sites": [SITE, WEIGHT, {"id": 2, "site": "fc:out"}]}
    (folder / "sites.json").write_text(json.dumps(document))
    recording = Recording.open(folder)

    assert len(recording.rows("fc")) == 0
    assert np.isnan(recording.series("fc", "mean")).tolist() == [True, True]


def test_a_site_that_appears_later_is_nan_before(tmp_path: Path) -> None:
    """The series of a site that began to fire in the middle starts with NaN."""
    with create(tmp_path / "r.kedge", {}, force=False) as writer:
        writer.sites([SITE], [ROOT])
        writer.stats(0, {"site": [0], "count": [1], "sum": [1.0]})
        assert [site.site for site in Recording.open(tmp_path / "r.kedge").sites] == ["conv1:out"]
        writer.sites([SITE, WEIGHT], [ROOT])
        writer.stats(1, {"site": [0, 1], "count": [1, 1], "sum": [2.0, 5.0]})
    recording = Recording.open(tmp_path / "r.kedge")

    np.testing.assert_array_equal(recording.series("conv1.weight:param", "mean"), [np.nan, 5.0])
    np.testing.assert_array_equal(recording.series("conv1:out", "mean"), [1.0, 2.0])


def test_the_ranks_are_merged(folder: Path) -> None:
    """The files of all ranks make one recording, in which the rows of a step are one."""
    (folder / "stats-0.arrows").rename(folder / "stats-1.arrows")
    shutil.copy(folder / "sites.json", folder / "sites-1.json")
    with create(folder.parent / "other.kedge", {}, force=False) as writer:
        writer.stats(10, {"site": [0], "count": [4], "sum": [30.0], "active": [b"\x02"]})
    (folder.parent / "other.kedge" / "stats-0.arrows").rename(folder / "stats-0.arrows")
    recording = Recording.open(folder)

    assert recording.series("conv1", "mean").tolist() == [0, 5.0]
    assert recording.rows("conv1").active == (b"\x81", b"\x83")


def test_a_recording_just_started_is_empty(tmp_path: Path) -> None:
    """With nothing but its manifest, a recording has no site and no step."""
    create(tmp_path / "r.kedge", {}, force=False).close()
    for name in ("stats-0.arrows", "events.jsonl"):
        (tmp_path / "r.kedge" / name).unlink()
    recording = Recording.open(tmp_path / "r.kedge")

    assert (recording.sites, recording.roots, recording.events, recording.end) == ((), (), (), None)
    assert (recording.steps.tolist(), recording.truncated) == ([], False)


def test_a_torn_event_is_left_out(folder: Path) -> None:
    """The last line of the events may be incomplete: the others are read."""
    path = folder / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    recording = Recording.open(folder)

    assert [event.kind for event in recording.events] == ["note", "ledger"]
    assert (recording.end, recording.truncated) == (None, True)


def _spoil(folder: Path, name: str, content: str | None) -> None:
    (folder / name).unlink() if content is None else (folder / name).write_text(content)


DAMAGED: list[tuple[str, str | None, str]] = [
    ("manifest.json", "{", "{f}/manifest.json is damaged: it is not JSON (Expecting property name"),
    (
        "manifest.json",
        "[]",
        "{f}/manifest.json is damaged: it is JSON, but not an object; copy the whole folder again",
    ),
    (
        "manifest.json",
        "{}",
        "{f} is not a recording: its manifest.json has None instead of the number of its format",
    ),
    (
        "manifest.json",
        '{"format": "1"}',
        "{f} is not a recording: its manifest.json has '1' instead of the number",
    ),
    (
        "sites.json",
        None,
        "{f}/sites.json is missing, though stats-0.arrows holds rows; copy the whole folder again",
    ),
    ("sites.json", "{", "{f}/sites.json is damaged: it is not JSON"),
    (
        "sites.json",
        "{}",
        "{f}/sites.json is damaged: it has no 'roots'; copy the whole folder again",
    ),
    (
        "sites.json",
        '{"roots": [], "sites": [7]}',
        "{f}/sites.json is damaged: sites[0] is 7 but must be an object; copy the whole folder",
    ),
    (
        "sites.json",
        '{"roots": [], "sites": [{"id": 1, "site": "a:out"}]}',
        "{f}/sites.json is damaged: site 'a:out' has the id 1, not 0; copy the whole folder again",
    ),
    (
        "events.jsonl",
        '{"kind":"note"}\n{"kind\n',
        "{f}/events.jsonl is damaged: line 2 is not JSON; copy the whole",
    ),
    ("events.jsonl", "7\n", "{f}/events.jsonl is damaged: line 1 is not a JSON object"),
    (
        "stats-0.arrows",
        "hello, world",
        "{f}/stats-0.arrows does not hold the statistics of a recording: it is not an",
    ),
]


@pytest.mark.parametrize(("name", "content", "message"), DAMAGED)
def test_a_damaged_file_is_named(
    folder: Path, name: str, content: str | None, message: str
) -> None:
    """What is wrong with which file is said, whichever file it is."""
    _spoil(folder, name, content)
    with pytest.raises(NotARecording) as caught:
        Recording.open(folder)

    assert str(caught.value).startswith(message.replace("{f}", str(folder)))


def test_bytes_that_are_no_text_are_damage_too(folder: Path) -> None:
    """A JSON file of arbitrary bytes gives the same error as one of bad JSON."""
    (folder / "manifest.json").write_bytes(b"\xff\xfe\x00{}")

    with pytest.raises(NotARecording, match=r"manifest\.json is damaged: it is not JSON"):
        Recording.open(folder)


def test_a_newer_format_asks_for_an_upgrade(folder: Path) -> None:
    """A recording of a newer Kedge is refused by its number, whatever its other files hold."""
    (folder / "manifest.json").write_text('{"format": 2, "kedge": "3.0.0"}')
    (folder / "sites.json").write_text("something new")
    with pytest.raises(NewerFormat) as caught:
        Recording.open(folder)

    assert str(caught.value) == (
        f"{folder} is written in format 2, by Kedge 3.0.0; this version reads formats up to 1: upgrade Kedge to read it"
    )


def test_a_path_that_is_nowhere_is_no_recording(tmp_path: Path) -> None:
    """A missing folder is an error that says how recordings come to be."""
    with pytest.raises(NotARecording) as caught:
        Recording.open(tmp_path / "nowhere")

    assert str(caught.value) == (
        f"{tmp_path}/nowhere is not a recording: there is no such folder; kedge run writes one and prints its name"
    )


def test_an_empty_folder_is_no_recording(tmp_path: Path) -> None:
    """A folder with nothing in it is an error that says so."""
    with pytest.raises(NotARecording) as caught:
        Recording.open(tmp_path)

    assert str(caught.value) == (
        f"{tmp_path} is not a recording: the folder is empty and has no manifest.json; "
        "name a folder that kedge run wrote"
    )


def test_a_foreign_folder_is_no_recording(tmp_path: Path) -> None:
    """A folder of something else is an error that says what it holds."""
    for name in "abcde":
        (tmp_path / name).touch()
    with pytest.raises(NotARecording) as caught:
        Recording.open(tmp_path)

    assert str(caught.value) == (
        f"{tmp_path} is not a recording: the folder has no manifest.json, it holds a, b, c and 2 more; "
        "name a folder that kedge run wrote"
    )


def test_a_file_of_a_recording_points_at_its_folder(folder: Path) -> None:
    """Naming a file inside a recording is answered with the folder to name."""
    with pytest.raises(NotARecording) as caught:
        Recording.open(folder / "stats-0.arrows")

    assert str(caught.value) == (
        f"{folder}/stats-0.arrows is not a recording: it is a file; name {folder}, the folder it is in"
    )


def test_a_file_elsewhere_is_no_recording(tmp_path: Path) -> None:
    """A file that has nothing to do with a recording is an error that says what to name."""
    (tmp_path / "notes.txt").touch()

    with pytest.raises(
        NotARecording,
        match=r"notes\.txt is not a recording: it is a file; name a folder that kedge",
    ):
        Recording.open(tmp_path / "notes.txt")


def test_rows_of_a_site_not_described_are_left_alone(folder: Path) -> None:
    """A reader that meets rows of a site it does not know yet still gives all the others."""
    document: dict[str, Any] = {"roots": [], "sites": [SITE]}
    (folder / "sites.json").write_text(json.dumps(document))
    recording = Recording.open(folder)

    assert recording.series("conv1", "mean").tolist() == [0, 2.5]
