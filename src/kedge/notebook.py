"""Tables in a notebook: plain HTML in the colours of the page around it; and the same as text.

Everything is escaped, there are no scripts, and a long table shows its first rows and folds the
others away.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

LINES = 40
"""The lines of a result that a terminal displays without `print`."""
SHOWN = 12
"""The rows of a long table that are not folded away."""

_TABLE = "border-collapse:collapse;color:inherit;background:transparent;margin:.3em 0"
_CELL = "padding:.15em .7em;border:0;border-bottom:1px solid;border-color:color-mix(in srgb,currentColor 20%,transparent)"
_PATH = "font-family:ui-monospace,monospace;font-size:.95em;white-space:pre"
_FIGURE = "text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap"
_TEXT = "margin:.3em 0;max-width:60em"
_PALE = "opacity:.75"
_QUIET = f";{_PALE}"
_ROW = "display:flex;flex-wrap:wrap;align-items:center;gap:.3em 1em;margin:.2em 0"
_TITLE = "min-width:15em;font-variant-numeric:tabular-nums"


class Printed:
    """A result that a terminal shows as `print` does, also where its value is only displayed; of a long one the first lines."""

    def __repr__(self) -> str:
        """The text of `print`; of a long one the first lines."""
        lines = str(self).splitlines()
        shown = _fold(len(lines), LINES)
        more = (
            [f"... and {len(lines) - shown:,} more lines; print() shows all"]
            if shown < len(lines)
            else []
        )
        return "\n".join([*lines[:shown], *more])


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
        more = (
            [f"... and {len(self.rows) - len(shown):,} more"] if len(shown) < len(self.rows) else []
        )
        return "\n".join([*made, *more, *([self.note] if self.note else [])])

    def html(self) -> str:
        """Return the table as HTML."""
        return table(self.columns, self.rows, align=self.align, note=self.note)


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    title: str = "",
    note: str = "",
    align: str = "",
    whole: bool = False,
) -> str:
    """Return rows as an HTML table.

    Args:
        columns: The names of the columns.
        rows: The cells, which are shown by `str`.
        title: The title above the table.
        note: The note below it.
        align: A letter for each column: "l" for words, "r" for figures, "m" for names in monospaced
            type. By default the first column is "m" and the others are "l".
        whole: Whether every row is shown, however many there are.
    """
    kinds = (align or "m").ljust(len(columns), "l")
    lines = [
        "".join(_cell("td", cell, kind) for cell, kind in zip(row, kinds, strict=True))
        for row in rows
    ]
    head = "".join(
        _cell("th", name, "r" if kind == "r" else "l")
        for name, kind in zip(columns, kinds, strict=True)
    )
    shown = len(lines) if whole else _fold(len(lines))
    parts = [heading(title) if title else "", _framed(head, lines[:shown])]
    if rest := lines[shown:]:
        parts.append(folding(f"{len(rest):,} more", _framed(head, rest)))
    parts.append(paragraph(note) if note else "")
    return "".join(parts)


def heading(text: str) -> str:
    """Return a line in bold type."""
    return f"<p><strong>{escape(text)}</strong></p>"


def figure(title: str, label: str, picture: str) -> str:
    """Return a picture, which is HTML, with a title before it and a label after it."""
    parts = f"{escape(title)}</span>{picture}", f'<span style="{_PALE}">{escape(label)}</span>'
    return f'<div style="{_ROW}"><span style="{_TITLE}">{"".join(parts)}</div>'


def svg(width: int, height: int, path: str, label: str) -> str:
    """Return a line as a picture in the colour of the text.

    Args:
        width: The width in pixels.
        height: The height in pixels.
        path: The line, as the attribute ``d`` of an SVG path.
        label: The picture in words.
    """
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    line = f'<path d="{path}" fill="none" stroke="currentColor" stroke-width="1.3"/>'
    return (
        f'<svg role="img" aria-label="{escape(label)}" {size} style="max-width:100%">{line}</svg>'
    )


def folding(title: str, content: str, *, shown: bool = False) -> str:
    """Return a line that unfolds what is below it.

    Args:
        title: The line.
        content: What is below it, as HTML.
        shown: Whether it is unfolded at first.
    """
    return f"<details{' open' * shown}><summary>{escape(title)}</summary>{content}</details>"


def paragraph(text: str, *, quiet: bool = True) -> str:
    """Return a sentence as HTML, below a table or instead of one; a quiet one is a little paler."""
    return f'<p style="{_TEXT}{_QUIET * quiet}">{escape(text)}</p>'


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
