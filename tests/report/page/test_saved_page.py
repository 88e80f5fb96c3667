"""The page's section about what autograd saved: a chart over the step, bars by module, tables; only where it was written down."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.report.page.redact import shareable
from kedge.store.events import SavedEvent
from kedge.store.recording import Recording
from kedge.store.saved_account import BytesOverStep, LineSums, SavedAccount, Sums
from tests.report.page.runs import Run
from tests.report.page.shooting import shoot

pytestmark = pytest.mark.timing

MB = 10**6


def account() -> SavedAccount:
    """What three modules and a functional loss held."""
    modules = (
        Sums("conv1", 3, 9 * MB, 8 * MB, 0, 8 * MB, 4 * MB, 6 * MB),
        Sums("relu1", 1, 8 * MB, 4 * MB, 4 * MB, 4 * MB, 2 * MB, 3 * MB),
        Sums("fc.a", 2, 3 * MB, 2 * MB, MB, MB, 0, 0),
        Sums(None, 2, 2 * MB, 2 * MB, 0, 2 * MB, MB, MB),
    )
    total = Sums(None, 8, 22 * MB, 16 * MB, 5 * MB, 15 * MB, 7 * MB, 10 * MB)
    tree = (
        Sums("", 6, 20 * MB, 14 * MB, 5 * MB, 13 * MB),
        *modules[:2],
        Sums("fc", 2, 3 * MB, 2 * MB, MB, MB, checkpoint=MB),
        *modules[2:],
    )
    lines = (
        LineSums(
            "/home/ada/secret/net.py",
            12,
            "forward",
            "x = self.block(x)  # <b>",
            6,
            20 * MB,
            14 * MB,
            5 * MB,
        ),
        LineSums("/home/ada/secret/train.py", 40, "<module>", "loss = f(x)", 2, 2 * MB, 2 * MB),
    )
    heights = (4, 8, 12, 14, 16, 12, 6, 0)
    course = BytesOverStep(
        tuple(h * MB for h in heights),
        tuple(range(1, 9)),
        16 * MB,
        5,
        6,
        (("conv1", 8 * MB), ("relu1", 4 * MB)),
    )
    items = ({"path": "conv1", "bytes": 8 * MB, "line": "/home/ada/secret/net.py:12"},)
    return SavedAccount(total, 3 * MB, MB, modules, tree, lines, items, course)


@pytest.fixture
def recorded(run: Callable[..., Run], tmp_path: Path) -> Recording:
    """A run with an account."""
    made = run()
    for step in range(3):
        made.step(step)
    made.writer.event(SavedEvent.of(account(), step=0))
    made.end()
    return Recording.open(tmp_path / "net.kedge")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_section_draws_the_account(
    theme: str, recorded: Recording, saved: Callable[..., str], browser: Any, shots: Path
) -> None:
    """Totals, the course of the step, a bar a module with what frees it, and both tables stand in the section, in both themes."""
    errors: list[str] = []
    context = browser.new_context(
        viewport={"width": 1366, "height": 768}, color_scheme=theme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(saved(recorded))
    page.wait_for_selector("html[data-ready=yes]")
    section = page.locator("#saved")
    section.scroll_into_view_if_needed()
    shoot(page, shots / f"saved-{theme}.png")
    text = " ".join(section.inner_text().split())

    assert "step 0, 16 MB" in text
    assert "can be rebuilt exactly 5 MB" in text
    assert section.locator(".over-step path").count() == 1
    assert section.locator(".flame").is_hidden()  # the tensors of this account were not listed
    rows = section.locator(".bar-row").all_inner_texts()
    assert [row.split("\n")[0] for row in rows] == [
        "conv1",
        "relu1",
        "fc.a",
        "(outside of modules)",
    ]
    widths = section.locator(".stack").evaluate_all(
        "all => all.map(one => [...one.children].reduce((sum, part) => sum + part.offsetWidth, 0))"
    )
    assert widths[0] == pytest.approx(2 * widths[1], abs=3)
    tables = section.locator(".ledger table").all_inner_texts()
    assert tables[0].split()[:14] == [
        "saved",
        "for",
        "backward",
        "by",
        "module",
        "module",
        "tensors",
        "packed",
        "held",
        "rebuild",
        "offload",
        "bf16",
        "int8",
        "checkpoint",
    ]
    assert "x = self.block(x) # <b>" in " ".join(tables[1].split())
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert errors == []
    context.close()


def test_a_click_leads_to_the_module_and_the_filter_chooses(
    recorded: Recording, saved: Callable[..., str], tab: Any
) -> None:
    """A bar's name opens the module's site; the page's filter leaves the modules that it lets through."""
    page = tab.open(saved(recorded))
    page.locator("#saved .bar-row button", has_text="relu1").click()
    assert page.locator("#panel-site").inner_text() == "relu1:out"

    page.keyboard.press("/")
    page.keyboard.type("fc.**")
    page.wait_for_function("() => document.querySelectorAll('#saved .bar-row').length === 1")
    assert page.locator("#saved .bar-row").inner_text().startswith("fc.a")
    names = (
        page.locator("#saved .ledger table")
        .first.locator("tbody tr td:first-child")
        .all_inner_texts()
    )
    assert names == ["fc", "fc.a"]


def test_without_a_account_there_is_no_section(
    run: Callable[..., Run], tmp_path: Path, saved: Callable[..., str], tab: Any
) -> None:
    """A run that was not asked to write down what is saved has no such section and no link to it."""
    made = run()
    made.step(0)
    made.end()
    page = tab.open(saved(Recording.open(tmp_path / "net.kedge")))

    assert page.locator("#saved").is_hidden()
    assert page.locator("#saved-link").is_hidden()
    assert "10 kB in step 0" in page.locator("#run").inner_text().replace("\n", " ")


def test_without_source_the_lines_are_left_out(recorded: Recording) -> None:
    """What is shown without the source has neither lines nor the places of tensors."""
    event = shareable(recorded, source=False).saved

    assert event is not None
    assert event.lines == ()
    assert [item for item in event.items if "line" in item] == []
    assert event.bytes == 16 * MB
