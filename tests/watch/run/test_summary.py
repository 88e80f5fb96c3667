"""The last words of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge import native
from kedge.native import on_device
from kedge.store.writing.folder import create, join
from kedge.watch.run.end_clock import EndClock
from kedge.watch.run.recorder import RecordingSink
from kedge.watch.run.summary import last_words
from kedge.watch.totals import WatchSummary


def words(place: Path, world: int, ranks: int) -> list[str]:
    """Record on some ranks, and end."""
    shared = {"world": world, "run": "r", "attempt": "a:1/0"}
    recorder = RecordingSink(
        place, lambda: create(place, {**shared, "rank": 0}, force=False), print
    )
    recorder.sites([{"id": 0, "site": "fc:out", "path": "fc", "kind": "out"}], [{"name": "Net"}])
    recorder.stats(0, {"site": [0], "count": [1], "sum": [1.0]})
    for rank in range(1, ranks):
        writer = join(place, {**shared, "rank": rank})
        assert writer is not None
        writer.close()
    recorder.close()
    end = EndClock(0.1, 2.0, elsewhere=True)
    return list(last_words("run.kedge", recorder, WatchSummary(1, 5, 2, 2.0, 0.1, {}), end=end))


@pytest.mark.parametrize(
    ("world", "ranks", "begins"),
    [
        (1, 1, "1 site, 5 steps, 2 measured; watching took 5.0 % of 2"),
        (2, 2, "2 ranks recorded; rank 0: 1 site, 5 steps, 2 measured; watching took 5.0 % of 2"),
        (
            4,
            3,
            "3 of 4 ranks recorded; rank 0: 1 site, 5 steps, 2 measured; watching took 5.0 % of 2",
        ),
    ],
)
def test_the_last_words_name_the_ranks(world: int, ranks: int, begins: str, tmp_path: Path) -> None:
    """Of a run of several ranks they say how many have recorded, and whose the figures are; else they say nothing of ranks."""
    found = words(tmp_path / "run.kedge", world, ranks)
    assert found[0].startswith(begins)
    assert found[-1] == "see more with: kedge report run.kedge"


def test_the_last_words_say_once_that_the_compiled_part_is_missing(
    tmp_path: Path, monkeypatch
) -> None:
    """Where it could not be built all works, and the user learns that it would cost less."""
    assert not [line for line in words(tmp_path / "with.kedge", 1, 1) if "compiled part" in line]

    monkeypatch.setattr(native, "_compiled", None)
    monkeypatch.setattr(native, "_missing", "it was not built when Kedge was installed")
    told = [line for line in words(tmp_path / "without.kedge", 1, 1) if "compiled part" in line]

    assert told == [
        "watching would cost less with Kedge's compiled part: it was not built when Kedge was installed"
    ]


def test_the_last_words_say_why_triton_does_not_measure(tmp_path: Path, monkeypatch) -> None:
    """If values came on a device for which Triton compiles, and it was not there or failed."""
    monkeypatch.setattr(
        on_device, "_failed", {"cuda": "ModuleNotFoundError: No module named 'triton'"}
    )
    told = [line for line in words(tmp_path / "run.kedge", 1, 1) if "Triton" in line]

    assert told == [
        "watching would cost less on cuda with Triton: ModuleNotFoundError: No module named 'triton'"
    ]


def test_a_failure_of_kedge_is_not_taken_for_a_program_without_models(tmp_path: Path) -> None:
    """What failed was said when it did; that no module was called would be false."""
    recorder = RecordingSink(tmp_path / "none.kedge", lambda: None, print)

    assert list(
        last_words("run.kedge", recorder, WatchSummary(0, 3, 0, 2.0, 0.1, {}, failed=True))
    ) == ["nothing was recorded"]
