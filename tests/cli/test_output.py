"""Output in any encoding, progress on a terminal, and JSON for programs."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest

from kedge.cli.main import main
from kedge.cli.output import PLAIN
from kedge.cli.progress import progress
from kedge.stderr import SpacedLines, reports_to

Recorded = Callable[..., Path]


class Screen(io.StringIO):
    """A terminal that says when something was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        length = super().write(text)
        self.written.set()
        return length


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii", "cp1252", "cp437"])
@pytest.mark.parametrize(
    "words", [["report", "RUN"], ["check", "RUN"], ["diff", "RUN", "RUN"], ["explain", "NAN-BORN"]]
)
def test_any_encoding_will_do(
    words: list[str], encoding: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A character that the encoding lacks is replaced by one that it has, so the columns stay where they are."""
    place = str(recorded(broken_at=10))
    written: dict[str, list[str]] = {}
    for each in ("utf-8", encoding):
        bytes_out = io.BytesIO()
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, each, errors="strict"))
        assert main([place if word == "RUN" else word for word in words]) in (0, 1)
        written[each] = bytes_out.getvalue().decode(each).splitlines()

    assert list(map(len, written[encoding])) == list(map(len, written["utf-8"]))
    assert not any("\\u" in line for line in written[encoding])
    substitutes = str.maketrans(PLAIN)
    assert [line.translate(substitutes) for line in written[encoding]] == [
        line.translate(substitutes) for line in written["utf-8"]
    ]


def test_a_name_that_the_encoding_lacks_is_escaped(
    recorded: Recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what Kedge draws is replaced by something similar; a name must stay unambiguous."""
    recorded().rename(tmp_path / "größe→.kedge")
    monkeypatch.chdir(tmp_path)
    bytes_out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(bytes_out, "ascii"))

    assert main(["report", "größe→", "--html"]) == 0

    assert bytes_out.getvalue().startswith(b"gr\\xf6\\xdfe>.html: ")


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """A terminal, in an environment that allows progress bars."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return Screen()


def test_long_work_is_shown_on_a_terminal_and_erased(screen: Screen) -> None:
    """The line says what is done and for how long; when the work has ended, nothing of it stays."""
    with redirect_stderr(screen), progress("reading it", patience=0.01):
        assert screen.written.wait(30)

    lines = screen.getvalue().split("\r")
    assert lines[1].startswith("reading it: ")
    assert lines[-1] == "\x1b[K"


def test_short_work_is_not_shown(screen: Screen) -> None:
    """Work that ends at once writes nothing."""
    with redirect_stderr(screen), progress("reading it", patience=600):
        pass

    assert screen.getvalue() == ""


@pytest.mark.parametrize("name", ["CI", "TERM", ""])
def test_only_a_terminal_that_is_watched_shows_progress(
    name: str, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In CI, on a dumb terminal and in a file no line is drawn again and again: short work writes nothing there."""
    if name:
        monkeypatch.setenv(name, {"CI": "true", "TERM": "dumb"}[name])
    stream = screen if name else io.StringIO()

    with redirect_stderr(stream), progress("reading it", patience=0):
        pass

    assert stream.getvalue() == ""


@pytest.mark.parametrize("name", ["CI", "TERM", ""])
def test_elsewhere_long_work_is_reported_in_lines_that_stay(
    name: str, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log shows that the command lives, without control characters and colours."""
    if name:
        monkeypatch.setenv(name, {"CI": "true", "TERM": "dumb"}[name])
    else:
        monkeypatch.setattr(screen, "isatty", lambda: False)

    with (
        redirect_stderr(screen),
        progress("reading it", lines=SpacedLines(first=0.0, longest=600.0)),
    ):
        assert screen.written.wait(30)

    assert re.fullmatch(r"(\[kedge\] reading it: [\d.e-]+ s\n)+", screen.getvalue())


def test_lines_are_further_and_further_apart() -> None:
    """The first after ten seconds, each after twice the time, but at most ten minutes later."""
    now, told = [0.0], []
    lines = SpacedLines(clock=lambda: now[0])
    with reports_to(told.append):
        for _ in range(9):
            now[0] += lines.wait
            assert lines.wait == 0
            lines.tell(f"{lines.passed:.0f}")

    assert told == ["10", "20", "40", "80", "160", "320", "640", "1240", "1840"]


@pytest.mark.parametrize("word", ["-q", "--quiet"])
def test_progress_can_be_turned_off(
    word: str, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For one command: the next one shows it again."""
    threads: list[str] = []
    started = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda self: (threads.append(self.name), started(self))
    )
    run = str(recorded())

    assert main(["check", run, word]) == 0
    assert threads == []
    assert main(["check", run]) == 0
    assert len(threads) == 2


