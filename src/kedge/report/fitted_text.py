"""Text fitted to a width: wrapped, cut, filled, and joined into lines of a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kedge.numbers import with_short_words

#: The longest readable line.
WIDEST = 110
#: The length from which a text is searched for very long names.
_LONG = 400


def print_paragraph(text: Text, console: Console, indent: int = 0) -> None:
    """Print a text in lines that fit, without spaces at their ends."""
    if len(text) > _LONG:
        text = Text(with_short_words(text.plain), text.style)
    for line in text.wrap(console, min(console.width, WIDEST) - indent):
        line.rstrip()
        console.print(Text(" " * indent).append_text(line))


def fit(content: str | Text, width: int, *, right: bool) -> Text:
    """Return a text of exactly this width, filled with spaces or cut in its middle."""
    text = content.copy() if isinstance(content, Text) else Text(content)
    if text.cell_len > width:
        text = Text(cut(text.plain, width), text.style)
        text.truncate(width)  # characters may be two cells wide
    pad = text.pad_left if right else text.pad_right
    pad(width - text.cell_len)
    return text


def cut(name: str, width: int) -> str:
    """Return a name cut to a width in its middle; most of its end is kept, where paths differ most."""
    if len(name) <= width:
        return name
    start = min(max(width // 5, 4), width // 2)
    return f"{name[:start]}…{name[len(name) - (width - start - 1) :]}" if width > 1 else "…"[:width]


def joined(cells: Sequence[str | Text], style: str = "") -> Text:
    """Return cells as one line, with a space between them."""
    text = Text(" ", style, no_wrap=True).join([Text(cell) if isinstance(cell, str) else cell for cell in cells])
    text.rstrip()
    return text
