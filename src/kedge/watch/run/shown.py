"""A watched run in a notebook: its verdict, its curves, its findings and its modules, as HTML that folds."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import isfinite

import numpy as np

from kedge import notebook
from kedge.report.curves import Curve, curves_of
from kedge.report.findings import MARKS
from kedge.report.head import command_of
from kedge.report.module_lines import folded, lines
from kedge.report.module_table import columns
from kedge.report.sparkline import binned
from kedge.report.terminal import marks_of
from kedge.report.verdict import verdict
from kedge.rules.judgement import judgement_of
from kedge.rules.rule import Finding
from kedge.short_text import compact, counted
from kedge.store.recording import Recording
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
        return (
            "\n".join(
                f"{each.severity} {each.code}  {each.message}"
                + (f"\n  → {each.remedy}" if each.remedy else "")
                for each in self
            )
            or "no findings"
        )

    def __repr__(self) -> str:
        """The same, for a terminal."""
        return str(self)

    def _repr_html_(self) -> str:
        """The findings for a notebook, grouped by rule."""
        groups = [
            list(group)
            for _, group in groupby(self, lambda finding: (finding.severity, finding.code))
        ]
        return "".join(map(_group, groups)) or notebook.paragraph("no findings")


def _group(group: Sequence[Finding]) -> str:
    first = group[0]
    step = f", step {first.step}" if first.step >= 0 else ""
    where = f"{first.site}{step}" if len(group) == 1 else f"in {len(group):,} places"
    told = [
        (f.message if len(group) == 1 else f"· {f.message}", f"→ {f.remedy}" if f.remedy else "")
        for f in group
    ]
    texts = [
        text
        for remedy, same in groupby(told, lambda pair: pair[1])
        for text in (*(message for message, _ in same), remedy)
        if text
    ]
    title = f"{MARKS[first.severity]} {first.severity} {first.code}  {where}"
    return notebook.folding(
        title,
        "".join(notebook.paragraph(text, quiet=False) for text in texts),
        shown=first.severity == "error",
    )


def run_html(recording: Recording, findings: Sequence[Finding]) -> str:
    """Return a run as HTML: the verdict, the curves and the findings, and below a line the modules.

    Args:
        recording: The recording so far.
        findings: The findings of all rules.
    """
    judgement = judgement_of(recording, findings)
    state = "" if recording.end is not None else " so far"
    told = f"{command_of(recording.manifest) or recording.path.name}: {counted(len(recording.steps), 'measured step')}"
    curves = [curve for curve in curves_of(recording) if len(curve.steps)]
    return "".join(
        [
            notebook.heading(f"{told}{state}"),
            notebook.paragraph(verdict(judgement, 3), quiet=False),
            notebook.paragraph(EVERY_STEP) if judgement.helped else "",
            *map(_curve, curves[:MOST_CURVES]),
            Findings(findings)._repr_html_() if findings else "",
            _modules(recording, findings),
        ]
    )


def _curve(curve: Curve) -> str:
    """Return a curve as a picture, with its ends in words."""
    told = f"{curve.title} {compact(curve.values[0])} → {compact(curve.values[-1])}"
    return notebook.figure(
        told, curve.label, _picture(np.where(curve.bad, np.nan, curve.values), told)
    )


def _picture(values: Floats, told: str) -> str:
    """Return an SVG of a curve: on a logarithmic scale if no value is negative; a tick at the top is not finite."""
    drawn = binned(values, WIDTH, np.maximum)
    known = drawn[np.isfinite(drawn)]
    if len(known) and known.min() >= 0:
        drawn = np.log10(np.maximum(drawn, known[known > 0].min(initial=1.0)))
        known = drawn[np.isfinite(drawn)]
    low, high = (known.min(), known.max()) if len(known) else (0.0, 0.0)
    x = np.linspace(2, WIDTH - 2, len(drawn)) if len(drawn) > 1 else np.array([2.0])
    y = HEIGHT - 4 - (drawn - low) / ((high - low) or 1.0) * (HEIGHT - 12)
    line, ticks, pen = "", "", "M"
    for across, down in zip(x.tolist(), y.tolist(), strict=True):
        if isfinite(down):
            line, pen = f"{line}{pen}{across:.1f} {down:.1f}", "L"
        else:
            ticks, pen = f"{ticks}M{across:.1f} 1v5", "M"
    return notebook.svg(WIDTH, HEIGHT, f"{line}{ticks}", told)


def _modules(recording: Recording, findings: Sequence[Finding]) -> str:
    """Return the table of modules, below a line that unfolds it; alike blocks share a line, as in the terminal."""
    known = lines(recording)
    shown = folded(known, findings)
    if not shown or not len(recording.steps):
        return ""
    marks = marks_of(shown, findings)
    chosen = columns(shown, len(recording.steps), TABLE, marks)
    rows = [[str(column.cell(line)) for column in chosen] for line in shown]
    kinds = "".join("r" if column.right else "m" for column in chosen)
    table = notebook.table([column.title for column in chosen], rows, align=kinds, whole=True)
    return notebook.folding(counted(len(known), "module"), table)
