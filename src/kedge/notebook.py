"""Tables in a notebook: plain HTML in the colours of the page around it; and the same as text.

Everything is escaped, there are no scripts, and a long table shows its first rows and folds the others away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

SHOWN = 12
"""The rows of a long table that are not folded away."""

_TABLE = "border-collapse:collapse;color:inherit;background:transparent;margin:.3em 0"
_CELL = (
    "padding:.15em .7em;border:0;border-bottom:1px solid;border-color:color-mix(in srgb,currentColor 20%,transparent)"
)
_PATH = "font-family:ui-monospace,monospace;font-size:.95em;white-space:pre"
_FIGURE = "text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"
_QUIET = "opacity:.75;margin:.3em 0;max-width:60em"


@dataclass(frozen=True)
class Table:
    """A table that is shown in a terminal or in a notebook.

    Attributes:
        columns: The names of the columns.
        rows: The cells, which are shown by `str`.
        align: A letter for each column, as for `table`.
        note: The note below it.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    align: str
    note: str = ""

    def text(self, most: int | None = None) -> str:
        """Return the table as text, one line a row; of more than `most` rows the first ones."""
        shown = self.rows if most is None else self.rows[: _fold(len(self.rows), most)]
        lines = [[str(cell) for cell in row] for row in (self.columns, *shown)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        made = [
            "  ".join(
                cell.rjust(w) if kind == "r" else cell.ljust(w)
                for cell, w, kind in zip(line, widths, self.align, strict=True)
            ).rstrip()
            for line in lines
        ]
        more = [f"... and {len(self.rows) - len(shown):,} more"] if len(shown) < len(self.rows) else []
        return "\n".join([*made, *more, *([self.note] if self.note else [])])

    def html(self) -> str:
        """Return the table as HTML."""
        return table(self.columns, self.rows, align=self.align, note=self.note)


def table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str = "", note: str = "", align: str = ""
) -> str:
    """Return rows as an HTML table.

    Args:
        columns: The names of the columns.
        rows: The cells, which are shown by `str`.
        title: The title above the table.
        note: The note below it.
        align: A letter for each column: "l" for words, "r" for figures, "m" for names in monospaced type. By default
            the first column is "m" and the others are "l".
    """
    kinds = (align or "m").ljust(len(columns), "l")
    lines = ["".join(_cell("td", cell, kind) for cell, kind in zip(row, kinds, strict=True)) for row in rows]
    head = "".join(_cell("th", name, "r" if kind == "r" else "l") for name, kind in zip(columns, kinds, strict=True))
    parts = [f"<p><strong>{escape(title)}</strong></p>" if title else "", _framed(head, lines[: _fold(len(lines))])]
    if rest := lines[_fold(len(lines)) :]:
        parts.append(f"<details><summary>{len(rest):,} more</summary>{_framed(head, rest)}</details>")
    parts.append(paragraph(note) if note else "")
    return "".join(parts)


def paragraph(text: str) -> str:
    """Return a sentence as HTML, below a table or instead of one."""
    return f'<p style="{_QUIET}">{escape(text)}</p>'


def _fold(count: int, most: int = SHOWN) -> int:
    """Return the number of rows that are not folded away: all, unless several would be."""
    return most if count > most + 3 else count


def _framed(head: str, lines: Sequence[str]) -> str:
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    inside = f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    return f'<div style="overflow-x:auto">{inside}</div>'


def _cell(tag: str, content: object, kind: str) -> str:
    style = {"r": _FIGURE, "m": f"text-align:left;{_PATH}"}.get(kind, "text-align:left")
    return f'<{tag} style="{_CELL};{style}">{escape(str(content))}</{tag}>'
