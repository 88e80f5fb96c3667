"""A watched run in a notebook: verdict, curves, findings and modules, as HTML that folds."""

from __future__ import annotations

from math import isfinite

import numpy as np

from kedge import notebook
from kedge.report.curves import Curve
from kedge.report.findings import grouped
from kedge.report.module_table import columns
from kedge.report.shown_run import ShownRun
from kedge.report.sparkline import binned
from kedge.report.verdict import verdict
from kedge.rules.rule import Finding
from kedge.short_text import compact, counted
from kedge.store.rows import Floats

#: The pixels of a curve, and the characters of a line of the table of modules.
WIDTH, HEIGHT, TABLE = 420, 64, 180
#: The most curves.
MOST_CURVES = 6
EVERY_STEP = (
    "kedge.watch(..., every=1, budget=None) measures every step, so that more rules can judge"
)


class Findings(tuple[Finding, ...]):
    """Findings, which a notebook shows as a list that unfolds."""

    __slots__ = ()

    def __str__(self) -> str:
        """A paragraph for each finding: what was found, and what to do."""
        lines = []
        for each in self:
            lines.append(f"{each.severity} {each.code}  {each.message}")
            if each.remedy:
                lines.append(f"  → {each.remedy}")
        return "\n".join(lines) or "no findings"

    def __repr__(self) -> str:
        """The same, for a terminal."""
        return str(self)

    def _repr_html_(self) -> str:
        """The findings for a notebook, grouped by rule."""
        folds = []
        for group in grouped(self):
            texts = []
            for remedy, same in group.by_remedy():
                texts += [group.told(finding) for finding in same]
                if remedy:
                    texts.append(remedy)
            content = "".join(notebook.paragraph(text, quiet=False) for text in texts if text)
            title = f"{group.title}  {group.where}"
            folds.append(notebook.folding(title, content, shown=group.severity == "error"))
        return "".join(folds) or notebook.paragraph("no findings")


def run_html(shown_run: ShownRun) -> str:
    """Return a run as HTML: the verdict, the curves and the findings, and below a line the modules."""
    recording = shown_run.recording
    name = shown_run.command or recording.path.name
    told = f"{name}: {counted(len(recording.steps), 'measured step')}"
    if recording.end is None:
        told += " so far"
    parts = [
        notebook.heading(told),
        notebook.paragraph(verdict(shown_run.judgement, 3), quiet=False),
    ]
    if shown_run.judgement.helped:
        parts.append(notebook.paragraph(EVERY_STEP))
    parts += map(_curve, shown_run.drawn_curves[:MOST_CURVES])
    if shown_run.findings:
        parts.append(Findings(shown_run.findings)._repr_html_())
    if shown_run.folds and len(recording.steps):
        parts.append(_modules(shown_run))
    return "".join(parts)


def _curve(curve: Curve) -> str:
    """Return a curve as a picture, with its ends in words."""
    told = f"{curve.title} {compact(curve.values[0])} → {compact(curve.values[-1])}"
    picture = _picture(np.where(curve.bad, np.nan, curve.values), told)
    return notebook.figure(told, curve.name, picture)


def _picture(values: Floats, told: str) -> str:
    """Return an SVG of a curve: on a logarithmic scale if no value is negative.

    A tick at the top is not finite.
    """
    drawn = binned(values, WIDTH, np.maximum)
    known = drawn[np.isfinite(drawn)]
    if len(known) and known.min() >= 0:
        drawn = np.log10(np.maximum(drawn, known[known > 0].min(initial=1.0)))
        known = drawn[np.isfinite(drawn)]
    low = high = 0.0
    if len(known):
        low, high = known.min(), known.max()
    x = np.linspace(2, WIDTH - 2, len(drawn))
    y = HEIGHT - 4 - (drawn - low) / ((high - low) or 1.0) * (HEIGHT - 12)

    line = ""
    ticks = ""
    pen = "M"
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        if isfinite(down):
            line += f"{pen}{across:.1f} {down:.1f}"
            pen = "L"
        else:
            ticks += f"M{across:.1f} 1v5"
            pen = "M"
    return notebook.svg(WIDTH, HEIGHT, f"{line}{ticks}", told)


def _modules(shown_run: ShownRun) -> str:
    """Return the table of modules, below a line that unfolds it.

    Alike blocks share a line, as in the terminal.
    """
    shown = shown_run.folds
    chosen = columns(shown, len(shown_run.recording.steps), TABLE, shown_run.marks(shown))
    rows = [[str(column.cell(line)) for column in chosen] for line in shown]
    kinds = "".join("r" if column.right else "m" for column in chosen)
    table = notebook.table([column.title for column in chosen], rows, align=kinds, whole=True)
    return notebook.folding(counted(len(shown_run.lines), "module"), table)
