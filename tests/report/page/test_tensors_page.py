"""The page of a program of tensors: its graphs are drawn, nothing is asked for, and no name is markup."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.frames import SourceLine
from kedge.report.page.redact import shareable
from kedge.report.shown_run import ShownRun
from kedge.report.tensors.page import render_tensors_page
from kedge.rules.registry import check
from kedge.store.events import (
    EndEvent,
    HookFiring,
    SavedForBackward,
    TensorGraphEvent,
    TensorHook,
    TensorNode,
    TensorProgramEvent,
    TensorValue,
)
from kedge.store.recording import Recording
from kedge.store.writing.folder import create

pytestmark = pytest.mark.timing

ODD = "<img src=x onerror=alert(1)> {{name}} \x07"


def value(text: str, nonfinite: int = 0) -> TensorValue:
    """Return the value of a tensor of two numbers."""
    return TensorValue(shape=(2,), dtype="float32", text=text, nonfinite=nonfinite)


def graph(name: str = "loss") -> TensorGraphEvent:
    """Return a graph of a leaf, a constant and two operations, with a hook."""
    line = SourceLine("/home/ada/secret.py", 7, "<module>", f"{name}.backward()")
    nodes = (
        TensorNode(
            kind="leaf",
            name="leaf",
            variable="w",
            value=value("[1, 2]"),
            last=value("[0.5, 1]"),
            gradient=value("[3, 4]"),
            last_gradient=value("[1, 1]"),
            kept=value("[4, 5]"),
        ),
        TensorNode(kind="constant", name="constant", variable="x", value=value("[3, 4]")),
        TensorNode(
            kind="operation",
            name="mul",
            takes=(0, 1),
            source=line,
            value=value("[3, nan]", 1),
            gradient=value("[1, 1]"),
            saved=(SavedForBackward(name="other", shape=(2,), bytes=8),),
        ),
        TensorNode(kind="operation", name="sum", variable=name, takes=(2,), source=line),
    )
    fired = HookFiring(at=0, order=0, given=value("[9, 9]"), did="returned", result=value("[3, 4]"))
    hooks = (
        TensorHook(
            node=0, kind="tensor", name="clip", owner="secret.py:3", times=1, firings=(fired,)
        ),
        TensorHook(node=2, kind="tensor", name=name, owner="secret.py:4"),
    )
    return TensorGraphEvent(
        began="backward", passes=3, roots=(3,), source=line, nodes=nodes, hooks=hooks
    )


@pytest.fixture
def recording(tmp_path: Path) -> Callable[[TensorGraphEvent], Recording]:
    """Return the recording of a program with a graph."""

    def make(event: TensorGraphEvent) -> Recording:
        with create(tmp_path / "it.kedge", {"script": "secret.py"}, force=True) as writer:
            writer.sites([], [])
            writer.event(TensorProgramEvent(operations=4, passes=3, until="end"))
            writer.event(event)
            writer.event(EndEvent(exit=0, steps=0))
        return Recording.open(tmp_path / "it.kedge")

    return make


def page_of(recording: Recording) -> str:
    """Return the page of a recording."""
    return render_tensors_page(ShownRun(recording, check(recording)))


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_the_graph_is_drawn(recording, browser: Any, tmp_path, width, scheme):
    """Each tensor is a box with its value and gradient; the page is no wider than the window, and asks for nothing."""
    (tmp_path / "it.html").write_text(page_of(recording(graph())), encoding="utf-8")
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    seen: list[str] = []
    tab.on("console", lambda message: seen.append(message.text))
    tab.on("pageerror", lambda error: seen.append(str(error)))
    tab.on("request", lambda request: seen.append(request.url))
    try:
        tab.goto(f"file://{tmp_path / 'it.html'}")
        tab.wait_for_selector("html[data-ready=yes]")
        boxes = tab.locator("svg.graph g.box").all_inner_texts()
        shown = tab.inner_text("main")
        overflow = tab.evaluate("document.documentElement.scrollWidth - innerWidth")
        theme = tab.evaluate("document.documentElement.dataset.theme")
    finally:
        tab.close()

    assert seen == [f"file://{tmp_path / 'it.html'}"]
    assert len(boxes) == 4
    assert overflow <= 0
    assert theme == scheme
    for said in ("[9, 9] → returned [3, 4]", "clip (secret.py:3)", "not finite: mul #2", "[4, 5]"):
        assert said in shown


def test_names_are_no_markup(recording):
    """A variable, a hook or a line that looks like markup, or like a part of the page, is text."""
    page = page_of(recording(graph(ODD)))

    assert "<img" not in page
    assert "&lt;img src=x onerror=alert(1)&gt; &#123;&#123;name}} \\x07" in page


def test_a_page_without_source_has_no_line(recording):
    """With ``--no-source`` the page has neither lines nor files of the program."""
    page = page_of(shareable(recording(graph()), source=False))

    assert "ada" not in page
    assert "secret.py:" not in page
    assert "loss.backward()" not in page
    assert "the program" in page
