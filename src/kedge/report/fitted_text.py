"""Text fitted to a width: wrapped, cut, filled, and joined into lines of a table.

# Note [Cut names]
A path loses its words from the left, never the numbers of its blocks nor its last name, so that two
modules that differ only in a number stay different: ``resnet.encoder.stages.1.layers.0`` becomes
``res…1.layers.0``. The script of the page, elements.js, does the same.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kedge.short_text import with_short_words

#: The longest readable line.
WIDEST = 110
#: The length from which a text is searched for very long names.
_LONG = 400
#: A path of at least two names, with what may follow its last one.
_PATH = re.compile(r"[\w,…-]+(?:[.][\w,…-]+)+(?:[#:/\[].*)?")
#: The fewest letters of a last name that are left beside the numbers of its blocks.
_LEAST_LAST = 6
_LOST = "\0"
_RUN_OF_LOST = re.compile(f"[.]?{_LOST}(?:[.]{_LOST})*[.]?")


def print_paragraph(text: Text, console: Console, indent: int = 0) -> None:
    """Print a text in lines that fit, without spaces at their ends."""
    if len(text) > _LONG:
        text = Text(with_short_words(text.plain), text.style)
    for line in text.wrap(console, min(console.width, WIDEST) - indent):
        line.rstrip()
        console.print(Text(" " * indent).append_text(line))


def fit(content: str | Text, width: int, *, right: bool) -> Text:
    """Return a text of exactly this width, filled with spaces or cut in its middle."""
    text = Text(content) if isinstance(content, str) else content.copy()
    if text.cell_len > width:
        text = Text(cut(text.plain, width), text.style)
        text.truncate(width)  # characters may be two cells wide
    if right:
        text.pad_left(width - text.cell_len)
    else:
        text.pad_right(width - text.cell_len)
    return text


def cut(name: str, width: int) -> str:
    """Return a name cut to a width in its middle; see Note [Cut names]."""
    if len(name) <= width:
        return name
    before, space, path = name.rpartition(" ")
    if _PATH.fullmatch(path):
        shorter = before + space + _without_words(path, width - len(before + space))
        if len(shorter) <= width:
            return shorter
        numbers, _, last = shorter.rpartition("…")
        room = width - len(numbers) - 1
        if numbers and room >= _LEAST_LAST:
            return f"{numbers}…{last[len(last) - room :]}"
    if width <= 1:
        return "…"[:width]
    start = min(max(width // 5, 4), width // 2)
    end = len(name) - (width - start - 1)
    return f"{name[:start]}…{name[end:]}"


def _without_words(path: str, width: int) -> str:
    """Return a path without as many of its words, from the left, as do not fit.

    It may still be too long.
    """
    shown = path.split(".")
    words = shown[:-1]
    text = path
    for place, word in enumerate(words):
        if not word.isidentifier():
            continue
        shown[place] = _LOST
        text = _RUN_OF_LOST.sub("…", ".".join(shown))
        if len(text) > width:
            continue
        if shown[0] == _LOST:
            return f"{words[0][: width - len(text)]}{text}"
        return text
    return text


def joined(cells: Sequence[str | Text], style: str = "") -> Text:
    """Return cells as one line, with a space between them."""
    line = Text(style=style, no_wrap=True)
    for place, cell in enumerate(cells):
        if place:
            line.append(" ")
        line.append(cell)
    line.rstrip()
    return line
