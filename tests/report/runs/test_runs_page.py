"""The page of several runs, in a browser: its table, its curves, a site in all runs, and readers of all kinds."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kedge.report.page.render import asset, stylesheet
from kedge.report.runs.page import STYLE, condense_runs
from kedge.report.runs.summary import smoothed
from kedge.report.runs.table import RunTable
from tests.marks import full
from tests.report.page.test_accessible import FITS, axe, violations
from tests.report.runs.conftest import Written, table_of

__all__ = ["axe"]

ROWS = "() => [...document.querySelectorAll('.runs-table tbody th')].map((one) => one.textContent)"
PACKAGE = "kedge.report.runs"
Saved = Callable[..., str]

#: What dichromats see of linear red, green and blue (Machado, Oliveira and Fernandes 2009).
SIGHTS = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]
    ),
    "deuteranopia": np.array(
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    ),
    "tritanopia": np.array(
        [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]]
    ),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def test_the_page_shows_every_run(three: RunTable, saved: Saved, tab: Any) -> None:
    """What is equal stands once; a column sorts both ways; what is missing comes last; a box takes a run's lines out."""
    page = tab.open(saved(three, "slow.html"))
    assert "train.py" in page.inner_text("#equal")
    assert "it is empty" in page.inner_text("#left-out")
    assert page.evaluate(ROWS) == ["slow", "fast", "other"]
    assert page.get_attribute(".runs-table tbody a", "href") == "slow.html"
    page.click("thead button:has-text('--lr')")
    assert page.get_attribute("thead th:has-text('--lr')", "aria-sort") == "ascending"
    assert page.evaluate(ROWS) == ["slow", "other", "fast"]
    page.click("thead button:has-text('--lr')")
    assert page.get_attribute("thead th:has-text('--lr')", "aria-sort") == "descending"
    assert page.evaluate(ROWS) == ["fast", "slow", "other"]
    page.click("thead button:has-text('duration')")
    assert page.evaluate(ROWS) == ["slow", "fast", "other"]
    page.click("thead button:has-text('duration')")
    assert page.evaluate(ROWS) == ["fast", "slow", "other"]
    assert page.inner_text(".runs-table td.error >> nth=0") == "nan"
    told = page.inner_text("#curves .broken >> nth=0")
    assert "fast: not finite at 6 steps, first at step 14" in told
    page.uncheck("input[aria-label='draw fast']")
    assert page.locator("#curves .broken >> nth=0").is_hidden()
    assert page.locator("#chips .chip").nth(1).is_hidden()
    assert "hidden=1" in page.url


def test_curves_are_smoothed_and_drawn_against_time(
    three: RunTable, saved: Saved, tab: Any
) -> None:
    """The slider, the axis and the run in front are kept in the address; a run without a duration is named."""
    page = tab.open(saved(three))
    assert page.input_value("#smoothing") == "0.9"
    page.focus("#smoothing")
    page.keyboard.press("Home")
    assert page.inner_text("#smoothing-value") == "0.00"
    page.select_option("#by", "time")
    assert "other" in page.inner_text("#by-note")
    page.click("#chips .chip >> nth=1")
    assert page.get_attribute("#chips .chip >> nth=1", "aria-pressed") == "true"
    assert {"smoothing=0", "by=time", "front=1"} <= set(page.url.partition("#")[2].split("&"))
    box = page.locator("#curves .u-over").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.9, box["y"] + box["height"] / 2)
    page.wait_for_selector(".run-tip.shown")
    assert "not finite" in page.inner_text(".run-tip.shown")
    log = page.locator("#curves .run-frame input").first
    was = log.is_checked()
    log.click()
    assert log.is_checked() is not was


def test_one_site_is_drawn_for_all_runs_that_have_it(
    three: RunTable, saved: Saved, tab: Any
) -> None:
    """A filter, the keys and another statistic choose it; the runs that lack it are named."""
    page = tab.open(saved(three))
    page.select_option("#quantity", "rms.out")
    listed = page.locator(".site-list [data-site]")
    assert [listed.nth(i).inner_text().split()[0] for i in range(listed.count())] == [
        "conv1",
        "relu1",
        "fc.a",
        "loss",
    ]
    page.fill("#filter", "rel")
    page.wait_for_selector("#filter.on")
    assert listed.count() == 1
    assert "relu1:out" in page.inner_text("#site-title")
    assert "not in other" in page.inner_text("#sites-body")
    page.fill("#filter", "zzz")
    page.wait_for_selector("#filter-problem:not([hidden])")
    page.keyboard.press("Escape")
    page.locator("#sites h2").click()
    page.locator(".site-list [data-site]").first.click()
    assert "conv1:out" in page.inner_text("#site-title")
    page.keyboard.press("n")
    assert "relu1:out" in page.inner_text("#site-title")
    page.select_option("#quantity", "rms.grad")
    assert "relu1:out.grad" in page.inner_text("#site-title")
    page.select_option("#site-order", "apart")
    assert listed.count() == 3  # the loss has no gradient here


