"""Blocks that are alike are one line of the live table, which unfolds."""

from __future__ import annotations

from kedge.report.live.module_list import ModuleList
from kedge.report.module_lines import FoldedLine, folded, lines
from kedge.store.recording import Recording


def tower(blocks: int = 30) -> ModuleList:
    """Return the list of a network of equal blocks, whose scale grows."""
    paths = ["embed", *(f"h.{i}.{part}" for i in range(blocks) for part in ("attn", "mlp")), "head"]
    rows = [
        {"site": f"{path}:out", "step": 0, "count": 1, "sumsq": float(i + 1)}
        for i, path in enumerate(paths)
    ]
    made = ModuleList()
    made.fill(folded(lines(Recording.build([f"{path}:out" for path in paths], rows))), {})
    made.lay_out(100)
    return made


def shown(made: ModuleList) -> list[str]:
    """Return the names of the lines."""
    return [line.label for line in made.shown]


def test_a_folded_line_has_the_spread_and_unfolds() -> None:
    """Its modules come below it, in the order of the table, and go again."""
    made = tower()
    assert shown(made) == ["embed", "h.0-29.attn", "h.0-29.mlp", "head"]
    assert made.drawn(1).plain.split()[:3] == ["▸", "h.0-29.attn", "1.4..7.7"]

    made.choose(1)
    assert made.fold_or_unfold()
    made.lay_out(100)
    assert shown(made)[:4] == ["embed", "h.0-29.attn", "h.0.attn", "h.1.attn"]
    assert len(made.shown) == 34
    assert made.drawn(1).plain.startswith("▾ h.0-29.attn")

    made.choose(2)
    assert not made.fold_or_unfold()
    made.sort_by("out")
    made.lay_out(100)
    assert shown(made)[:3] == ["head", "h.0-29.mlp", "h.0-29.attn"]
    assert shown(made)[3:5] == ["h.29.attn", "h.28.attn"]


def test_a_fold_stays_open_when_the_run_goes_on() -> None:
    """New lines with the same names keep what was unfolded."""
    made = tower()
    made.choose(1)
    made.fold_or_unfold()
    made.fill(tower()._lines, {})
    made.lay_out(100)

    assert len(made.shown) == 34
    assert isinstance(made.line, FoldedLine)
