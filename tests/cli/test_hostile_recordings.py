"""Recordings that are broken or made to harm: every command says so in one line, with exit status 2, and waits for nothing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kedge.cli.main import main
from kedge.errors import NotARecording
from kedge.store.follow import Follower
from kedge.store.reading.batches import MARK
from kedge.store.recording import Recording
from kedge.store.writing.folder import create

Recorded = Callable[..., Path]
COMMANDS = [
    ["report", "RUN"],
    ["check", "RUN"],
    ["diff", "RUN", "RUN"],
    ["export", "RUN", "--parquet", "-o", "out.parquet"],
    ["query", "RUN", "SELECT * FROM sites"],
    ["serve", "RUN"],
]
DEEP = "[" * 100_000
FORMAT = '{"format": 1, '


def _refused(words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must fail, and return what follows its name in the one line on stderr."""
    capsys.readouterr()
    assert main([str(folder) if word == "RUN" else word for word in words]) == 2
    out, told = capsys.readouterr()
    assert (out, told.count("\n"), told[:7]) == ("", 1, "kedge: ")
    return told[7:-1]


def _place_a(kind: str, path: Path) -> None:
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"device": "/dev/zero", "loop": path.name}[kind])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize("name", ["manifest.json", "sites.json", "events.jsonl", "stats-0.arrows"])
def test_what_is_no_file_is_not_waited_for(
    recorded: Recorded,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pipe, a link to an endless device, a link to itself and a folder are named, whichever file they stand for."""
    monkeypatch.chdir(tmp_path)
    folder = recorded()
    for kind, words in (
        ("pipe", "it is a pipe"),
        ("device", "it is a device"),
        ("loop", "symbolic links"),
    ):
        _place_a(kind, folder / name)
        message = _refused(command, folder, capsys)
        assert words in message
        assert name in message
    _place_a("folder", folder / name)
    assert "it is a folder and not a file" in _refused(command, folder, capsys)


DAMAGED: list[tuple[str, str | bytes, str]] = [
    ("manifest.json", DEEP, "it has more than 50 levels"),
    ("manifest.json", '{"a":' * 60 + "1" + "}" * 60, "it has more than 50 levels"),
    ("manifest.json", '{"format": 1, "format": 1}', "it has the key 'format' twice in one object"),
    ("manifest.json", FORMAT + '"budget": NaN}', "it has NaN, which is not JSON"),
    ("manifest.json", FORMAT + '"budget": -Infinity}', "it has -Infinity, which is not JSON"),
    ("manifest.json", FORMAT + '"budget": 1e999}', "its number 1e999 is too large"),
    ("manifest.json", FORMAT + '"rank": ' + "9" * 5000 + "}", "it is not JSON (Exceeds the limit"),
    ("manifest.json", FORMAT + '"rank": 1e3}', "rank is 1000.0 but must be a whole number, 0 or more"),
    ("manifest.json", FORMAT + '"world": null}', "world is null but must be a whole number, 0 or more"),
    ("manifest.json", FORMAT + '"command": "train.py"}', "command is 'train.py' but must be a list"),
    ("manifest.json", FORMAT + '"command": [7]}', "command[0] is 7 but must be text"),
    ("manifest.json", b"\xef\xbb\xbf{}", "it is not JSON"),
    ("manifest.json", b'{"format": 1, "kedge": "\xff"}', "it is not JSON (byte 24 is not UTF-8)"),
    ("manifest.json", '{"format": ' + "9" * 4000 + "}", "is written in format 99999999"),
    ("sites.json", DEEP, "it has more than 50 levels"),
    ("sites.json", '{"roots": [], "sites": {}}', "sites is an object but must be a list"),
    ("sites.json", '{"roots": [], "sites": [{"id": 0, "site": 3}]}', "sites[0].site is 3 but must be text"),
    ("sites.json", '{"roots": [], "sites": [{"id": 0, "site": "a:out", "shape": [-1]}]}', "sites[0].shape[0] is -1 but must be"),
    ("sites.json", '{"roots": [], "sites": [{"id": 0, "site": "a:out", "from": [7]}]}', "has the source 7, and there are 1 sites"),
    ("sites.json", '{"roots": [], "sites": [{"id": 0, "site": "a:out", "root": 5}]}', "has the root 5, and there are 0 roots"),
    ("sites.json", '{"roots": [{"name": "Net", "modules": [{}]}], "sites": []}', "roots[0].modules[0] has no 'path'"),
    ("events.jsonl", DEEP + "\n", "line 1 has more than 50 levels"),
    ("events.jsonl", '{"kind": []}\n', "line 1: kind is a list but must be text"),
    ("events.jsonl", "{}\n", "line 1: it has no 'kind'"),
    ("events.jsonl", '{"kind": "end", "steps": "ten"}\n', "line 1: steps is 'ten' but must be a whole number, 0 or more"),
    ("events.jsonl", '{"kind": "ledger", "sites": [{"site": "a"}]}\n', "line 1: sites[0] has no 'fired'"),
    ("events.jsonl", '{"kind": "dump", "step": 0, "site": "a:out", "folder": "../../x"}\n', "line 1: folder is '../../x' but must be the name of"),
    ("events.jsonl", '{"kind": "saved", "step": 0, "bytes": 1e300, "modules": []}\n', "line 1: bytes is 1e+300 but must be"),
    ("stats-0.arrows", b"\xff" * 4 + b"\x10\0\0\0" + b"\0" * 100, "does not hold the statistics of a recording"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "words"), DAMAGED)
def test_wrong_values_are_named_with_their_place(
    recorded: Recorded,
    capsys: pytest.CaptureFixture[str],
    name: str,
    content: str | bytes,
    words: str,
) -> None:
    """The line says which file, which key and which value; no reader meets a value of another type."""
    folder = recorded()
    (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    assert words in _refused(["report", "RUN"], folder, capsys)
    assert words in _refused(["check", "RUN", "--json"], folder, capsys)
    with pytest.raises(Exception, match="kedge|recording|damaged|written"):
        Follower(folder).poll()


def test_a_hostile_version_is_shown_escaped_and_cut(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name of a newer version cannot move the cursor, colour the terminal, begin a line or fill the screen."""
    folder = recorded()
    (folder / "manifest.json").write_text(
        json.dumps({"format": 2, "kedge": "\x1b[31m9\r\n✓ fine" + "9" * 5000})
    )

    message = _refused(["report", "RUN"], folder, capsys)
    assert "by Kedge \\x1b[31m9\\r\\n✓ fine999" in message
    assert len(message) < 400


def test_names_that_a_terminal_would_obey_are_shown_escaped(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Escape sequences, marks of direction and halves of characters in names are visible in every output; long names are cut."""
    name = "\x1b[2J\u202eevil\ud800" + "n" * 5000
    folder = recorded(broken_at=10)
    entries = json.loads((folder / "sites.json").read_bytes())
    for site in entries["sites"]:
        site.update(
            {key: site[key].replace("log", name) for key in ("site", "path", "owner")}, type=name
        )
    (folder / "sites.json").write_text(json.dumps(entries))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    (folder / "manifest.json").write_text(
        json.dumps({**manifest, "device": name, "command": ["train.py", name]})
    )
    sound = tmp_path / "sound"
    with create(sound, {}, force=False) as writer:
        writer.sites(entries["sites"], [])
    for words in (
        ["report", "RUN", "--all"],
        ["report", "RUN", "--headroom"],
        ["check", "RUN"],
        ["check", "RUN", "--json"],
        ["diff", "RUN", "RUN"],
        ["query", "RUN", "SELECT site, path FROM sites"],
    ):
        main([str(folder) if word == "RUN" else word for word in words])
        printed = "".join(capsys.readouterr())
        assert not {"\x1b", "\u202e", "\ud800"} & set(printed), words
        assert "evil" in printed or "--headroom" in words
        if words[0] in ("report", "check") and "--json" not in words:
            assert max(map(len, printed.split())) < 500


def test_a_name_that_is_too_long_for_a_file_is_an_error_that_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A path of thousands of letters is an error of the operating system, told in one line that is not longer than a screen."""
    for command in COMMANDS:
        assert len(_refused(command, tmp_path / ("x" * 5000), capsys)) < 500


def test_ranks_are_those_of_proper_names(recorded: Recorded) -> None:
    """Files whose number is written otherwise, or is too large for a rank, are none of a rank."""
    folder = recorded()
    for number in ("٣", "01", "9" * 200, "-1", "1e3", ""):
        (folder / f"stats-{number}.arrows").touch()

    assert Recording.open(folder).ranks == (0,)


def test_absurd_counts_in_a_batch_are_a_cut_off_recording(tmp_path: Path) -> None:
    """A number of rows, a place or a length beyond the batch ends the reading before it, however large it is."""
    path = tmp_path / "r.kedge"
    with create(path, {}, force=False) as writer:
        writer.sites([{"id": 0, "site": "a:out"}], [])
        file, ends = path / "stats-0.arrows", []
        for step in range(3):
            writer.stats(step, {"site": [0], "count": [1], "sum": [float(step)]})
            ends.append(file.stat().st_size)
    content, second = file.read_bytes(), ends[0]
    assert content[second : second + 4] == MARK
    length = int.from_bytes(content[second + 4 : second + 8], "little")
    for at in range(second + 8, second + length, 4):
        for value in (2**62, -1):
            spoilt = content[:at] + struct.pack("<q", value) + content[at + 8 :]
            file.write_bytes(spoilt)
            recording = Recording.open(path)
            assert recording.series("a:out", "mean")[0] == 0.0
            assert len(recording.steps) <= 3


def test_rows_outside_of_their_batch_are_damage(tmp_path: Path) -> None:
    """Offsets of a binary column that run backwards or beyond its bytes are an error, and never bytes of another column."""
    path = tmp_path / "r.kedge"
    with create(path, {}, force=False) as writer:
        writer.sites(
            [{"id": 0, "site": "a:out", "channels": 8}, {"id": 1, "site": "b:out", "channels": 8}],
            [],
        )
        for step in range(2):
            writer.stats(step, {"site": [0, 1], "count": [8, 8], "active": [b"\x0f", b"\xf0"]})
    file = path / "stats-0.arrows"
    content = file.read_bytes()
    found = Recording.open(path).table.parts[0].batches  # type: ignore[union-attr]
    place = int(found.places["active"][0])
    assert np.frombuffer(content[place : place + 12], "<i4").tolist() == [0, 1, 2]
    for offsets in ([0, 1, 10**6], [0, -1, 2], [-5, 1, 2], [0, 2, 1], [2**31 - 1, 1, 2]):
        file.write_bytes(content[:place] + struct.pack("<3i", *offsets) + content[place + 12 :])
        recording = Recording.open(path)
        with pytest.raises(NotARecording, match="rows of 'active' lie outside of their batch"):
            recording.active("a:out")


def test_a_recording_that_nobody_may_read_is_an_error_that_says_so(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing permission is named, with the file; root has none missing, so the operating system's answer is made here."""
    folder, opened = recorded(), os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).endswith("sites.json"):
            raise PermissionError(13, "Permission denied", path)
        return opened(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    assert (
        "sites.json: Permission denied; check the permissions, or name another place"
        in _refused(["report", "RUN"], folder, capsys)
    )


def test_a_pipe_for_settings_is_not_waited_for(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--config with a pipe that nobody writes to is refused."""
    os.mkfifo(tmp_path / "pipe")

    assert "it is a pipe and not a file" in _refused(
        ["check", "RUN", "--config", str(tmp_path / "pipe")], recorded(), capsys
    )
