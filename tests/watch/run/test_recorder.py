"""Writing what was seen never ends the program that is watched."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.store.events import NoteEvent, event_from
from kedge.store.recording import Recording
from kedge.store.writing.folder import create
from kedge.watch.run import recorder as recorder_module
from kedge.watch.run.begin import begin_recording
from kedge.watch.run.ranks import LaunchedRank
from kedge.watch.run.recorder import RecordingSink


@pytest.fixture
def told() -> list[str]:
    """The messages to the user, as a list that grows."""
    return []


def recorder_at(place: Path, told: list[str]) -> RecordingSink:
    """Make a recorder that would write there."""
    return RecordingSink(place, lambda: begin_recording(place, {}, force=False), told.append)


def test_a_write_that_fails_is_reported_once(told: list[str], tmp_path: Path) -> None:
    """After the first failure nothing more is written, and nothing more is said."""
    recorder = recorder_at(tmp_path / "no" / "it.kedge", told)

    recorder.sites([], [])
    recorder.stats(0, {})
    recorder.event(NoteEvent())
    recorder.close()

    (message,) = told
    assert message.startswith(
        f"writing failed: cannot create the recording {tmp_path / 'no' / 'it.kedge'}"
    )
    assert recorder.failed


def test_a_note_alone_makes_no_recording(told: list[str], tmp_path: Path) -> None:
    """A recording begins with the first sites; what is noted before that is dropped."""
    recorder = recorder_at(tmp_path / "it.kedge", told)

    recorder.event(event_from({"kind": "ledger", "sites": []}))
    recorder.close()

    assert not (tmp_path / "it.kedge").exists()
    assert told == []


def rank_at(place: Path, told: list[str], *, strict: bool = False) -> RecordingSink:
    """Make the recorder of a rank that is not the first."""
    manifest = {"rank": 1, "world": 2, "run": "a", "attempt": "here:1/0"}
    return RecordingSink(
        place, lambda: begin_recording(place, manifest, force=False), told.append, strict=strict
    )


def test_a_rank_keeps_what_it_sees_until_there_is_a_recording(
    told: list[str], tmp_path: Path
) -> None:
    """Nothing is lost that came before rank 0 made it, and nothing is written twice."""
    place = tmp_path / "it.kedge"
    recorder = rank_at(place, told)
    recorder.sites([{"id": 0, "site": "a:out"}], [])
    recorder.stats(0, {"site": [0]})
    recorder.event(NoteEvent(text="early"))
    with create(
        place, {"rank": 0, "world": 2, "run": "a", "attempt": "here:1/0"}, force=False
    ) as writer:
        writer.sites([{"id": 0, "site": "a:out"}], [])
        recorder.stats(1, {"site": [0]})
        recorder.close()

    share = Recording.open(place).of_rank(1)
    assert share.steps.tolist() == [0, 1]
    assert [event.kind for event in share.events] == ["joined", "note"]
    assert told == []


def test_a_rank_has_a_folder_once_it_has_joined(told: list[str], tmp_path: Path) -> None:
    """Not before, though rank 0 has made it: what is noted of a dump would be lost.

    And it is that of its own attempt.
    """
    first, again = (
        {"rank": 0, "world": 2, "run": "a", "attempt": f"here:1/{number}"} for number in (9, 0)
    )
    recorder = rank_at(tmp_path / "it.kedge", told)
    with (
        create(tmp_path / "it.kedge", first, force=False),
        create(tmp_path / "it.restart-1.kedge", again, force=False),
    ):
        assert recorder.folder() is None
        recorder.sites([], [])
        assert recorder.folder() == tmp_path / "it.restart-1.kedge"
        recorder.close()
    assert told == []


def test_a_rank_waits_a_while_at_the_end(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it says that there is nothing to take part in, once."""
    monkeypatch.setattr(recorder_module, "PATIENCE_AT_THE_END", 0.1)
    recorder = rank_at(tmp_path / "it.kedge", told)
    recorder.sites([], [])
    recorder.close()
    recorder.close()

    (message,) = told
    assert "rank 0 has not created a recording at" in message
    assert not (tmp_path / "it.kedge").exists()


def test_a_rank_that_no_other_can_meet_does_not_wait(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an address or an id of the run, as with RANK and WORLD_SIZE alone, its end is immediate."""
    monkeypatch.setattr(recorder_module, "sleep", lambda _: pytest.fail("it waits"))
    launch = LaunchedRank.here({"RANK": "1", "WORLD_SIZE": "4"})
    recorder = RecordingSink(tmp_path / "it.kedge", lambda: None, told.append, waits=launch.meets)
    recorder.sites([], [])
    recorder.close()

    assert len(told) == 1
    assert LaunchedRank.here({"RANK": "1", "WORLD_SIZE": "4", "MASTER_PORT": "1"}).meets


@pytest.mark.parametrize(
    ("patience", "least"), [(0.0, recorder_module._FEW), (1e9, recorder_module._MANY)]
)
def test_a_rank_does_not_keep_without_end(
    told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience: float, least: int
) -> None:
    """After some time, and never more than so many writes, it gives up."""
    monkeypatch.setattr(recorder_module, "PATIENCE", patience)
    recorder = RecordingSink(tmp_path / "it.kedge", lambda: None, told.append)
    for step in range(least):
        recorder.stats(step, {})
    assert told == []
    recorder.stats(least, {})

    assert len(told) == 1
    assert recorder.failed


def test_strictly_a_failure_ends_the_program(told: list[str], tmp_path: Path) -> None:
    """It gets a message, and leaves by `sys.exit`, which `except Exception` does not catch."""
    place = tmp_path / "no" / "it.kedge"
    recorder = RecordingSink(
        place, lambda: begin_recording(place, {}, force=False), told.append, strict=True
    )
    with pytest.raises(SystemExit) as left:
        recorder.sites([], [])

    assert left.value.code == 2
    (message,) = told
    assert message.endswith("the program ends here, because of --strict")


def test_after_a_failure_the_recording_is_free(told: list[str], tmp_path: Path) -> None:
    """Nobody waits for a writer that has given up."""
    place = tmp_path / "it.kedge"
    recorder = recorder_at(place, told)
    recorder.sites([], [])
    recorder.stats(0, {"site": [1], "count": [1, 2]})

    assert len(told) == 1
    create(place, {}, force=True).close()
