"""The time of the work after the end of a program."""

from __future__ import annotations

from pathlib import Path

from kedge.rules.registry import ALL
from kedge.short_text import percent, seconds
from kedge.store.writing.folder import create
from kedge.watch.run.end_clock import EndClock
from kedge.watch.run.recorder import RecordingSink
from kedge.watch.run.summary import last_words
from kedge.watch.totals import WatchSummary


class Clock:
    """A clock that goes on by some seconds each time that it is read."""

    def __init__(self, by: float) -> None:
        self.time, self.by = 100.0, by

    def __call__(self) -> float:
        self.time += self.by
        return self.time


def words(place: Path, end: EndClock) -> list[str]:
    """Record a step, and end."""
    recorder = RecordingSink(place, lambda: create(place, {"rank": 0}, force=False), print)
    recorder.sites([{"id": 0, "site": "fc:out", "path": "fc", "kind": "out"}], [{"name": "Net"}])
    recorder.stats(0, {"site": [0], "count": [1], "sum": [1.0]})
    recorder.close()
    return list(last_words("my run.kedge", recorder, WatchSummary(1, 5, 2, 2.0, 0.1, {}), end=end))


def test_the_printed_share_is_that_of_the_time_that_was_added() -> None:
    """Three seconds of the eight before the end, and four after it, are seven of twelve."""
    clock = Clock(by=0.0)
    end = EndClock(3.0, 8.0, now=clock)
    clock.time += 4.0
    assert end.cost() == (7.0, 12.0)


def test_the_last_words_count_themselves(tmp_path: Path) -> None:
    """The line is made when the work is done: time passes with each look at the clock, before each rule."""
    clock = Clock(by=0.25)
    told = words(tmp_path / "run.kedge", EndClock(3.0, 8.0, now=clock))
    after = clock.time - 100.25
    assert after > 5
    assert told[0].endswith(
        f"watching took {percent((3 + after) / (8 + after))} of {seconds(8 + after)}"
    )


def test_work_of_another_process_costs_the_program_nothing() -> None:
    """The command that was attached judges by itself."""
    clock = Clock(by=0.0)
    end = EndClock(3.0, 8.0, elsewhere=True, now=clock)
    clock.time += 4.0
    assert end.cost() == (3.0, 8.0)


def test_the_end_may_take_ten_seconds_or_as_long_as_the_program() -> None:
    """The program's own time is what passed without Kedge."""
    assert EndClock(3.0, 8.0).limit == 10.0
    assert EndClock(3.0, 80.0).limit == 77.0


def test_a_judgement_without_time_left_is_cut_short_with_a_word(tmp_path: Path) -> None:
    """It says how many rules judged, and the command that does the rest."""
    told = words(tmp_path / "cut.kedge", EndClock(0.1, 2.0, now=Clock(by=3.0)))
    assert (
        f"judged 3 of {len(ALL)} rules, as the rest would take longer than 10 s; it does: kedge check 'my run.kedge'"
        in told
    )
    assert not any("✓" in line for line in told)


def test_a_judgement_with_time_left_says_nothing_of_it(tmp_path: Path) -> None:
    """All rules have judged."""
    assert not [
        line
        for line in words(tmp_path / "whole.kedge", EndClock(0.1, 2.0))
        if line.startswith("judged")
    ]
