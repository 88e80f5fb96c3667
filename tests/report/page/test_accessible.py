"""Both pages for readers with a keyboard, a screen reader, a small or a huge screen, or paper."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kedge.compare.comparison import compare
from kedge.compare.verdict import judge
from kedge.report.compare.head import Names
from kedge.report.compare.page import render_difference
from kedge.rules.evidence import Evidence, said, said_share, unsaid
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.compare.stories import from_step, story
from tests.marks import full
from tests.report.page.runs import Run
from tests.report.page.test_blocks import found, tower


@dataclass(frozen=True, kw_only=True)
class Said(Evidence):
    """Evidence with each form of words, with none, and with what stays unsaid."""

    share: float = said_share("a share of {}")
    of: int = said("of {} in all")
    births: int = said("it began at {} places", least=2)
    recovered: bool = said("finite again later", no="not finite again until the end")
    odd_one: int
    hidden: int = unsaid()


FITS = "() => document.documentElement.scrollWidth <= innerWidth"


@pytest.fixture(scope="module")
def axe() -> Any:
    """The checks of axe-core."""
    return pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed"
    ).Axe()


def violations(axe: Any, page: Any) -> list[str]:
    """Return what axe-core finds wrong with a page as it stands."""
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in axe.run(page, options={"rules": {"target-size": {"enabled": True}}}).response[
            "violations"
        ]
        for node in one["nodes"]
    ]


def difference(tmp_path: Any) -> str:
    """Write the page of two runs that part."""
    file = tmp_path / "difference.html"
    comparison = compare(story(), story(factor=from_step(1, 1.5, "*:out")))
    file.write_text(
        render_difference(comparison, judge(comparison), Names("a.kedge", "b.kedge")),
        encoding="utf-8",
    )
    return file.as_uri()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_axe_finds_nothing_on_the_page(
    theme: str, axe: Any, broken: Recording, saved: Callable[..., str], tab: Any
) -> None:
    """Labels, headings, contrast, keyboard: with a large model, a filter that selects nothing, a site, and the help."""
    page = tab.open(saved(tower(), findings=found()))
    if theme == "dark":
        page.keyboard.press("t")
    assert violations(axe, page) == []
    page.locator(".tree .toggle[aria-expanded=false]").first.click()
    page.fill("#filter", "zzz")
    page.wait_for_selector("#filter-problem")
    assert violations(axe, page) == []

    page = tab.open(saved(broken))
    page.locator(".rule summary").first.click()
    page.locator("#findings h2").click()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_selector("#panel-site")
    assert violations(axe, page) == []
    page.keyboard.press("?")
    assert violations(axe, page) == []


def test_axe_finds_nothing_on_the_page_of_a_comparison(axe: Any, tmp_path: Any, tab: Any) -> None:
    """The same of two runs."""
    page = tab.open(difference(tmp_path))
    assert violations(axe, page) == []
    page.locator("#parted .link").first.click()
    page.wait_for_selector("#panel-site")
    assert violations(axe, page) == []


@pytest.mark.parametrize("width", [360, full(3840)])
def test_the_pages_fit_a_phone_and_a_wall(
    width: int, broken: Recording, saved: Callable[..., str], tab: Any, tmp_path: Any
) -> None:
    """Nothing is wider than the screen, and a huge one is used."""
    for address in (saved(tower(), findings=found()), saved(broken), difference(tmp_path)):
        page = tab.open(address)
        page.set_viewport_size({"width": width, "height": 2160 if width > 1000 else 740})
        page.wait_for_function(FITS)
        page.keyboard.press("h")
        page.keyboard.press("ArrowRight")
        page.keyboard.press("Enter")
        page.wait_for_selector("#panel-site")
        page.wait_for_function(FITS)
        if width > 1000:
            assert page.locator("main").bounding_box()["width"] > 2000


def test_all_type_grows_on_a_wall(saved: Callable[..., str], tab: Any) -> None:
    """On a screen of 3840 pixels no text is left at the size of a laptop's, and charts are higher."""
    page = tab.open(saved(tower(), findings=found()))
    sizes = """() => Object.fromEntries(["body", "h2", "#facts", ".mono", ".finding .message", ".u-legend"].map(
        (name) => [name, parseFloat(getComputedStyle(document.querySelector(name)).fontSize)]))"""
    high = "() => document.querySelector('#heat .axis').clientHeight"
    usual, low = page.evaluate(sizes), page.evaluate(high)
    page.set_viewport_size({"width": 3840, "height": 2160})
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")

    assert page.evaluate(sizes) == pytest.approx(
        {name: 1.25 * size for name, size in usual.items()}
    )
    assert page.evaluate(high) > 1.2 * low


