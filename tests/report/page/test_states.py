"""Runs that have little to show, and runs that have too much: the page stands all the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.report.page.runs import Run
from tests.report.page.shooting import shoot

pytestmark = pytest.mark.timing

NAN = float("nan")
FITS = "() => document.documentElement.scrollWidth <= innerWidth"


def rows(site: str, steps: int, **more: Any) -> list[dict[str, Any]]:
    """Return the rows of a site."""
    given = {
        "site": site,
        "count": 4,
        "sum": 1.0,
        "sumsq": 4.0,
        "min": -1.0,
        "max": 2.0,
        "nonzero": 3,
    }
    return [given | {"step": step} | more for step in range(steps)]


STATES: dict[str, Callable[[], Recording]] = {
    "nothing": Recording.build,
    "no steps": lambda: Recording.build(["fc:out"], roots=[{"name": "Net"}]),
    "one step": lambda: Recording.build(["fc:out"], rows("fc:out", 1), roots=[{"name": "Net"}]),
    "nan everywhere": lambda: Recording.build(
        ["a:out", "b:out", "a:out.grad"],
        [
            row
            for site in ("a:out", "b:out", "a:out.grad")
            for row in rows(site, 5, sum=NAN, sumsq=NAN, min=NAN, max=NAN, nonfinite=4, nonzero=-1)
        ],
        roots=[{"name": "Net"}],
    ),
    "light steps alone": lambda: Recording.build(
        ["a:out", ":grad.norm"],
        [
            {"site": site, "step": step, "count": 4, "sumsq": 4.0, "level": 1}
            for site in ("a:out", ":grad.norm")
            for step in range(6)
        ],
        roots=[{"name": "Net"}],
    ),
    "zeros alone": lambda: Recording.build(
        ["a:out"], rows("a:out", 4, sum=0.0, sumsq=0.0, min=0.0, max=0.0, nonzero=0)
    ),
    "empty tensors": lambda: Recording.build(["a:out"], rows("a:out", 4, count=0)),
    "leaves": lambda: Recording.build(
        [f"lstm:out[{leaf}]" for leaf in (0, "1.0", "é ü")],
        [row for leaf in (0, "1.0", "é ü") for row in rows(f"lstm:out[{leaf}]", 3)],
        roots=[{"name": "Net"}],
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_a_page_of_little_stands(
    state: str, saved: Callable[..., str], tab: Any, shots: Path
) -> None:
    """Whatever is missing, the page opens without an error, says what there is not, and fits a laptop."""
    page = tab.open(saved(STATES[state]()))
    for key in ("j", "Enter", "h", "ArrowDown", "ArrowRight", "Enter", "n", "p", "t"):
        page.keyboard.press(key)
    shoot(page, shots / f"state-{state.replace(' ', '-')}.png")

    page.wait_for_function(FITS)
    assert page.locator("#findings").inner_text().strip()
    assert "undefined" not in page.locator("body").inner_text()
    assert "[object" not in page.locator("body").inner_text()
    for part in ("#heat", "#depth", "#curves", "#modules"):
        assert "NaN" not in page.locator(part).inner_text()


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (
            "nothing",
            {
                "heat": "Nothing to draw",
                "depth": "Nothing to draw",
                "modules": "No module was watched",
                "findings": "no step has been measured",
            },
        ),
        ("no steps", {"heat": "Nothing to draw"}),
        ("one step", {"findings": "No findings", "depth": "step 0"}),
        ("nan everywhere", {"depth": "Nothing to draw", "heat": "not finite"}),
        ("zeros alone", {"heat": "all zero"}),
    ],
)
def test_a_page_says_what_there_is_not(
    state: str, words: Mapping[str, str], saved: Callable[..., str], tab: Any
) -> None:
    """An empty part says in words that it is empty."""
    page = tab.open(saved(STATES[state]()))

    for part, said in words.items():
        assert said in page.locator(f"#{part}").inner_text()


def test_a_site_that_was_never_finite_has_a_panel(saved: Callable[..., str], tab: Any) -> None:
    """There is nothing to draw of it, and the panel says so."""
    page = tab.open(saved(STATES["nan everywhere"]()))
    page.locator("[data-path='a']").click()

    assert "never held a finite value" in page.locator("#panel").inner_text()
    assert "not finite in 5 of 5 columns, first at step 0" in page.locator("#panel").inner_text()


def test_many_findings_are_folded(saved: Callable[..., str], tab: Any) -> None:
    """The first few findings are shown, the rest is one click or a few keys away."""
    recording = Recording.build(["a:out"], rows("a:out", 9), roots=[{"name": "Net"}])
    found = [Finding(f"F{i}", "warning", "a:out", i % 9, f"It is so {i}.") for i in range(30)]
    page = tab.open(saved(recording, findings=found))
    assert page.locator(".finding").count() == 6

    for _ in range(9):
        page.keyboard.press("j")
    assert "F8" in page.locator(".finding.focus").inner_text()
    page.locator(".more").click()
    assert page.locator(".finding").count() == 30
    assert page.locator("#verdict").inner_text().split() == ["!", "30", "warnings"]


def test_long_names_do_not_widen_the_page(
    run: Callable[..., Run], tmp_path: Path, saved: Callable[..., str], tab: Any
) -> None:
    """Names of any length are cut or broken, on a laptop and on a phone."""
    long = ".".join(["transformer_block_with_a_long_name"] * 6)
    made = run(
        f"{long}.a",
        f"{long}.b",
        command=["x" * 300],
        types=("VeryLongClassNameOfSomebodysLayer" * 2, "Linear"),
    )
    for step in range(3):
        made.step(step, {f"{long}.b:out": NAN} if step == 2 else None)
    made.end()
    page = tab.open(saved(Recording.open(tmp_path / "net.kedge")))
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    page.wait_for_function(FITS)

    page.set_viewport_size({"width": 414, "height": 800})
    page.wait_for_function(FITS)
    page.keyboard.press("Escape")
    page.wait_for_function(FITS)


def test_a_large_recording_is_narrow_enough_for_the_page(
    saved: Callable[..., str], tab: Any
) -> None:
    """Three hundred rows are drawn small, each still a row that can be opened."""
    names = [f"block{i}:out" for i in range(300)]
    recording = Recording.build(
        names, [row for name in names for row in rows(name, 3)], roots=[{"name": "Net"}]
    )
    page = tab.open(saved(recording))
    held = page.eval_on_selector("#cells", "canvas => ({...canvas.dataset})")
    assert (held["rows"], held["row"]) == ("300", "2")

    page.keyboard.press("h")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    page.locator("#cells").click(
        position={"x": float(held["left"]) + 5, "y": float(held["top"]) + 100.5 * 2}
    )
    assert page.locator("#panel-site").inner_text() == "block100:out"
