"""The tables of saved tensors in a terminal."""

from __future__ import annotations

import io

from rich.console import Console

from kedge.report.memory.saved import render_saved
from kedge.store.recording import Recording

MIB = 2**20
SUMS = {
    "tensors": 12,
    "packed": 999 * MIB,
    "bytes": 888 * MIB,
    "rebuild": 777 * MIB,
    "offload": 666 * MIB,
}
FREED = {"bf16": 555 * MIB, "int8": 444 * MIB, "checkpoint": 333 * MIB}
LINE = {
    "file": "examples/training.py",
    "line": 47,
    "text": "x = self.pool(self.relu2(self.norm2(self.conv2(x))))",
}
EVENT = {
    "kind": "saved",
    "step": 0,
    "bytes": 888 * MIB,
    "total": SUMS | FREED,
    "modules": [],
    "tree": [{"path": "encoder.layers.11.attention.output", **SUMS, **FREED}],
    "lines": [
        LINE | {"tensors": 12, "packed": 999 * MIB, "bytes": 888 * MIB, "rebuild": 777 * MIB}
    ],
    "course": {"bytes": [1, 888 * MIB, 1], "at": [1, 100, 200], "peak": 888 * MIB, "peak_at": 100},
}


def drawn(width: int) -> list[str]:
    """Return the lines of the report of one module."""
    stream = io.StringIO()
    render_saved(Recording.build(events=[EVENT]), Console(file=stream, width=width), None)
    return stream.getvalue().splitlines()


def test_a_narrow_terminal_leaves_out_columns_and_cuts_no_figure() -> None:
    """At 80 columns every figure is whole: a column of a codec is left out, and paths are cut."""
    (head, row) = (line.split() for line in drawn(80) if line.startswith(("module", "enc")))

    assert head == [
        "module",
        "tensors",
        "packed",
        "held",
        "rebuild",
        "offload",
        "bf16",
        "checkpoint",
    ]
    assert row[1:] == [
        "12",
        "1.05",
        "GB",
        "931",
        "MB",
        "815",
        "MB",
        "698",
        "MB",
        "582",
        "MB",
        "349",
        "MB",
    ]
    assert max(map(len, drawn(80))) <= 80


def test_a_wide_terminal_has_every_column() -> None:
    """At 120 columns nothing is left out or cut."""
    text = "\n".join(drawn(120))

    assert "encoder.layers.11.attention.output" in text
    assert "bf16" in text
    assert "int8" in text
    assert "…" not in text.partition("line")[0]


def test_the_totals_of_every_run_fold_too() -> None:
    """Modules of many blocks that hold the same share a line, with the sum over them; --all lists each."""
    modules = [{"path": f"h.{i}.attn", "tensors": 2, "bytes": 1000 + (i == 17)} for i in range(48)]
    made = Recording.build(
        events=[{"kind": "saved", "step": 0, "bytes": 48001, "modules": modules}]
    )
    short, full = io.StringIO(), io.StringIO()
    render_saved(made, Console(file=short, width=100), 40)
    render_saved(made, Console(file=full, width=100), None)

    assert [line.split() for line in short.getvalue().splitlines()[1:4]] == [
        ["module", "tensors", "held"],
        ["h.0-16,18-47.attn", "94", "47", "kB"],
        ["h.17.attn", "2", "1", "kB"],
    ]
    assert (
        "the totals of 48 modules that every run counts, blocks that hold the same in one line"
        in short.getvalue()
    )
    assert sum(".attn" in line for line in full.getvalue().splitlines()) == 48
