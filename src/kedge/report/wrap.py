"""Text that is broken into lines of a readable length."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

#: Longer lines than this are hard to read.
WIDEST = 110


def print_paragraph(text: Text, console: Console, indent: int = 0) -> None:
    """Print a text in lines that fit, none of them with spaces at its end."""
    for line in text.wrap(console, min(console.width, WIDEST) - indent):
        line.rstrip()
        console.print(Text(" " * indent).append_text(line))
