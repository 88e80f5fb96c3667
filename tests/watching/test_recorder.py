"""Writing what was seen never ends the program that is watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.watching.recorder import Recorder
from kedge.watching.start import begin_recording


@pytest.fixture
def told() -> list[str]:
    """Collect what the user is told."""
    return []


def recorder_at(place: Path, told: list[str]) -> Recorder:
    """Make a recorder that would write there."""
    return Recorder(place, lambda: begin_recording(place, {}, force=False), told.append)


def test_a_write_that_fails_is_told_once(told: list[str], tmp_path: Path) -> None:
    """After the first failure nothing more is written, and nothing more is said."""
    recorder = recorder_at(tmp_path / "no" / "it.kedge", told)

    recorder.sites([], [])
    recorder.stats(0, {})
    recorder.event({"kind": "note"})
    recorder.close()

    (message,) = told
    assert message.startswith(f"writing failed: cannot make the recording {tmp_path / 'no' / 'it.kedge'}")
    assert recorder.failed


def test_a_note_alone_makes_no_recording(told: list[str], tmp_path: Path) -> None:
    """A recording begins with the first sites; what is noted before that is dropped."""
    recorder = recorder_at(tmp_path / "it.kedge", told)

    recorder.event({"kind": "ledger", "sites": []})
    recorder.close()

    assert not (tmp_path / "it.kedge").exists()
    assert told == []
