"""Several ranks in one recording: merged as one batch in pieces, and each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kedge.errors import NoSuchRank, NotARecording
from kedge.store.events import EndEvent, event_from
from kedge.store.reading.ranks import RankShare, assemble
from kedge.store.recording import Recording
from kedge.store.writing.folder import create, join

RUN = {"run": "a", "attempt": "here:1/0", "world": 2}
ROOT = {"name": "Net", "prefix": "", "parameters": 4}
OTHER = {"name": "Loss", "prefix": "Loss", "parameters": 0}


def site(
    text: str, number: int, sources: Sequence[int | None] = (), **entry: Any
) -> dict[str, Any]:
    """Describe a site."""
    return {"id": number, "site": text, "shape": [2, 4], "from": list(sources), **entry}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Write a recording of two ranks, whose sites fired in another order and are not all the same."""
    path = tmp_path / "r.kedge"
    first = create(path, {**RUN, "rank": 0}, force=False)
    second = join(path, {**RUN, "rank": 1})
    assert second is not None
    first.sites(
        [site("a:out", 0), site("b:in", 1, [0]), site("Loss:out", 2, root=1)], [ROOT, OTHER]
    )
    second.sites(
        [
            site("Loss:out", 0, root=0),
            site("c:out", 1, [None], root=1),
            site("a:out", 2, root=1),
            site("b:in", 3, [1, 2], root=1),
        ],
        [OTHER, ROOT],
    )
    for step in (0, 10):
        first.stats(
            step,
            {
                "site": [0, 1],
                "count": [8, 8],
                "sum": [8.0, 1.0],
                "sumsq": [8.0, 1.0],
                "calls": [1, 1],
            },
        )
        second.stats(
            step,
            {
                "site": [2, 1],
                "count": [24, 8],
                "sum": [0.0, 5.0],
                "sumsq": [0.0, 5.0],
                "calls": [2, 1],
            },
        )
    first.event(
        event_from(
            {
                "kind": "ledger",
                "sites": [{"site": "c:out", "fired": 0}, {"site": "d:out", "fired": 0}],
            }
        )
    )
    second.event(
        event_from(
            {
                "kind": "ledger",
                "sites": [{"site": "b:in", "fired": 0}, {"site": "d:out", "fired": 0}],
            }
        )
    )
    first.event(EndEvent(exit=0, steps=20))
    second.event(EndEvent(exit=1, steps=11))
    first.close()
    second.close()
    return path


def test_sites_are_the_same_by_their_text(path: Path) -> None:
    """Those of rank 0 keep their numbers, those only another rank has come after them, with their sources."""
    recording = Recording.open(path)

    assert [(s.id, s.site, s.root, s.sources) for s in recording.sites] == [
        (0, "a:out", 0, ()),
        (1, "b:in", 0, (0,)),
        (2, "Loss:out", 1, ()),
        (3, "c:out", 0, (None,)),
    ]
    assert [root.name for root in recording.roots] == ["Net", "Loss"]
    assert recording.ranks == (0, 1)


def test_rows_of_all_ranks_are_one(path: Path) -> None:
    """Counts and sums add up, and what is derived is that of all elements together."""
    recording = Recording.open(path)

    assert recording.steps.tolist() == [0, 10]
    assert recording.rows("a:out").count.tolist() == [32, 32]
    assert recording.rows("a:out").calls.tolist() == [3, 3]
    assert recording.series("a:out", "mean").tolist() == [0.25, 0.25]
    assert recording.series("c:out", "mean").tolist() == [0.625, 0.625]
    assert np.isnan(recording.series("Loss:out", "mean")).all()
    assert [len(part.rows(site)) for part in recording.table.parts for site in range(4)] == [
        2,
        2,
        0,
        0,
        2,
        0,
        0,
        2,
    ]


def test_a_rank_is_read_by_itself(path: Path) -> None:
    """With the numbers of the whole, its own sources, rows, events and end."""
    whole = Recording.open(path)
    second = whole.of_rank(1)

    assert second.ranks == (1,)
    assert [s.site for s in second.sites] == [s.site for s in whole.sites]
    assert second.site("b:in").sources == (3, 0)
    assert second.rows("a:out").count.tolist() == [24, 24]
    assert len(second.rows("b:in")) == 0
    assert second.end is not None
    assert (second.end.exit, [entry.site for entry in second.ledger]) == (
        1,
        ["b:in", "d:out"],
    )
    assert second.of_rank(1).rows("a:out").count.tolist() == [24, 24]
    assert whole.of_rank(0).rows("a:out").count.tolist() == [8, 8]


def test_the_whole_ends_as_its_first_rank(path: Path) -> None:
    """The events of others say whose they are; silent is what fired at no rank."""
    recording = Recording.open(path)

    assert recording.end == EndEvent(exit=0, steps=20)
    assert [end.rank for end in recording.of(EndEvent)] == [None, 1]
    assert [entry.site for entry in recording.ledger] == ["d:out"]


