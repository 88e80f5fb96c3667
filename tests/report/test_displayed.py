"""A recording as it is displayed: its verdict, the first findings, and what to call next."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import kedge
from kedge.report import displayed
from kedge.store.recording import Recording
from tests.test_notebook import Reader

SOURCE = {"file": "train.py", "line": 7, "function": "fit", "text": "loss.backward()"}
LOSS = {"site": "loss", "path": "loss", "kind": "loss", "root": -1, "shape": [], "source": SOURCE}
LINE = {"file": "train.py", "line": 3, "function": "forward", "text": "return x.softmax(1)"}
NODES = ["NllLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0", "AddmmBackward0"]


def doubled() -> Recording:
    """A recording of a softmax before cross_entropy."""
    sites = [LOSS, {"site": "fc:out", "type": "Linear"}, {"site": "fc.weight:param.grad"}]
    rows = [
        {"site": site["site"], "step": step, "count": 1, "sum": 2.0, "sumsq": 4.0}
        for step in range(3)
        for site in sites
    ]
    operations = [{"node": node, "source": LINE} for node in NODES]
    events = [
        {"kind": "loss-graph", "step": 0, "site": "loss", "nodes": NODES},
        {"kind": "loss-lines", "step": 1, "site": "loss", "operations": operations},
        {"kind": "end", "exit": 0, "steps": 12, "seconds": 2.0, "watching": 0.02},
    ]
    roots = [{"name": "Net", "trained": True}]
    made = Recording.build(sites, rows, {"command": ["train.py"]}, events, roots)
    return replace(made, path=Path("runs/my run.kedge"))


def test_a_recording_is_displayed_with_its_verdict() -> None:
    """What ran, the steps, the verdict, the first findings with their lines, and what to call, in few lines."""
    lines = repr(doubled()).splitlines()

    assert lines[:2] == [
        "my run.kedge: train.py",
        "12 steps, 3 measured · 2 s, 1.0 % of it for watching · 3 sites",
    ]
    assert lines[2].startswith("1 warning; ")
    assert lines[2].endswith(" could not judge")
    assert lines[3].startswith(
        "warning DOUBLE-SOFTMAX at loss, step 0: The loss (loss at train.py:7) applies"
    )
    assert lines[4:] == [
        "    train.py:3  return x.softmax(1)",
        "all findings: kedge.rules.check(recording), or in a shell: kedge report 'runs/my run.kedge'",
        'its numbers: .sites, .steps, .events, .rows("loss"), .series("fc:out", "rms")',
    ]
    assert max(map(len, lines)) <= displayed.WIDTH


def test_what_it_says_to_call_can_be_called() -> None:
    """With the recording itself."""
    recording = doubled()
    assert [finding.code for finding in kedge.rules.check(recording)] == ["DOUBLE-SOFTMAX"]
    assert len(recording.rows("loss")) == len(recording.series("fc:out", "rms")) == 3
    assert recording.sites
    assert recording.events


def test_a_recording_of_nothing_is_displayed() -> None:
    """Without a step nothing is said to be sound."""
    assert repr(kedge.Recording.build()).splitlines()[:2] == [
        "a program without a name",
        "0 steps measured so far · 0 sites",
    ]
    assert "nothing was judged: no step was measured" in repr(kedge.Recording.build())


def test_many_findings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first ones are shown."""
    monkeypatch.setattr(displayed, "MOST", 0)
    assert "... and 1 more" in repr(doubled()).splitlines()


def test_rules_that_would_take_too_long_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A debugger that displays a large recording does not wait for them."""
    monkeypatch.setattr(displayed, "LONGEST", -1.0)
    assert "rules left out, as they would have taken longer" in repr(doubled())


def test_a_notebook_has_the_findings_as_a_table() -> None:
    """A row for each, with the line of the program; everything is escaped."""
    read = Reader(doubled()._repr_html_())

    assert read.rows[0] == ["", "rule", "where", "line of the program", "finding"]
    assert read.rows[1][:4] == [
        "warning",
        "DOUBLE-SOFTMAX",
        "loss, step 0",
        "train.py:3 in forward: return x.softmax(1)",
    ]
    wild = replace(doubled(), manifest={"script": "<script>"})
    assert "<script>" not in wild._repr_html_()


def test_without_the_rules_a_recording_says_how_large_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As where only the files of the recording are read."""
    monkeypatch.setattr(Recording, "display", None)
    assert repr(doubled()) == "<my run.kedge: 3 sites, 3 measured steps>"
    assert "my run.kedge" in doubled()._repr_html_()
