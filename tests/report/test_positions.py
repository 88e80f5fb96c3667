"""Where ranks were at last, in sentences."""

from __future__ import annotations

from dataclasses import replace

from kedge.frames import SourceLine
from kedge.report.page.redact import shareable
from kedge.report.positions import last_positions
from kedge.store.events import EndEvent, Position, PositionEvent
from kedge.store.recording import Recording

LINE = SourceLine("moe.py", 7, "Expert.forward", "dist.all_reduce(x)")
FIRST = Position(step=3, module="experts.0", direction="forward", source=LINE)
OTHER = Position(step=3, module="experts.3", direction="forward")


def recording(*events: EndEvent | PositionEvent, world: int = 4) -> Recording:
    """Return a recording with these events."""
    rows = [{"site": 0, "step": 0, "rank": rank} for rank in range(world)]
    return Recording.build(["a:out"], rows, {"world": world}, events)


def look(position: Position, rank: int, since: str = "10:00:00") -> PositionEvent:
    """Return a look at 10:00:08."""
    begun = f"2026-01-01T{since}+00:00"
    return PositionEvent(
        position=position, seen="2026-01-01T10:00:08+00:00", since=begun, rank=rank
    )


def test_ranks_in_one_place_are_told_together() -> None:
    """Each other place has its own sentence."""
    looks = [look(FIRST, 0), look(FIRST, 1, "10:00:04"), look(OTHER, 2), look(FIRST, 3)]

    assert list(last_positions(recording(*looks))) == [
        "ranks 0, 1, 3 were last seen in the forward of experts.0, step 3 (moe.py:7: "
        "dist.all_reduce(x)), at 10:00:08 UTC, first seen there 8 s before",
        "rank 2 was last seen in the forward of experts.3, step 3, at 10:00:08 UTC, "
        "first seen there 8 s before",
    ]


def test_of_a_program_that_runs_only_those_are_told_that_stand_still() -> None:
    """Ten seconds in one place count as that."""
    looks = [look(FIRST, 0, "09:59:58"), look(OTHER, 1)]

    assert [said.partition(",")[0] for said in last_positions(recording(*looks), running=True)] == [
        "rank 0 was last seen in the forward of experts.0"
    ]


def test_a_rank_that_is_gone_while_others_run_is_told() -> None:
    """Its last look is ten seconds older than that of another."""
    gone = replace(look(OTHER, 1, "10:00:08"), seen="2026-01-01T09:59:58+00:00")
    gone = replace(gone, since=gone.seen)
    looks = [look(FIRST, 0, "10:00:08"), gone]

    assert list(last_positions(recording(*looks), running=True)) == [
        "rank 1 was last seen in the forward of experts.3, step 3, at 09:59:58 UTC"
    ]


def test_the_model_itself_and_a_look_that_was_the_only_one() -> None:
    """The model has no path, and of one look there is no duration."""
    model = Position(step=0, module="", direction="forward")

    assert list(last_positions(recording(look(model, 0, "10:00:08"), world=1))) == [
        "the program was last seen in the forward of the model, step 0, at 10:00:08 UTC"
    ]


def test_an_end_by_an_error_is_told_as_such() -> None:
    """With the rank, and the line where it came."""
    end = EndEvent(exit=1, error="RuntimeError: timed out", position=FIRST)

    assert list(last_positions(recording(end, look(OTHER, 1)))) == [
        "rank 0 ended in the forward of experts.0, step 3 (moe.py:7: dist.all_reduce(x))",
        "rank 1 was last seen in the forward of experts.3, step 3, at 10:00:08 UTC, "
        "first seen there 8 s before",
    ]


def test_what_is_shared_without_source_has_no_line() -> None:
    """The modules stay."""
    end = EndEvent(exit=1, error="RuntimeError: timed out", position=FIRST)
    shared = shareable(recording(end, look(FIRST, 1)), source=False)

    assert [said.partition(" at ")[0] for said in last_positions(shared)] == [
        "rank 0 ended in the forward of experts.0, step 3",
        "rank 1 was last seen in the forward of experts.0, step 3,",
    ]
