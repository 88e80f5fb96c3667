"""The page of a model of many blocks: its tree folds them, every block is in the pictures, and what differs is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kedge.errors import NoSuchSite
from kedge.report.module_lines import lines, matching
from kedge.report.page.document import condense
from kedge.report.shown_run import ShownRun
from kedge.rules.rule import Finding
from kedge.store.events import NotOptimizedEvent
from kedge.store.recording import Recording

BLOCKS, PARTS = 48, ("attn.q", "attn", "mlp", "")
ODD, BAD = "h.17.mlp", "h.31.attn"


def tower(odd: bool = True, zero: str = "") -> Recording:
    """Build a recording of a model of alike blocks, one of them far from the others, in 20 steps of which three are far apart."""
    paths = [
        "embed",
        *(f"h.{i}.{part}".rstrip(".") for i in range(BLOCKS) for part in PARTS),
        "head",
        "",
    ]
    sites = [
        {
            "site": f"{path}:{kind}",
            "path": path,
            "kind": kind,
            "type": path.rpartition(".")[2].strip("0123456789") or "Block",
        }
        for path in paths
        for kind in ("out", "out.grad")
    ]
    rows = []
    for step in (0, 1, 2, 19):
        for place, site in enumerate(sites):
            scale = (1.0 + place / 500) * (300.0 if odd and site["path"] == ODD else 1.0)
            scale *= 0.0 if site["site"] == f"{zero}:out" and not step else 1.0
            figures = {"sum": scale, "sumsq": scale**2 * 8, "min": -scale, "max": scale}
            rows.append({"site": site["site"], "step": step, "count": 8, "nonzero": 8, **figures})
    return Recording.build(sites, rows, roots=[{"name": "Net", "prefix": "", "parameters": 9}])


def found() -> list[Finding]:
    """Return a finding in one of the blocks."""
    return [Finding("ODD", "warning", f"{BAD}:out", 1, "it is odd.")]


def test_blocks_fold_but_for_those_with_findings_or_far_from_the_others() -> None:
    """The folds of the tree name the blocks; what differs in a block, at any depth, keeps it out."""
    document = condense(ShownRun(tower(), found(), ())).described

    (fold,) = [one for one in document["folds"] if one["name"].startswith("h.")]
    assert fold["name"] == "h.0-16,18-30,32-47"
    assert len(fold["paths"]) == BLOCKS - 2
    groups = {site["site"]: site["group"] for site in document["sites"]}
    assert len({groups[f"h.{i}.mlp:out"] for i in range(BLOCKS)}) == 1
    assert groups["h.0.mlp:out"] != groups["h.0.attn:out"]


@pytest.fixture
def page(saved: Callable[..., str], tab: Any) -> Any:
    """The page of that model."""
    return tab.open(saved(tower(), findings=found()))


def test_the_tree_unfolds_by_click_and_by_key(page: Any) -> None:
    """A fold has the spread of its blocks; it unfolds into their parts, and into each of them."""
    rows = page.locator(".tree .row")
    fold = rows.filter(has_text="0-16,18-30,32-47")
    assert "1.0..1.8" in fold.inner_text().split("\n")
    assert rows.filter(has_text="h.17").count() == 0

    fold.locator("..").locator(".toggle").focus()
    page.keyboard.press("Enter")
    page.wait_for_function("() => document.querySelectorAll('.tree .many').length === 3")
    parts = page.locator(".tree .many").all_inner_texts()
    assert parts == ["0-16,18-30,32-47", "attn", "mlp"]
    page.locator(".tree .head", has_text="each of the 46").click()
    page.wait_for_selector(".tree [data-path='h.47']")
    assert page.locator(".tree [data-path='h.47']").is_visible()

    page.keyboard.press("t")
    assert page.locator(".tree .many").all_inner_texts() == parts
    page.locator(".tree [data-path='h.47']").click()
    assert page.locator("#panel-site").inner_text() == "h.47:out"


def test_every_block_is_in_the_heat_map_and_named(page: Any) -> None:
    """Low rows are named by block; all of them are visible without scrolling inside the map."""
    held = page.eval_on_selector("#cells", "canvas => ({...canvas.dataset})")
    scroll = page.eval_on_selector(".heat-scroll", "box => [box.clientHeight, box.scrollHeight]")

    assert int(held["rows"]) == BLOCKS * len(PARTS) + 3
    assert scroll[0] >= scroll[1]


def test_columns_are_as_wide_as_the_steps_between_them(page: Any) -> None:
    """The step axis is true to scale: the third of four columns reaches over seventeen steps."""
    held = page.eval_on_selector("#cells", "canvas => ({...canvas.dataset})")
    left, plot, top = (float(held[name]) for name in ("left", "plot", "top"))

    tips = []
    for share in (0.004, 0.1, 0.3, 0.45):
        page.locator("#cells").hover(position={"x": left + share * plot, "y": top + 1})
        tips.append(page.locator(".tip").inner_text().split("\n")[1].split(" ·")[0])
    assert tips == ["step 0", "step 2", "step 2", "step 2"]


def test_scale_against_depth_has_a_point_for_each_block_and_names_what_is_far(page: Any) -> None:
    """Of 195 sites it draws 51 blocks, and names the one site that is far from the same of other blocks."""
    text = page.locator(".apart").inner_text()

    assert f"{BLOCKS * len(PARTS) + 3} sites in 51 blocks" in text
    assert page.locator(".apart button").all_inner_texts() == [ODD]
    page.locator(".apart button").click()
    assert page.locator("#panel-site").inner_text() == f"{ODD}:out"


def test_the_filter_takes_the_site_language_and_says_what_is_wrong(page: Any) -> None:
    """A word stands for names that begin so; one that selects nothing or cannot be read says so below the bar."""
    problem = page.locator("#filter-problem")
    for typed, rows, said in (
        ("att", 48, ""),
        ("**{mlp}, !h.1*.**", 37, ""),
        ("atn", 0, '"atn" selects nothing in this recording; the nearest are "attn"'),
        ("h.**x", 195, '"**" must stand alone between dots'),
    ):
        page.fill("#filter", typed)
        page.wait_for_function(
            "rows => document.querySelector('#cells').dataset.rows === String(rows)", arg=rows
        ) if rows else None
        page.wait_for_function(
            "said => document.querySelector('#filter-problem').textContent.includes(said)",
            arg=said,
            timeout=4000,
        )
        assert problem.is_visible() == bool(said)


def test_the_message_about_a_filter_that_selects_nothing_is_that_of_the_terminal(page: Any) -> None:
    """The same words, and the same names as nearest."""
    made = lines(tower())
    for typed in (
        "atn",
        "att, mpl",
        "h.0-47.attn",
        "*.attn",
        "h.3.atn",
        "**{Mpl}",
        "m",
        "zzz",
        "hed:out.grad",
    ):
        page.fill("#filter", typed)
        try:
            matching(made, typed)
            said = ""
        except NoSuchSite as error:
            said = str(error)
        page.wait_for_function(
            "said => document.querySelector('#filter-problem').textContent === said",
            arg=said,
            timeout=4000,
        )


def test_the_way_to_the_worst_finding_is_unfolded(page: Any) -> None:
    """What holds it has an open mark; the module itself a filled one, and is on the page without a click."""
    assert page.locator(f".tree [data-path='{BAD}']").is_visible()
    assert page.locator(".tree .badge.open").count() == 3  # the model, h and the block
    assert page.locator(".tree .badge:not(.open)").count() == 1


def test_the_axis_has_round_steps_where_they_are(page: Any) -> None:
    """Step 15 is within the third column, which reaches over steps 2 to 18."""
    drawn = page.evaluate(
        """() => {
          const texts = [];
          const fill = CanvasRenderingContext2D.prototype.fillText;
          CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
            if (this.canvas.className === "axis") texts.push([text, x]);
            return fill.call(this, text, x, y);
          };
          document.querySelector("#relative").click();
          CanvasRenderingContext2D.prototype.fillText = fill;
          const { left, plot } = document.querySelector("#cells").dataset;
          return texts.filter(([text]) => text !== "step").map(([text, x]) => [text, (x - left) / plot]);
        }"""
    )
    places = {int(text): share for text, share in drawn}
    assert 0 in places
    assert len(places) >= 6
    wide = (places[16] - places[2]) / 14
    assert wide == pytest.approx((places[8] - places[4]) / 4, rel=0.01)
    assert places[18] < 0.6  # the last column is as wide as the one before


def test_blocks_of_only_zeros_stand_out(saved: Callable[..., str], tab: Any) -> None:
    """One block gives only zeros in the first step, as others do not: it is a node of its own, and named at that step."""
    page = tab.open(saved(tower(odd=False, zero=ODD), findings=[]))

    assert page.locator(".tree .many").all_inner_texts() == ["0-16,18-47"]
    page.locator("#depth-step").evaluate(
        "input => { input.value = 0; input.dispatchEvent(new Event('input')); }"
    )
    assert page.locator(".apart button").all_inner_texts() == [ODD]
    assert "only zeros" in page.locator(".apart").inner_text()


def test_a_legend_says_that_the_newest_value_is_not_finite(
    saved: Callable[..., str], tab: Any
) -> None:
    """Not the last finite one, under a step that it is not of."""
    values = (2.5, 2.0, math.nan)
    rows = [
        {
            "site": "loss",
            "step": step,
            "count": 1,
            "sum": value,
            "sumsq": value**2,
            "min": value,
            "max": value,
        }
        | {"nonzero": 1, "nonfinite": int(math.isnan(value))}
        for step, value in enumerate(values)
    ]
    recording = Recording.build([{"site": "loss", "path": "loss", "kind": "loss"}], rows)

    page = tab.open(saved(recording, findings=[]))

    assert page.locator("#curves .u-legend .u-value").all_inner_texts() == ["2", "not finite"]


def test_a_parameter_that_no_optimizer_held_marks_its_module(
    saved: Callable[..., str], tab: Any
) -> None:
    """It has no site, but its module is the place of the finding: apart from the fold, and marked in the tree."""
    events = (NotOptimizedEvent(root=0, unheld=("h.5.mlp.weight",)),)
    recording = replace(tower(odd=False), events=events)
    findings = [
        Finding("NOT-OPTIMIZED", "warning", "h.5.mlp.weight:param", -1, "it is in no optimizer.")
    ]

    (fold,) = [
        one
        for one in condense(ShownRun(recording, findings, ())).described["folds"]
        if one["name"].startswith("h.")
    ]
    page = tab.open(saved(recording, findings=findings))

    assert fold["name"] == "h.0-4,6-47"
    assert page.locator(".tree [data-path='h.5.mlp']").is_visible()
    assert page.locator(".tree .badge:not(.open)").count() == 1


def test_curves_that_the_budget_ended_say_so(saved: Callable[..., str], tab: Any) -> None:
    """Their last step is not that of the run."""
    site = {"site": "loss", "path": "loss", "kind": "loss", "root": -1, "shape": []}
    rows = [
        {"site": "loss", "step": step, "count": 1, "sum": 3.0, "sumsq": 9.0} for step in range(8)
    ]
    end = {
        "kind": "end",
        "exit": 0,
        "steps": 60,
        "levels": {"measured": 2, "guarded": 6, "skipped": 52},
    }

    page = tab.open(saved(Recording.build([site], rows, events=[end]), findings=[]))

    assert page.get_by_text(
        "no values after step 7 of 60: the budget left out 52 steps"
    ).is_visible()
