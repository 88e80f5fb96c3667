"""A recording of several ranks on a page: all together, or one by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.report.page.document import condense
from kedge.report.shown_run import ShownRun
from kedge.store.recording import Recording
from tests.report.page.shooting import shoot
from tests.report.page.test_condense import unpacked

LAYERS = ("a", "b", "c")


def together(count: int, steps: int = 12, apart: int = 1) -> Recording:
    """Write down ranks of which each is ten times as large as the one before; the last leaves some steps out."""
    rows: list[dict[str, Any]] = []
    for rank in range(count):
        for step in range(0, steps, apart if rank == count - 1 else 1):
            for depth, name in enumerate(LAYERS):
                size = 10.0**rank * (1 + depth)
                told = {"sum": 0.0, "sumsq": 4 * size**2, "min": -size, "max": size, "nonzero": 4}
                rows.append({"rank": rank, "site": f"{name}:out", "step": step, "count": 4, **told})
            rows.append(
                {"rank": rank, "site": ":grad.norm", "step": step, "count": 1, "sumsq": 100.0**rank}
            )
    sites = [{"site": f"{name}:out", "type": "Linear", "shape": [1, 4]} for name in LAYERS]
    return Recording.build([*sites, ":grad.norm"], rows, {"world": count}, roots=[{"name": "Net"}])


def test_each_rank_has_what_it_recorded_in_the_same_columns() -> None:
    """The numbers of a rank are its own, at its own steps; the columns are those of all."""
    recording = together(2, apart=3)
    document = condense(ShownRun(recording, [], ()))
    shown = document.described["ranks"]["shown"]
    assert [one["rank"] for one in shown] == [0, 1]
    assert document.described["ranks"]["left_out"] == []
    for one in shown:
        sheet = one["sheets"]["rms"]
        table = unpacked(document.tables[f"rank{one['rank']}-rms"], sheet["form"]).reshape(-1, 12)
        for row, site in zip(table, sheet["rows"], strict=True):
            own = recording.of_rank(one["rank"])
            expected = dict(
                zip(own.steps.tolist(), own.series(own.sites[site], "rms").tolist(), strict=True)
            )
            assert row.tolist() == pytest.approx(
                [expected.get(step, float("nan")) for step in range(12)], 4e-3, nan_ok=True
            )
        assert [curve["kind"] for curve in one["curves"]] == ["norm"]


def test_one_rank_is_no_choice() -> None:
    """A recording of a single rank carries its numbers once."""
    document = condense(ShownRun(together(1), [], ()))
    assert document.described["ranks"] == {"shown": [], "left_out": []}
    assert not any(name.startswith("rank") for name in document.tables)


def test_the_lowest_ranks_are_taken_as_far_as_there_is_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page does not grow without end with the number of ranks: it names those that it leaves out."""
    one = condense(ShownRun(together(2), [], ())).described["ranks"]["shown"][0]["sheets"]
    numbers = sum(len(sheet["rows"]) * 12 for sheet in one.values() if sheet["rows"] is not None)
    monkeypatch.setattr("kedge.report.page.document.MOST_OF_RANKS", 2 * numbers)
    document = condense(ShownRun(together(4), [], ()))
    assert [one["rank"] for one in document.described["ranks"]["shown"]] == [0, 1]
    assert document.described["ranks"]["left_out"] == [2, 3]
    assert not any(name.startswith(("rank2", "rank3")) for name in document.tables)


def scale(page: Any) -> str:
    """Read the newest rms of the site whose panel is open."""
    figures = page.locator("#panel .figures div", has=page.get_by_text("rms", exact=True)).first
    return str(figures.locator("dd").inner_text())


def test_a_rank_is_shown_by_itself(saved: Callable[..., str], tab: Any, shots: Path) -> None:
    """The choice of a rank is drawn everywhere, is kept in the address, and can be taken back."""
    address = saved(together(3, apart=3), [])
    page = tab.open(f"{address}#site=a:out")
    assert page.locator("#rank option").all_inner_texts() == [
        "all ranks",
        "rank 0",
        "rank 1",
        "rank 2",
    ]
    merged, legend = scale(page), page.inner_text("#heat .legend")

    page.select_option("#rank", label="rank 1")
    assert scale(page) == "10.0"
    assert page.inner_text("#heat .legend") != legend
    assert "rank=1" in page.url
    shoot(page, shots / "rank.png")

    page.select_option("#rank", label="rank 2")
    assert scale(page) == "100"
    assert "no value" in page.inner_text("#heat .legend")
    page.select_option("#rank", label="all ranks")
    assert scale(page) == merged != "100"
    assert page.url.endswith("#site=a%3Aout")

    page.goto("about:blank")
    page = tab.open(f"{address}#site=a:out&rank=0")
    assert scale(page) == "1.00"
    assert page.locator("#rank").input_value() == "0"


def test_what_is_left_out_is_named(
    saved: Callable[..., str], tab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank for which there is no room cannot be chosen, and the list says so."""
    monkeypatch.setattr("kedge.report.page.document.MOST_OF_RANKS", 400)
    page = tab.open(saved(together(4), []))
    told = page.locator("#rank option[disabled]").inner_text()
    assert told == "left out, the page would be too large: ranks 1 to 3"


def test_a_single_rank_has_no_list(saved: Callable[..., str], tab: Any) -> None:
    """Where there is nothing to choose, nothing is offered; an address that names a rank shows what there is."""
    page = tab.open(f"{saved(together(1), [])}#site=a:out&rank=7")
    assert page.locator("#rank").is_hidden()
    assert scale(page) == "1.00"
