"""Two runs compared on a page: it opens from disk, and its map is the report's with a scale around one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kedge.compare.comparison import compare
from kedge.compare.verdict import judge
from kedge.report.compare import page as drawn
from kedge.report.compare.head import Names
from kedge.report.page import render
from kedge.store.recording import Recording
from tests.chromium import launched
from tests.compare.operations import GELU
from tests.compare.stories import FULL, LIGHT, NET, from_step, story

ASSETS = Path(drawn.__file__).parent / "assets"
IMPORTS = re.compile(r'^import \{([^}]*)\} from "\./(\w+\.js)";$', re.MULTILINE)
NAMES = re.compile(r"^(?:export )?(?:const|let|function|class|async function) (\w+)", re.MULTILINE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, without a window."""
    with launched() as chromium:
        yield chromium


@pytest.fixture
def shown(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Open the page of two runs; no error, and no request to the outside, may happen in it."""
    context = browser.new_context(
        viewport={"width": 1366, "height": 900}, color_scheme="light", reduced_motion="reduce"
    )
    wrong: list[str] = []

    def open_page(a: Recording, b: Recording, chosen: str = "", **said: Any) -> Any:
        file = tmp_path / "page.html"
        file.write_text(page_of(a, b, chosen, **said), encoding="utf-8")
        page = context.new_page()
        page.on(
            "console",
            lambda message: wrong.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "request",
            lambda request: wrong.append(request.url) if request.url.startswith("http") else None,
        )
        page.goto(file.as_uri())
        page.wait_for_selector("html[data-ready=yes]")
        return page

    yield open_page
    context.close()

    assert wrong == []


def page_of(a: Recording, b: Recording, chosen: str = "", **said: Any) -> str:
    """Draw the page of two runs; the verdict also says what is given by name."""
    found = compare(a, b)
    verdict = replace(judge(found), **said)
    return drawn.render_difference(found, verdict, Names("a.kedge", "b.kedge"), chosen)


def colour(page: Any, row: int, column: int) -> list[int]:
    """Read the middle of a cell of the map."""
    script = """(canvas, [row, column]) => {
        const held = canvas.dataset;
        const wide = held.plot / held.columns;
        const x = Number(held.left) + (column + 0.2) * wide;
        const y = Number(held.top) + (row + 0.5) * held.row;
        const dense = devicePixelRatio;
        return [...canvas.getContext("2d").getImageData(x * dense, y * dense, 1, 1).data].slice(0, 3);
    }"""
    return page.eval_on_selector("#cells", script, [row, column])


def shades(page: Any, row: int, column: int) -> list[tuple[int, ...]]:
    """Return the colours within a cell of the map, the most frequent first."""
    script = """(canvas, [row, column]) => {
        const held = canvas.dataset;
        const wide = held.plot / held.columns;
        const dense = devicePixelRatio;
        const [x, y] = [Number(held.left) + (column + 0.2) * wide, Number(held.top) + (row + 0.2) * held.row];
        return [...canvas.getContext("2d").getImageData(x * dense, y * dense, 20 * dense, 8 * dense).data];
    }"""
    values = page.eval_on_selector("#cells", script, [row, column])
    return [
        shade
        for shade, _ in Counter(zip(*(values[at::4] for at in range(3)), strict=True)).most_common()
    ]


def test_the_page_says_why_and_where(shown: Callable[..., Any]) -> None:
    """The headline is the cause; the first parting is named, pinned, and opens the course of its site in both runs."""
    page = shown(story(), story(factor=from_step(2, 2.0, "*:update")))

    assert page.inner_text("#headline") == (
        "✗ another learning rate: the updates of all 3 parameters are 2 times as large in B"
    )
    assert "First apart at step 2, stem.weight:update" in page.inner_text("#told")
    assert page.eval_on_selector("#quantity", "one => one.value") == "ratio.update"
    page.click("#told button")
    assert page.inner_text("#panel-site") == "stem.weight:update"
    assert page.locator("#panel canvas").count() == 3


def test_the_page_says_the_operation(shown: Callable[..., Any]) -> None:
    """With second runs: the operation, its line in either program, what was seen, and the files written."""
    page = shown(story(), story(factor=from_step(2, 2.0, "mid:in")), operation=GELU)

    told = " ".join(page.inner_text("#told").split())
    for text in (
        "Operation: gelu at model.py:41 gets other arguments: approximate is not given in A, 'tanh' in B",
        "A model.py:41: gelu h = F.gelu(h)",
        "B model.py:41: gelu h = F.gelu(h, approximate='tanh')",
        "it gets equal inputs in both",
        "the second runs have written: net.pt",
    ):
        assert text in told


def test_the_middle_of_the_scale_is_one(shown: Callable[..., Any]) -> None:
    """Equal cells have the colour of the middle; twice and half are on either side of it."""
    twice, half = from_step(1, 2.0, "stem:out"), from_step(1, 0.5, "relu:out")
    page = shown(story(), story(factor=lambda text, step: twice(text, step) * half(text, step)))
    page.select_option("#quantity", "ratio.out")
    equal, more, less = colour(page, 2, 3), colour(page, 0, 3), colour(page, 1, 3)

    assert max(equal) - min(equal) < 8
    assert more[0] > more[2] + 60
    assert less[2] > less[0] + 60
    assert colour(page, 0, 0)[:2] != more[:2]
    assert "÷2.00" in page.inner_text(".legend")
    assert "\u00d72.00" in page.inner_text(".legend")


def sparse(scale: float) -> Recording:
    """A run whose module is measured in one step of ten, and whose gradient norm in each."""
    sites = [
        {"site": "a:out", "path": "a", "kind": "out", "type": "Linear"},
        {"site": ":grad.norm", "path": "", "kind": "grad.norm", "type": ""},
    ]
    figures = {
        "count": 8,
        "nonzero": 8,
        "sum": scale,
        "sumsq": scale**2,
        "min": -scale,
        "max": scale,
    }
    rows = [
        {"site": site["site"], "step": step, "level": LIGHT if step % 10 else FULL, **figures}
        for step in range(30)
        for site in (sites[1:] if step % 10 else sites)
    ]
    return Recording.build(sites, rows, roots=[{"name": "Net", "prefix": "", "parameters": 9}])


def test_the_map_has_no_columns_for_steps_with_curves_alone() -> None:
    """Nine of ten steps tell of the loss alone by default: as columns without a value they would cover the map."""
    a, b = sparse(1.0), sparse(2.0)
    comparison = compare(a, b)
    made = drawn.condense_difference(comparison, judge(comparison), Names("a.kedge", "b.kedge"))

    assert made.described["columns"]["count"] == 3


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_equal_and_no_value_are_told_apart(theme: str, shown: Callable[..., Any]) -> None:
    """A cell without a value is striped; an equal one has a single colour, which is none of the stripes'."""
    light = frozenset({3})  # a step that tells of no output
    page = shown(story(light=light), story(light=light, factor=from_step(1, 2.0, "stem:out")))
    page.select_option("#quantity", "ratio.out")
    if page.evaluate("document.documentElement.dataset.theme") != theme:
        page.click("#theme")
    equal, absent = shades(page, 2, 2), shades(page, 2, 3)

    assert len(equal) == 1
    assert len(absent) > 1
    assert all(
        sum(abs(a - b) for a, b in zip(equal[0], other, strict=True)) > 12 for other in absent[:2]
    )
    assert "no value" in page.inner_text(".legend")


def test_small_differences_are_shown_by_their_size(shown: Callable[..., Any]) -> None:
    """Where runs differ by rounding no ratio tells anything: the map shows the distance first."""
    page = shown(story(), story(factor=from_step(1, 1 + 2**-20, "mid:out")))

    assert page.eval_on_selector("#quantity", "one => one.value") == "apart.out"
    assert "equal" in page.inner_text(".legend")


def test_sites_have_the_names_of_both_where_they_differ(shown: Callable[..., Any]) -> None:
    """What was aligned under another name is named in both, and what was not is listed."""
    layers = [
        replace(n, path="dense", key="mid") if n.path == "mid" else n
        for n in NET
        if n.path != "act"
    ]
    page = shown(story(), story(layers=layers, factor=from_step(0, 1.5, "dense:out")))

    assert "mid is dense in B" in page.inner_text("#alignment-body")
    assert "only in A: act (ReLU)" in page.inner_text("#alignment-body")
    page.click("#parted-body button >> nth=0")
    assert page.inner_text("#panel-site") == "mid:out = dense:out"


def test_equal_runs_have_a_page(shown: Callable[..., Any]) -> None:
    """Nothing parts, and the page says so."""
    page = shown(story(), story())

    assert page.inner_text("#headline") == "✓ no difference"
    assert page.inner_text("#parted-body") == "No module parts."


def test_something_not_finite_is_a_cross(shown: Callable[..., Any]) -> None:
    """A step in which one run holds a NaN is marked as such."""
    page = shown(story(), story(broken=lambda text, step: text == "mid:out" and step == 2))
    page.select_option("#quantity", "ratio.out")

    assert "not finite" in page.inner_text(".legend")


def test_the_filter_chooses_the_modules_too(shown: Callable[..., Any]) -> None:
    """The table has those that it lets through, and says how many of all they are."""
    page = shown(story(), story(factor=from_step(1, 1.5, "*:out")))
    page.fill("#filter", "stem, relu")
    page.wait_for_function("() => document.querySelectorAll('#parted tbody tr').length === 2")
    assert page.locator("#parted-count").inner_text().startswith("2 of ")
    assert page.locator("#parted tbody th").all_inner_texts() == ["stem", "relu"]


def test_the_page_opens_with_the_filter_it_was_written_with(shown: Callable[..., Any]) -> None:
    """A module passes under its name in B too; another filter in the address counts more, and an empty field shows all."""
    layers = [
        replace(layer, path="other", key="mid") if layer.path == "mid" else layer for layer in NET
    ]
    page = shown(story(), story(layers=layers, factor=from_step(1, 1.5, "*:out")), "other")
    assert page.input_value("#filter") == "other"
    assert page.locator("#parted tbody th").all_inner_texts() == ["mid = other"]
    page.fill("#filter", "")
    page.wait_for_function("() => document.querySelectorAll('#parted tbody tr').length > 1")
    page.goto(page.url.partition("#")[0] + "#filter=stem")
    page.reload()
    page.wait_for_selector("html[data-ready=yes]")
    assert page.locator("#parted tbody th").all_inner_texts() == ["stem"]


def test_keys_work(shown: Callable[..., Any]) -> None:
    """The keys that the help names do what it says."""
    page = shown(story(), story(factor=from_step(2, 2.0, "mid:out")))
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    assert page.inner_text("#panel-site") == "mid:out"
    page.keyboard.press("n")
    assert page.inner_text("#panel-site") == "act:out"
    page.keyboard.press("Escape")
    assert page.locator("#panel").is_hidden()
    page.keyboard.press("/")
    page.keyboard.type("mid")
    page.wait_for_selector("#cells[data-rows='1']")
    theme = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != theme


def test_names_are_no_markup() -> None:
    """A path that looks like markup stays text."""
    evil = "<script>alert(1)</script>"
    run = Recording.build(
        [{"site": f"{evil}:out", "path": evil, "kind": "out"}],
        [{"step": 0, "site": 0, "sumsq": 1.0}],
    )

    assert evil not in page_of(run, run)


def test_the_script_imports_what_there_is() -> None:
    """It imports from the report's scripts that come before it, uses all of it, and takes none of their names."""
    text = (ASSETS / drawn.SCRIPT).read_text(encoding="utf-8")
    others = {name: render.asset(name) for name in drawn.SCRIPTS}
    taken = [name for other in others.values() for name in NAMES.findall(other)]

    assert len(text.splitlines()) <= 400
    assert set(NAMES.findall(text)).isdisjoint(taken)
    for wanted, other in IMPORTS.findall(text):
        for word in wanted.split(","):
            assert word.strip() in NAMES.findall(others[other])
            assert re.search(rf"\b{word.strip()}\b", IMPORTS.sub("", text))


def test_scripts_come_after_those_they_import_from() -> None:
    """The report's scripts that the page takes are complete, in the order in which they need each other."""
    for i, name in enumerate(drawn.SCRIPTS):
        needed = {other for _, other in IMPORTS.findall(render.asset(name))}
        assert needed <= set(drawn.SCRIPTS[:i]), name