def test_a_rank_that_is_not_there_is_named(path: Path) -> None:
    """The error lists those that are."""
    with pytest.raises(NoSuchRank, match=r"^r.kedge has no data of rank 7: it has ranks 0, 1$"):
        Recording.open(path).of_rank(7)
    with pytest.raises(NoSuchRank, match=r"has no data of rank 1: it has rank 0$"):
        Recording.build().of_rank(1)
    assert Recording.build().of_rank(0).ranks == (0,)


def test_a_light_row_does_not_thin_out_a_full_one() -> None:
    """Ranks may measure different steps in full: a row whose sum nobody took does not count beside one with a sum."""
    recording = Recording.build(
        ["a:out"],
        [
            {"rank": 0, "step": 0, "site": 0, "count": 4, "sum": 8.0, "sumsq": 16.0},
            {"rank": 1, "step": 0, "site": 0, "count": 4, "sumsq": 16.0, "level": 1},
            {"rank": 0, "step": 1, "site": 0, "count": 4, "sum": 8.0, "sumsq": 16.0},
            {
                "rank": 1,
                "step": 1,
                "site": 0,
                "count": 4,
                "sumsq": np.inf,
                "nonfinite": 1,
                "level": 1,
            },
            {"rank": 0, "step": 2, "site": 0, "count": 4, "sumsq": 16.0, "level": 1},
            {"rank": 1, "step": 2, "site": 0, "count": 4, "sumsq": 16.0, "level": 1},
        ],
    )
    rows = recording.rows("a:out")

    assert rows.statistic("mean")[0] == 2.0
    assert rows.count.tolist() == [4, 8, 8]
    assert rows.clean.tolist() == [True, False, True]
    assert rows.level.tolist() == [2, 2, 1]


def test_histograms_and_channels_of_ranks_add_up() -> None:
    """What is packed in bytes is merged as well."""
    counts = np.zeros(83, dtype=int)
    counts[50] = 3
    rows = [
        {
            "rank": rank,
            "step": 0,
            "site": 0,
            "count": 4,
            "sampled": 3,
            "active": [rank == 0, False, rank == 1],
            "exponents": counts,
        }
        for rank in (0, 1)
    ]
    recording = Recording.build([{"site": "a:out", "channels": 3}], rows)

    assert recording.exponents("a:out")[1][0, 50] == 6
    assert recording.active("a:out")[2].tolist() == [[True, False, True]]
    assert recording.of_rank(1).active("a:out")[2].tolist() == [[False, False, True]]


def test_sites_of_a_rank_that_are_missing_are_named(path: Path) -> None:
    """Rows without their sites are an error that names the file of that rank."""
    (path / "sites-1.json").unlink()

    with pytest.raises(
        NotARecording, match=r"sites-1\.json is missing, though stats-1\.arrows holds rows"
    ):
        Recording.open(path)


def copied(*rows: dict[str, Any], copies: Sequence[int] = (0, 1)) -> Recording:
    """Return a recording of ranks that hold the same elements."""
    return Recording.build([{"site": "w:param", "copies": list(copies)}], rows)


def row(rank: int, step: int = 0, **columns: Any) -> dict[str, Any]:
    """Return a row of four elements."""
    return {
        "site": "w:param",
        "rank": rank,
        "step": step,
        "level": 2,
        "calls": 1,
        "count": 4,
        **columns,
    }


def test_elements_that_several_ranks_hold_count_once() -> None:
    """In each step one of their rows is read: of whichever rank has one, and a full one before a light one."""
    both = {"sum": 2.0, "sumsq": 6.0, "min": -1.0, "max": 2.0, "nonzero": 3, "nonfinite": 0}
    light = {"level": 1, "sumsq": 6.0}
    rows = copied(
        row(0, **both), row(1, **both), row(0, 1, **light), row(1, 1, **both), row(1, 2, **both)
    ).rows("w:param")

    assert rows.count.tolist() == [4, 4, 4]
    assert rows.calls.tolist() == [1, 1, 1]
    assert (rows.sum.tolist(), rows.nonzero.tolist()) == ([2.0] * 3, [3] * 3)


def test_copies_that_differ_are_no_copies() -> None:
    """Their rows are added up, and a rank with a NaN is read before one without."""
    apart = copied(row(0, sum=2.0, sumsq=6.0), row(1, sum=2.0, sumsq=7.0)).rows("w:param")
    broken = copied(row(0, sum=2.0, sumsq=6.0), row(1, nonfinite=1)).rows("w:param")

    assert (apart.count.tolist(), apart.sum.tolist()) == ([8], [4.0])
    assert (broken.count.tolist(), broken.nonfinite.tolist()) == ([4], [1])


def test_copies_of_other_elements_are_added_up() -> None:
    """On a mesh of two dimensions each part is held by some of the ranks."""
    path_rows = [row(rank, sum=float(rank % 2), sumsq=1.0) for rank in range(4)]
    parts = [{"site": "w:param", "copies": [rank % 2, rank % 2 + 2]} for rank in range(4)]
    tables = [Recording.build([part], [each]) for part, each in zip(parts, path_rows, strict=True)]
    shares = [RankShare(rank, (), t.sites, (), t.table) for rank, t in enumerate(tables)]
    rows = assemble(shares)[2].rows(0)

    assert (rows.count.tolist(), rows.sum.tolist()) == ([8], [1.0])
