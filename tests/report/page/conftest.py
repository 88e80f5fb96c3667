"""A browser for the page, which reports whatever goes wrong in it, and recordings to show."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kedge.report.page.render import render_page
from kedge.report.shown_run import ShownRun
from kedge.rules.registry import ALL, check
from kedge.rules.rule import Finding
from kedge.store.recording import Recording
from tests.chromium import launched
from tests.report.page.runs import Run

ROOT = Path(__file__).parents[3]
LAPTOP = {"width": 1366, "height": 768}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium, for the tests of one file; other folders have theirs."""
    with launched() as chromium:
        yield chromium


class Watched:
    """A tab, and what happened in it that must not happen."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on(
            "console",
            lambda message: self.errors.append(message.text) if message.type == "error" else None,
        )
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.on(
            "dialog",
            lambda dialog: (self.errors.append(f"dialog: {dialog.message}"), dialog.dismiss()),
        )

    def open(self, address: str) -> Any:
        """Go to an address, and wait until the page is drawn."""
        self.page.goto(address)
        self.page.wait_for_selector("html[data-ready=yes]")
        return self.page

    def from_outside(self) -> list[str]:
        """Return what was asked of anybody but the page itself."""
        return [
            url
            for url in self.requests
            if not url.startswith(("file:", "data:", "http://127.0.0.1:"))
        ]


@pytest.fixture
def tab(browser: Any) -> Iterator[Watched]:
    """A tab of a laptop's size; no error, and no request to the outside, may happen in it.

    It jumps where the page would otherwise scroll smoothly, and so move what is about to be
    clicked.
    """
    context = browser.new_context(viewport=LAPTOP, color_scheme="light", reduced_motion="reduce")
    watched = Watched(context.new_page())
    yield watched
    context.close()

    assert watched.errors == []
    assert watched.from_outside() == []


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Run]:
    """Begin a recording of some layers."""

    def begin(*names: str, types: tuple[str, ...] = (), **manifest: Any) -> Run:
        return Run(
            tmp_path / "net.kedge", names or ("conv1", "relu1", "fc.a", "fc.b"), types, **manifest
        )

    return begin


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., str]:
    """Write the page of a recording to a file, and give its address."""

    def save(recording: Recording, findings: Sequence[Finding] | None = None) -> str:
        file = tmp_path / "page.html"
        file.write_text(
            render_page(
                ShownRun(recording, check(recording) if findings is None else findings, ALL)
            )
        )
        return file.as_uri()

    return save


@pytest.fixture(scope="session")
def shots() -> Path:
    """The folder for pictures of pages: KEDGE_SCREENSHOTS, or build/screenshots."""
    folder = Path(os.environ.get("KEDGE_SCREENSHOTS") or ROOT / "build" / "screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture
def broken(run: Callable[..., Run], tmp_path: Any) -> Recording:
    """A run whose second layer makes a NaN in step 6, which goes on from there."""
    made = run()
    for step in range(9):
        bad = (
            {"relu1:out", "fc.a:in", "fc.a:out", "fc.b:in", "fc.b:out", "loss:out"}
            if step >= 6
            else set()
        )
        made.step(step, dict.fromkeys(bad, float("nan")))
    made.end()
    return Recording.open(tmp_path / "net.kedge")