def test_a_report_as_json_has_the_run_its_findings_and_its_modules(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the object of ``kedge check --json`` and more; every number that JSON lacks is a string."""
    place = str(recorded(broken_at=10))
    assert main(["report", place, "--json"]) == 0
    report = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert main(["check", place, "--json"]) == 1
    checked = json.loads(capsys.readouterr().out)

    assert {key: report[key] for key in checked} == checked
    assert report["run"] == {
        "command": ["train.py", "--lr", "1"],
        "device": "cpu",
        "torch": "2.13.0+cpu",
        "python": "3.11.7",
        "started": "2026-11-21T07:00:00+00:00",
        "exit": 0,
        "error": None,
        "steps": 30,
        "seconds": 2.0,
        "watching": 0.1,
        "ended": True,
        "sampled": 3,
    }
    assert report["models"] == [{"model": "Net", "type": "Net", "parameters": 12}]
    assert report["modules"][0] == {
        "module": "log",
        "type": "Log",
        "shape": "2x5",
        "parameters": 0,
        "out": "nan",
        "grad": None,
        "update": None,
        "zero": 0.0,
        "broken": 2,
    }


def test_the_modules_of_a_json_report_can_be_chosen(
    recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--sites`` chooses as in the table."""
    assert main(["report", str(recorded()), "--json", "--sites", "log"]) == 0
    assert [each["module"] for each in json.loads(capsys.readouterr().out)["modules"]] == ["log"]


def test_rules_are_explained_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One rule or all, each with its thresholds and its page."""
    assert main(["explain", "spike", "--json"]) == 0
    (spike,) = json.loads(capsys.readouterr().out)
    assert main(["explain", "spike"]) == 0

    assert spike["page"] == capsys.readouterr().out
    assert (spike["code"], spike["severity"], bool(spike["thresholds"])) == (
        "SPIKE",
        "warning",
        True,
    )

    assert main(["explain", "--json"]) == 0
    assert {"SPIKE", "NAN-BORN"} <= {rule["code"] for rule in json.loads(capsys.readouterr().out)}


class Unwritable(io.StringIO):
    """An output that cannot be written; its number is that of another file, which may be closed."""

    def __init__(self, number: int, file: Path) -> None:
        super().__init__()
        self.number, self.own = number, os.open(file, os.O_WRONLY | os.O_CREAT)

    def write(self, text: str) -> int:
        raise OSError(self.number, os.strerror(self.number))

    def fileno(self) -> int:
        return self.own


@pytest.mark.parametrize(
    "line", ["report RUN", "check RUN", "check RUN --json", "diff RUN RUN", "completion bash"]
)
@pytest.mark.parametrize(
    ("number", "told"),
    [
        (errno.EPIPE, (141, "")),
        (errno.ENOSPC, (2, "kedge: the output cannot be written: No space left on device\n")),
        (errno.EIO, (2, "kedge: the output cannot be written: Input/output error\n")),
    ],
    ids=["a closed pipe", "a full disk", "a broken disk"],
)
def test_an_output_that_cannot_be_written_is_no_finding(
    number: int,
    told: tuple[int, str],
    line: str,
    recorded: Recorded,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The exit status is not 1, which would mean an error of the training, and there is no traceback."""
    run = recorded()
    stream = Unwritable(number, run.with_name("output"))
    monkeypatch.setattr(sys, "stdout", stream)

    status = main([str(run) if word == "RUN" else word for word in line.split()])

    os.close(stream.own)
    assert (status, capsys.readouterr().err) == told


def test_an_error_that_cannot_be_printed_keeps_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where stderr is full, as on a full disk."""
    monkeypatch.setattr(sys, "stderr", Unwritable(errno.ENOSPC, tmp_path / "errors"))

    assert main(["check", "nothing.kedge"]) == 2


@pytest.mark.parametrize("words", [["check"], ["run", "train.py"], ["sites", "train.py"]])
def test_a_working_directory_that_is_gone_is_named(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As after the folder was removed in another terminal."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()

    assert main(words) == 2

    assert (
        capsys.readouterr().err
        == "kedge: the working directory does not exist any more; change to another one\n"
    )
