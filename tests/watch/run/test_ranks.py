"""Which rank this is, and where its run records."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from kedge.errors import RecordingExists
from kedge.store.writing.folder import create, join
from kedge.store.writing.lock import LOCK, writers
from kedge.watch.run.ranks import LaunchedRank

pytestmark = pytest.mark.timing

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "9940a918-1f9b-46e5-8b06-b733fe625f90",
    "TORCHELASTIC_RESTART_COUNT": "0",
}


def launch(**variables: str) -> LaunchedRank:
    """Read an environment like torchrun's."""
    return LaunchedRank.here({**TORCHRUN, "RANK": "0", **variables})


def test_torchrun_tells_all() -> None:
    """Rank, world, the run's id, and an attempt that all ranks share."""
    found = LaunchedRank.here(TORCHRUN)

    assert (found.rank, found.world, found.leads) == (1, 4, False)
    assert found.label == "9940a918"
    assert found.describe() == launch().describe() | {"rank": 1}
    assert launch(TORCHELASTIC_RESTART_COUNT="1").attempt != found.attempt


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "3"},
        {"RANK": "", "WORLD_SIZE": "2"},
        {"RANK": "first", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "29500"},
    ],
)
def test_a_process_by_itself_is_named_by_its_number(environment: dict[str, str]) -> None:
    """Half an environment, or a world of one, is no distributed run."""
    found = LaunchedRank.here(environment)

    assert found == LaunchedRank()
    assert found.label == str(os.getpid())


def test_runs_without_an_id_are_named_by_their_port() -> None:
    """All ranks know it; a chosen id is taken as it is, but for what a file cannot be named."""
    assert launch(TORCHELASTIC_RUN_ID="none").label == "29400"
    assert launch(TORCHELASTIC_RUN_ID="exp-7/a b").label == "exp-7_a_b"


def recorded(path: Path, found: LaunchedRank) -> None:
    """Leave a recording of a run."""
    create(path, found.describe(), force=False).close()


def test_an_earlier_attempt_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one is beside it, with --force and without."""
    monkeypatch.chdir(tmp_path)
    recorded(Path("it.kedge"), launch())
    recorded(Path("it.restart-1.kedge"), launch())

    for force in (False, True):
        assert (
            launch(TORCHELASTIC_RESTART_COUNT="2").settle("it.kedge", force) == "it.restart-2.kedge"
        )


def test_another_runs_recording_is_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced with --force only; beside it, where a later attempt goes, without force it is passed by."""
    monkeypatch.chdir(tmp_path)
    old, new = launch(TORCHELASTIC_RUN_ID="old"), launch(TORCHELASTIC_RUN_ID="new")
    recorded(Path("it.kedge"), old)
    with pytest.raises(RecordingExists):
        new.settle("it.kedge", force=False)
    assert new.settle("it.kedge", force=True) == "it.kedge"

    create("it.kedge", new.describe(), force=True).close()
    recorded(Path("it.restart-1.kedge"), old)
    assert new.settle("it.kedge", force=False) == "it.restart-2.kedge"
    assert new.settle("it.kedge", force=True) == "it.restart-1.kedge"


def test_without_an_id_a_second_run_is_no_second_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs may meet at the same port; only a launcher that says so has started one again."""
    monkeypatch.chdir(tmp_path)
    recorded(Path("it.kedge"), launch(TORCHELASTIC_RUN_ID="none"))
    with pytest.raises(RecordingExists):
        launch(TORCHELASTIC_RUN_ID="none").settle("it.kedge", force=False)

    again = launch(TORCHELASTIC_RUN_ID="none", TORCHELASTIC_RESTART_COUNT="1")
    assert again.settle("it.kedge", force=False) == "it.restart-1.kedge"


def test_only_rank_0_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others look for what it made."""
    monkeypatch.chdir(tmp_path)
    recorded(Path("it.kedge"), launch(TORCHELASTIC_RUN_ID="old"))

    assert LaunchedRank.here(TORCHRUN).settle("it.kedge", force=False) == "it.kedge"


def test_a_damaged_manifest_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be read is not taken for an earlier attempt."""
    monkeypatch.chdir(tmp_path)
    recorded(Path("it.kedge"), launch())
    Path("it.kedge/manifest.json").write_text(json.dumps(["format"]))

    with pytest.raises(RecordingExists, match="something that is not a recording"):
        launch().settle("it.kedge", force=False)


def test_rank_0_waits_for_the_other_ranks_but_not_for_long(tmp_path: Path) -> None:
    """The wait ends when every rank has written its last rows, or when the time is up."""
    path = tmp_path / "it.kedge"
    first = launch(WORLD_SIZE="2")
    second = launch(WORLD_SIZE="2", RANK="1")
    first.await_others(path, 60)  # no recording was made
    create(path, first.describe(), force=False).close()

    began = time.monotonic()
    first.await_others(path, 0.2)
    assert time.monotonic() - began >= 0.2, "rank 1 has not begun"

    with (path / LOCK).open("a") as lock:
        lock.write('{"rank": 1, "pi')
    assert [one["rank"] for one in writers(path)] == [0], "what is half written is no line yet"
    with (path / LOCK).open("a") as lock:
        lock.write('d": 1, "host": "elsewhere"}\n')
    writer = join(path, second.describe())
    assert writer is not None
    began = time.monotonic()
    first.await_others(path, 0.2)
    assert time.monotonic() - began >= 0.2, "rank 1 is still writing"

    writer.close()
    first.await_others(path, 60)
    LaunchedRank().await_others(path, 60)
