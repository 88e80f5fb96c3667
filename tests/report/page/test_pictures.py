"""Pictures of pages of real runs, to be looked at; and what every one of them must show."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked
from tests.marks import sampled
from tests.report.page.shooting import shoot

pytestmark = pytest.mark.timing

EXAMPLE = Path(__file__).parents[3] / "examples" / "digits.py"
# Without a budget the steps that are sampled do not depend on how fast the machine is.
TRAIN = """
import runpy, sys
import kedge

recording, sys.argv = sys.argv[1], sys.argv[2:]
with kedge.watch(recording, budget=None):
    runpy.run_path(sys.argv[0], run_name="__main__")
"""
FOUND = {
    "log-of-zero": "NAN-BORN",
    "deep-sigmoid": "GRAD-VANISH",
    "dying-relu": "DEAD-CHANNEL",
    "healthy": "No findings",
}


@pytest.fixture(scope="module", params=sampled(FOUND, {"log-of-zero", "healthy"}))
def real(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The page of a real run, as the commands make it."""
    model, folder = request.param, tmp_path_factory.mktemp("runs")
    shutil.copy(EXAMPLE, folder)
    train = [
        sys.executable,
        "-c",
        TRAIN,
        f"{model}.kedge",
        "digits.py",
        "--model",
        model,
        "--steps",
        "200",
    ]
    forked.run(train, cwd=folder, check=True, forks=True, ahead=f"sklearn.datasets {forked.WATCH}")
    report = [sys.executable, "-m", "kedge", "report", f"{model}.kedge", "--html"]
    forked.run(report, cwd=folder, check=True)
    return model, folder / f"{model}.html"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_real_run_is_shown(real: tuple[str, Path], theme: str, browser: Any, shots: Path) -> None:
    """The page of a real run opens without an error, names what is wrong with it, and fits a laptop."""
    model, file = real
    errors: list[str] = []
    context = browser.new_context(
        viewport={"width": 1366, "height": 768}, color_scheme=theme, reduced_motion="reduce"
    )
    page = context.new_page()
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("html[data-ready=yes]")
    shoot(page, shots / f"{model}-{theme}.png")
    page.keyboard.press("h")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    page.evaluate("() => scrollTo(0, 0)")
    shoot(page, shots / f"{model}-{theme}-site.png", whole=False)

    assert FOUND[model] in page.locator("#findings").inner_text()
    assert page.locator("#panel-site").inner_text()
    assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
    assert errors == []
    context.close()


def test_the_command_says_where_the_page_is(real: tuple[str, Path]) -> None:
    """``kedge report --html`` writes beside the recording, or where -o says."""
    model, file = real
    command = [
        sys.executable,
        "-m",
        "kedge",
        "report",
        f"{model}.kedge/",
        "--html",
        "--no-source",
        "-o",
        "other.html",
    ]
    ended = forked.run(command, cwd=file.parent, check=True)

    assert ended.stdout.startswith("other.html: 0.")
    assert "digits.py" in (file.parent / "other.html").read_text(encoding="utf-8")
    assert "--model" not in (file.parent / "other.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [["--html", "--all"], ["-o", "x.html"], ["--no-source"]])
def test_options_that_do_not_go_together_are_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """What a page has no use for is not silently ignored, nor is what only a page has."""
    from kedge.cli.main import main

    with pytest.raises(SystemExit):
        main(["report", "x.kedge", *words])
    said = capsys.readouterr().err
    assert "add --html" in said or "a page has all sites" in said
