"""A watched run in a notebook."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from torch import nn

import kedge
from kedge.errors import NeverFiredWarning
from kedge.hooks.firing.cause import Cause
from kedge.hooks.ledger import Ledger, LedgerEntry
from kedge.report.curves import Curve
from kedge.report.shown_run import ShownRun
from kedge.rules.rule import Finding
from kedge.sites.site import Site
from kedge.store.recording import Recording
from kedge.watch.run.shown import HEIGHT, Findings, _curve, run_html
from tests.test_notebook import Reader

WILD = '<script>alert("&")</script>'


def curve(*values):
    """Make a curve of some values."""
    numbers = np.array(values, dtype=np.float64)
    return Curve(
        "loss", "backward at a.py:1", 0, np.arange(len(values)), numbers, ~np.isfinite(numbers)
    )


def heights(text):
    """Return the heights of the points of a curve, from above."""
    return [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)(?!v)", text)]


def test_a_run_is_shown_before_during_and_after(tmp_path):
    """Before the first step there is a sentence, then what is written so far, and in the end the whole run."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = kedge.watch(tmp_path / "run.kedge", every=1, budget=None)
    run.tell = None
    assert "run.kedge is not written yet" in run._repr_html_()

    with run:
        for _ in range(4):
            model(torch.rand(8, 4)).sum().backward()
            optimizer.step()
        during = run._repr_html_()
    after = run._repr_html_()

    for text, state in ((during, " measured steps so far<"), (after, "4 measured steps<")):
        read = Reader(text)
        assert state in text
        assert {"svg", "path", "details", "summary", "table"} <= read.tags
        assert read.rows[0][1:4] == ["module", "type", "shape"]
        assert [row[1] for row in read.rows[1:]] == ["0", "1", "2", "(Sequential)"]
        assert "<summary>4 modules</summary>" in text
        assert re.search(r"loss -?[\d.e-]+ → -?[\d.e-]+<", text)


def test_findings_unfold_and_errors_are_open():
    """One line for each rule; a remedy that several findings share stands once below them."""
    found = [
        Finding("BAD", "error", "a:out", 3, "It is so.", remedy="Do so."),
        *(
            Finding("ODD", "warning", f"{name}:out", -1, f"{name} is odd.", remedy="Look.")
            for name in "bc"
        ),
    ]
    text = Findings(found)._repr_html_()

    assert re.findall(r"<details( open)?><summary>([^<]+)</summary>", text) == [
        (" open", "✗ error BAD  a:out, step 3"),
        ("", "! warning ODD  in 2 places"),
    ]
    assert re.findall(r"<p[^>]*>([^<]+)</p>", text) == [
        "It is so.",
        "→ Do so.",
        "· b is odd.",
        "· c is odd.",
        "→ Look.",
    ]
    assert "no findings" in Findings()._repr_html_()
    assert Findings(found) == tuple(found)


def test_names_are_read_as_text():
    """Whatever a program, a module or a message is called."""
    site = {"site": f"{WILD}:out", "path": WILD, "type": WILD}
    rows = [{"site": 0, "step": 0, "count": 1, "sum": 1.0, "sumsq": 1.0, "min": 1.0, "max": 1.0}]
    recording = Recording.build([site], rows, {"script": WILD})
    read = Reader(
        run_html(ShownRun(recording, [Finding("BAD", "error", WILD, 0, WILD, remedy=WILD)]))
    )

    assert "script" not in read.tags


def test_alike_blocks_share_a_line():
    """Of six hundred modules there are as many lines as in the terminal, none folded away again."""
    entries = [
        {"site": f"h.{i}.{name}:out", "type": "Linear"} for i in range(100) for name in "abcdef"
    ]
    numbers = {"count": 4, "sum": 4.0, "sumsq": 4.0, "min": 1.0, "max": 1.0}
    recording = Recording.build(entries, [{"site": i, "step": 0, **numbers} for i in range(600)])
    text = run_html(ShownRun(recording, ()))

    assert [row[1] for row in Reader(text).rows[1:]] == [f"h.0-99.{name}" for name in "abcdef"]
    assert "<summary>600 modules</summary>" in text
    assert "more</summary>" not in text


def test_a_curve_is_on_a_logarithmic_scale_unless_a_value_is_negative():
    """Each tenth is as far down as the one before; with a negative value it is the difference that counts."""
    for values in ((100.0, 10.0, 1.0), (100.0, 49.5, -1.0)):
        top, middle, bottom = heights(_curve(curve(*values)))
        assert middle - top == pytest.approx(bottom - middle, abs=0.11)
        assert 0 < top < bottom < HEIGHT


def test_a_value_that_is_not_finite_is_a_tick():
    """It interrupts the line, and stands at the top; a curve of nothing else has ticks alone."""
    text = _curve(curve(1.0, 2.0, float("nan"), 1.0))
    [path] = re.findall(r' d="([^"]+)"', text)
    assert re.sub(r"[\d.]+ [\d.]+", "", path) == "MLMMv5"
    assert "loss 1.00 → 1.00" in text
    assert re.findall(r' d="([^"]+)"', _curve(curve(float("inf")))) == ["M2.0 1v5"]


def test_a_long_curve_has_a_point_a_pixel():
    """Of a hundred thousand steps the largest of each few is drawn, and one that is not finite is not lost."""
    values = np.ones(100_000)
    values[77_777] = np.nan
    text = _curve(curve(*values))

    assert len(text) < 10_000
    assert "v5" in text


def test_the_ledger_and_the_audit_of_many_blocks_fold():
    """Blocks whose hooks and firings are alike share a line in a notebook."""
    model = nn.ModuleDict({"h": nn.ModuleList(nn.Linear(2, 2) for _ in range(50))})
    with pytest.warns(NeverFiredWarning, match="1 of 50"), kedge.session() as s:
        s.hook(model, "**{Linear}:out", kedge.record())
        for i, block in enumerate(model["h"]):
            if i != 7:
                block(torch.ones(1, 2))
        ledger = Reader(s.ledger()._repr_html_())
    for block in model["h"]:
        block.register_forward_hook(_nothing)
    audit = Reader(kedge.audit(model)._repr_html_())

    assert [row[:2] for row in ledger.rows[1:]] == [["h.0-6,8-49:out", "1"], ["h.7:out", "0"]]
    assert audit.rows[1][0] == "h.0-49"


def _nothing(module, args, output):
    return None


def test_remedies_that_name_a_block_each_are_one_line():
    """The warning of a session on many blocks has a line for all whose remedies are alike."""
    site = [Site(f"h.{i}.attn.out_proj", "out") for i in range(20)]
    entries = [
        LedgerEntry(one, 0, Cause("bypassed", f'hook "h.{i}.attn" instead'))
        for i, one in enumerate(site)
    ]

    assert Ledger(entries).silent().splitlines()[1:] == [
        '  h.0-19.attn.out_proj:out: bypassed; hook "h.0.attn" instead, and so on'
    ]
    assert len(Ledger(entries[:2]).silent().splitlines()) == 3
