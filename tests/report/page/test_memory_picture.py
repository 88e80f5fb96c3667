"""The picture of a step's memory: in the page of a run, as a file of its own, in a notebook."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.report.held import held_tree
from kedge.report.memory.picture import StepMemory
from kedge.store.events import SavedEvent
from kedge.store.held_tensors import HeldSpan, HeldTensors, TensorKind
from kedge.store.recording import Recording
from kedge.store.saved_account import BytesOverStep, SavedAccount, Sums
from tests.report.page.runs import Run
from tests.report.page.test_accessible import FITS, axe, violations

pytestmark = pytest.mark.timing
__all__ = ["axe"]

BLOCKS = 16
PARTS = {"norm": 100, "attn.q": 300, "mlp.up": 400, "mlp.down": 200}


def course() -> BytesOverStep:
    """The step of a model of alike blocks, with an input and a functional loss: saves, then releases in their reverse."""
    kinds = [
        TensorKind(
            "embed", "EmbeddingBackward0", "indices", (8,), "int64", "input", "/home/ada/net.py:3"
        )
    ]
    kinds += [
        TensorKind(
            f"h.{block}.{part}",
            "MulBackward0",
            "self",
            (size,),
            "float32",
            "made",
            "/home/ada/net.py:9",
        )
        for block in range(BLOCKS)
        for part, size in PARTS.items()
    ]
    kinds.append(TensorKind(None, "LogSoftmaxBackward0", "result", (99,), "float32"))
    sizes = [64, *(size for _ in range(BLOCKS) for size in PARTS.values()), 1000]
    count = len(sizes)
    heights = [sum(sizes[:at]) for at in range(1, count + 1)]
    heights += [*reversed(heights[:-1]), 0]
    spans = tuple(HeldSpan(n, 1, size, n, 2 * count - 1 - n) for n, size in enumerate(sizes))
    at = tuple(range(1, 2 * count + 1))
    return BytesOverStep(
        tuple(heights),
        at,
        sum(sizes),
        count,
        count + 1,
        (),
        tuple(n / 1e3 for n in at),
        HeldTensors(tuple(kinds), spans),
    )


PEAK = course().peak


@pytest.fixture
def alone(tmp_path: Path, tab: Any) -> Any:
    """The picture as a file of its own, open in a browser."""
    file = tmp_path / "memory.html"
    StepMemory(course(), 5000).save(file)
    return tab.open(file.as_uri())


def sizes(page: Any, level: str = ".box") -> dict[str, int]:
    """Return the bytes of the drawn boxes by their names."""
    found: dict[str, int] = page.eval_on_selector_all(
        f".flame {level}",
        "all => Object.fromEntries(all.map(one => [one.dataset.key, Number(one.dataset.bytes)]))",
    )
    return found


def test_it_opens_at_the_peak_with_the_widths_of_its_bytes(alone: Any) -> None:
    """The root has the bytes of the peak, each box its share of the width, and alike blocks are one box."""
    held = sizes(alone)
    assert held[""] == PEAK
    assert held["m:h/m:0-15"] == BLOCKS * 1000
    assert sum(sizes(alone, "[aria-level='2']").values()) == PEAK
    whole, blocks = (
        alone.locator(f".box[data-key='{key}']").bounding_box() for key in ("", "m:h/m:0-15")
    )
    assert blocks["width"] / whole["width"] == pytest.approx(BLOCKS * 1000 / PEAK, abs=0.003)
    assert "peak 17.1 kB" in alone.locator(".over-step").text_content()
    assert "5 kB, are in memory in any case" in alone.locator(".memory").inner_text()
    tree = {node.label for node, _, _ in held_tree(course().tensors, course().peak_moment).walk()}
    assert "h.0-15" in tree


def test_a_click_on_the_timeline_draws_that_moment(alone: Any) -> None:
    """In the middle of the forward some blocks hold something, and the fold says how many; the end holds nothing."""
    box = alone.locator(".over-step").bounding_box()
    alone.locator(".over-step").click(position={"x": 58 + (box["width"] - 66) * 0.25, "y": 60})
    held = sizes(alone)
    assert held[""] == pytest.approx(PEAK / 2, rel=0.1)
    assert alone.locator(".box[data-key='m:h/m:0-15']").inner_text().endswith("8  8 kB")
    alone.locator(".box[data-key='m:h/m:0-15']").hover()
    tip = alone.locator(".held-tip").inner_text()
    assert "8 of 16 alike blocks hold something here" in tip
    assert "/home/ada/net.py:9" in tip

    alone.locator(".over-step").focus()
    alone.keyboard.press("End")
    assert sizes(alone) == {"": 0}
    assert "0 B after save or release" in alone.locator(".over-step").get_attribute(
        "aria-valuetext"
    )
    alone.get_by_text("to the peak").click()
    assert sizes(alone)[""] == PEAK


def test_a_click_zooms_and_the_timeline_shows_that_part(alone: Any) -> None:
    """The chosen box is as wide as the picture; a second click leads out, and its blocks unfold."""
    whole = alone.locator(".box.root").bounding_box()["width"]
    alone.locator(".box.module", has_text="mlp").click()
    assert alone.locator(".box[data-key='m:h/m:0-15/m:mlp']").bounding_box()[
        "width"
    ] == pytest.approx(whole, abs=2)
    assert alone.locator(".over-step .part-of-it").count() == 1
    assert "m:embed" not in sizes(alone)

    alone.get_by_role("button", name="unfold blocks").click()
    blocks = {key: size for key, size in sizes(alone).items() if re.fullmatch(r"m:h/m:\d+", key)}
    assert blocks == {f"m:h/m:{number}": 1000 for number in range(BLOCKS)}
    alone.get_by_role("button", name="zoom out").click()
    alone.get_by_label("fold alike blocks").click()
    alone.get_by_label("fold alike blocks").click()
    alone.locator(".box[data-key='m:h/m:3']").click()
    alone.get_by_role("button", name="fold blocks").click()
    assert "m:h/m:0-15" in sizes(alone)


def test_the_keyboard_reaches_every_box(alone: Any) -> None:
    """Arrows go to the boxes inside, around and beside; Enter zooms and Escape leads out."""
    alone.locator(".flame .box[tabindex='0']").focus()
    focused = "document.activeElement.dataset.key"
    for key, box in [
        ("ArrowDown", "m:embed"),
        ("ArrowRight", "m:h/m:0-15"),
        ("ArrowDown", "m:h/m:0-15/m:norm"),
        ("ArrowRight", "m:h/m:0-15/m:attn/m:q"),
        ("Enter", "m:h/m:0-15/m:attn/m:q"),
        ("ArrowUp", "m:h/m:0-15"),
        ("Escape", "m:h/m:0-15"),
        ("Home", ""),
    ]:
        alone.keyboard.press(key)
        assert alone.evaluate(focused) == box, key
    assert "m:embed" in sizes(alone)
    label = alone.locator(".box[data-key='m:h/m:0-15']").get_attribute("aria-label")
    assert label == "h.0-15: 16 kB, 93.8 %"


def test_the_filter_and_the_table(alone: Any) -> None:
    """Only what the filter lets through is drawn; the same stands in a table."""
    alone.fill("#filter", "attn")
    assert sizes(alone)[""] == BLOCKS * 300
    alone.fill("#filter", "zzz")
    assert "selects nothing" in alone.locator("#filter-problem").inner_text()
    alone.fill("#filter", "")
    alone.get_by_text("as a table").click()
    alone.locator(".held-table tbody tr").first.wait_for()
    rows = [row.split("\t") for row in alone.locator(".held-table tbody tr").all_inner_texts()]
    assert rows[:3] == [
        ["h", "module", "16 kB", "93.8 %"],
        ["0-15", "module", "16 kB", "93.8 %"],
        ["norm", "module", "1.6 kB", "9.4 %"],
    ]
    assert rows[-1] == ["result float32 99", "tensor", "1 kB", "5.9 %"]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_it_is_accessible_and_fits(theme: str, alone: Any, axe: Any) -> None:
    """axe-core finds nothing, on a phone and on a wall nothing is wider than the screen, and paper shows the peak."""
    if theme == "dark":
        alone.locator("#theme").click()
    alone.locator(".box.module", has_text="mlp").click()
    alone.get_by_text("as a table").click()
    assert violations(axe, alone) == []
    for width in (360, 3840):
        alone.set_viewport_size({"width": width, "height": 800})
        alone.wait_for_function(FITS)
        alone.wait_for_function(
            "width => document.querySelector('.over-step svg').clientWidth > width * 0.8", arg=width
        )
    alone.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert sizes(alone)[""] == PEAK
    assert "m:embed" in sizes(alone)


def test_a_notebook_shows_it_in_a_frame(tmp_path: Path, tab: Any) -> None:
    """The frame has no access to the notebook, and its script draws."""
    shown = StepMemory(course(), 0)._repr_html_()
    assert re.match(r'<iframe title="memory held for backward" sandbox="allow-scripts" ', shown)
    assert html.unescape(shown.partition('srcdoc="')[2]).startswith("<!doctype html>")
    file = tmp_path / "notebook.html"
    file.write_text(
        f"<!doctype html><meta charset='utf-8'><body data-ready='yes'>{shown}", encoding="utf-8"
    )
    tab.page.goto(file.as_uri())
    frame = tab.page.frame_locator("iframe")
    assert frame.locator(".box.root").get_attribute("data-bytes") == str(PEAK)
    assert "h.0-15" in str(StepMemory(course(), 0))
    assert str(StepMemory(BytesOverStep())) == "autograd saved nothing"


@pytest.mark.parametrize(
    ("text", "theme"), [("rgb(204, 204, 204)", "dark"), ("rgb(20, 20, 20)", "light")]
)
def test_a_frame_has_the_theme_of_the_notebook_around_it(
    text: str, theme: str, browser: Any
) -> None:
    """VS Code may be dark on a system that is light: the frame follows the text around it, until the reader switches."""
    system = "light" if theme == "dark" else "dark"
    context = browser.new_context(color_scheme=system)
    page = context.new_page()
    page.set_content(f"<body style='color: {text}'>{StepMemory(course(), 0)._repr_html_()}")
    frame = page.frames[-1]
    frame.wait_for_selector(f"html[data-theme={theme}]")
    frame.click("#theme")
    frame.wait_for_selector(f"html[data-theme={system}]")
    context.close()


def test_the_chosen_theme_is_kept(alone: Any) -> None:
    """The page has the switch of all pages: what was chosen stays, and paper is light."""
    theme = "document.documentElement.dataset.theme"
    assert alone.evaluate(theme) == "light"
    alone.locator("#theme").click()
    alone.reload()
    alone.wait_for_selector("html[data-ready=yes]")
    assert alone.evaluate(theme) == "dark"
    alone.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert alone.evaluate(theme) == "light"
    alone.evaluate("dispatchEvent(new Event('afterprint'))")
    assert alone.evaluate(theme) == "dark"


def test_the_page_of_a_run_draws_it(
    run: Callable[..., Run], tmp_path: Path, saved: Callable[..., str], tab: Any
) -> None:
    """The flame graph stands above the tables; the page's filter and theme reach it, and a box leads to its site."""
    made = run("embed", "h.0.norm")
    made.step(0)
    account = SavedAccount(
        Sums(None, 66, PEAK, PEAK), 5000, 64, (Sums("embed", 1, 64, 64),), (), (), (), course()
    )
    made.writer.event(SavedEvent.of(account, step=0))
    made.end()
    page = tab.open(saved(Recording.open(tmp_path / "net.kedge")))

    assert sizes(page)[""] == PEAK
    page.fill("#filter", "embed")
    page.wait_for_function("() => document.querySelector('.flame .box').dataset.bytes === '64'")
    page.locator(".flame .box[data-key='m:embed']").click()
    page.get_by_role("button", name="open its site").click()
    assert page.locator("#panel-site").inner_text() == "embed:out"
