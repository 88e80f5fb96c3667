"""Watching never ends the program that is watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kedge.cli.recorder import Recorder
from kedge.cli.watching import Watching


class Broken:
    """A watch that cannot be ended."""

    summary = "what came out"

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("no end")


@pytest.fixture
def told() -> list[str]:
    """Collect what the user is told."""
    return []


def test_a_watch_that_cannot_begin_is_told(told: list[str], tmp_path: Path) -> None:
    """The program goes on unwatched, and nothing comes out."""
    watching = Watching(Recorder(tmp_path / "it.kedge", {}, False, told.append), "conv[", 1, told.append)

    watching.begin()

    (message,) = told
    assert message.startswith("cannot watch: SelectorError(")
    assert message.endswith("; the program goes on unwatched")
    assert watching.finish() is None


def test_a_watch_that_cannot_end_is_told(told: list[str], tmp_path: Path) -> None:
    """What came out until then is given, and the program's ending stays its own."""
    watching = Watching(Recorder(tmp_path / "it.kedge", {}, False, told.append), "**", 1, told.append)
    broken: Any = Broken()
    watching.watch = broken

    assert watching.finish() == "what came out"
    assert told == ["the watching ended badly: RuntimeError('no end')"]


def test_a_write_that_fails_is_told_once(told: list[str], tmp_path: Path) -> None:
    """After the first failure nothing more is written, and nothing more is said."""
    recorder = Recorder(tmp_path / "no" / "it.kedge", {}, False, told.append)

    recorder.sites([], [])
    recorder.stats(0, {})
    recorder.event({"kind": "note"})
    recorder.close()

    (message,) = told
    assert message.startswith(f"writing failed: cannot make the recording {tmp_path / 'no' / 'it.kedge'}")
    assert recorder.failed


def test_a_note_alone_makes_no_recording(told: list[str], tmp_path: Path) -> None:
    """A recording begins with the first sites; what is noted before that is dropped."""
    recorder = Recorder(tmp_path / "it.kedge", {}, False, told.append)

    recorder.event({"kind": "ledger", "sites": []})
    recorder.close()

    assert not (tmp_path / "it.kedge").exists()
    assert told == []