def test_alike_blocks_share_a_line(written: Written, saved: Saved, tab: Any) -> None:
    """A line of many blocks unfolds into each; one of few sites does not fold."""
    layers = tuple(f"h.{block}.{part}" for block in range(24) for part in ("attn", "mlp"))
    table = table_of(*(written(name, steps=3, layers=layers) for name in "ab"))
    page = tab.open(saved(table))
    page.select_option("#quantity", "rms.out")
    fold = page.locator(".site-list > li > button").first
    assert fold.inner_text().split()[1:3] == ["h.0-23.attn", "\u00d724"]
    fold.click()
    assert fold.get_attribute("aria-expanded") == "true"
    page.locator(".site-list ul [data-site]:visible").nth(3).click()
    assert "h.3.attn:out" in page.inner_text("#site-title")


@pytest.mark.parametrize("theme", ["light", full("dark")])
def test_axe_finds_nothing(theme: str, three: RunTable, saved: Saved, axe: Any, tab: Any) -> None:
    """Labels, headings, contrast and keyboard, with a run in front, a sorted table, and the help."""
    page = tab.open(saved(three, "slow.html"))
    if theme == "dark":
        page.keyboard.press("t")
    page.click("thead button:has-text('loss') >> nth=0")
    page.click("#chips .chip >> nth=0")
    assert violations(axe, page) == []
    page.keyboard.press("?")
    assert violations(axe, page) == []


def test_it_fits_every_screen_and_paper(three: RunTable, saved: Saved, tab: Any) -> None:
    """Nothing is wider than the screen; printed it is light and has no controls."""
    page = tab.open(saved(three))
    for width in (360, 1280, 3840):
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate(FITS), width
    page.emulate_media(media="print")
    assert page.locator("#filter").is_hidden()
    assert page.locator("#smoothing").is_hidden()


def test_every_run_has_its_own_look(written: Written, saved: Saved, tab: Any) -> None:
    """Twenty runs differ in hue or in dashes."""
    page = tab.open(saved(table_of(*(written(f"run{number}", steps=2) for number in range(20)))))
    looks = page.evaluate(
        "() => [...document.querySelectorAll('#chips .run-line')].map((one) => one.className)"
    )
    assert len(set(looks)) == 20


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_hues_differ_for_colour_blind_readers(theme: str) -> None:
    """Any two are far apart in CIELAB, whatever cones a reader lacks, and each stands out from the ground."""
    texts = asset(STYLE, PACKAGE).split(":root")[1 if theme == "light" else 2]
    found = re.findall(r"--run-\d: (#\w+);", texts)
    assert len(found) == 8
    ground = "#ffffff" if theme == "light" else "#181c21"
    assert ground in stylesheet()
    for name, sight in SIGHTS.items():
        seen = [_lab(sight @ _linear(colour)) for colour in found]
        assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 12, (
            name
        )
    assert all(_contrast(colour, ground) >= 3 for colour in found)


def _linear(colour: str) -> Any:
    parts = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _lab(linear: Any) -> Any:
    xyz = XYZ @ np.clip(linear, 0, 1) / np.array([0.9505, 1, 1.089])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def _contrast(one: str, other: str) -> float:
    low, high = sorted(float(XYZ[1] @ _linear(colour)) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


def test_names_are_text(written: Written, saved: Saved, tab: Any) -> None:
    """Markup in names and options is shown, and never run."""
    evil = "<img src=x onerror=alert(1)>"
    page = tab.open(
        saved(table_of(written("a", "--tag", evil), written("b", "--tag", "</script>")))
    )
    assert evil in page.inner_text(".runs-table")


def test_large_sweeps_have_fewer_columns(written: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """The room of the page is shared by all runs; steps around a finding keep columns of their own."""
    monkeypatch.setattr("kedge.report.runs.page.MOST_NUMBERS", 8 * 50 * 2 * 9)
    monkeypatch.setattr("kedge.report.runs.page.FEWEST", 10)
    table = table_of(*(written(name, steps=300) for name in "ab"))
    counts = [run["columns"]["count"] for run in condense_runs(table).described["runs"]]
    assert all(10 <= count < 300 for count in counts)


def test_only_sites_of_several_runs_are_kept(three: RunTable) -> None:
    """The sites of a single run are counted."""
    content = condense_runs(three).described
    assert {site["owner"] for site in content["sites"]} == {"conv1", "relu1", "fc.a", "loss"}
    assert content["single"] == 6
    assert [site["runs"] for site in content["sites"] if site["site"] == "conv1:out"] == [[0, 1, 2]]


def test_the_page_smooths_as_the_table_does(tab: Any) -> None:
    """One average, in two languages; what is not finite is left out of it."""
    found = re.search(
        r"^function smoothed.*?^}", asset("run_charts.js", PACKAGE), re.MULTILINE | re.DOTALL
    )
    assert found is not None
    values = [3.0, 1.0, float("nan"), 2.5, -4.0]
    tab.page.goto("about:blank")
    drawn = tab.page.evaluate(
        f"(values) => {{ {found[0]}; return smoothed(values, 0.9); }}", values
    )
    np.testing.assert_allclose(drawn, smoothed(np.array(values), 0.9), rtol=1e-12)