def test_many_steps_scroll_in_the_map_and_not_the_page(
    run: Callable[..., Run], tmp_path: Path, saved: Callable[..., str], tab: Any
) -> None:
    """Each step has a pixel: where they are more than a phone has, the map scrolls with its axis, and the page does not."""
    made = run("embed", "head")
    for step in range(400):
        made.step(step)
    made.end()
    page = tab.open(saved(Recording.open(tmp_path / "net.kedge")))
    page.set_viewport_size({"width": 360, "height": 740})
    page.wait_for_function("() => document.querySelector('.heat-scroll').scrollWidth > 400")

    assert page.evaluate(FITS)
    assert page.evaluate(
        "document.querySelector('.axis').clientWidth === document.querySelector('#cells').clientWidth"
    )


@pytest.mark.parametrize("sandbox", ["", "allow-scripts"])
def test_the_page_works_inside_another_one(
    sandbox: str, broken: Recording, saved: Callable[..., str], tab: Any
) -> None:
    """As viewers of notebooks and editors show it: with no address and no storage of its own."""
    text = Path(saved(broken).removeprefix("file://")).read_text(encoding="utf-8")
    within = f'sandbox="{sandbox}"' if sandbox else ""
    tab.page.set_content(
        f'<iframe {within} width="1300" height="700" srcdoc="{html.escape(text)}"></iframe>'
    )
    frame = tab.page.frames[-1]
    frame.wait_for_selector("html[data-ready=yes]")

    frame.fill("#filter", "conv")
    frame.wait_for_function("() => document.querySelector('#cells').dataset.rows === '1'")
    frame.click("#theme")
    frame.locator(".finding .link").first.click()
    assert frame.locator("#panel-site").is_visible()
    frame.locator("nav a", has_text="modules").click()
    assert frame.evaluate("document.activeElement.id") == "modules"
    assert frame.locator("#panel-site").is_visible()


def test_the_tables_have_captions_and_their_rows_names(saved: Callable[..., str], tab: Any) -> None:
    """A screen reader says what a table is about, and in which row it reads."""
    page = tab.open(saved(tower(), findings=found()))
    page.locator(".apart button").click()

    tables = page.locator("table:not(.u-legend)")
    assert tables.count() >= 2
    for table in tables.all():
        assert table.locator("caption").count() == 1
        assert table.locator("tbody th:not([scope=row]), thead th:not([scope=col])").count() == 0


def test_paper_has_the_whole_page_in_dark_on_light(saved: Callable[..., str], tab: Any) -> None:
    """Printed, there is no bar, no control and no scrolling box, and the colours are those of paper."""
    page = tab.open(saved(tower(), findings=found()))
    page.keyboard.press("t")
    page.emulate_media(media="print")

    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.locator(".bar nav, .bar input, .toolbar input").locator("visible=true").count() == 0
    assert (
        page.evaluate("getComputedStyle(document.querySelector('.heat-scroll')).maxHeight")
        == "none"
    )
    assert page.locator("h1").is_visible()
    page.set_viewport_size({"width": 700, "height": 900})
    wide = "() => [...document.querySelectorAll('canvas')].map(one => one.getBoundingClientRect().right - innerWidth)"
    assert max(page.evaluate(wide)) <= 0


def test_evidence_is_in_words(saved: Callable[..., str], tab: Any) -> None:
    """No raw key of it, no mark of code in the text, and the commands stand as code."""
    evidence = Said(share=0.25, of=4, births=1, recovered=False, odd_one=2, hidden=3)
    recording = tower()
    message = "it is odd: see `kedge run x`."
    page = tab.open(
        saved(
            recording,
            findings=[Finding("NAN-BORN", "error", "h.3:out", 1, message, evidence, 0.9)],
        )
    )

    assert page.locator(".finding .evidence li").all_inner_texts() == [
        "a share of 25.0 %",
        "of 4 in all",
        "not finite again until the end",
        "odd one: 2",
    ]
    assert page.locator(".finding .message").inner_text() == "it is odd: see kedge run x."
    assert page.locator(".finding .message code").inner_text() == "kedge run x"
