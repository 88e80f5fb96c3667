"""Who holds the memory that autograd saves for backward, drawn in a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kedge.numbers import counted, sized
from kedge.report.wrap import print_paragraph
from kedge.store.recording import Recording
from kedge.store.saved_account import WORDS, Account, Course, Section, account_of, named, newest, sections

STEPS = "▁▂▃▄▅▆▇█"
WIDE = 64


def render_saved(recording: Recording, console: Console, most: int | None) -> None:
    """Draw the tables of an account.

    Args:
        recording: What was seen.
        console: Where to draw.
        most: At most how many modules and lines; None for all.
    """
    event = newest(recording.events)
    if event is None:
        console.print("nothing is recorded of what autograd saved: no step with gradients was watched")
        return
    account = account_of(event)
    if account is None:
        _render_counted(event, console)
        return
    console.print(Text(f"step {event.get('step')}, at its peak", "bold"))
    for section in sections(account, most):
        _render(section, console)
    if account.course.bytes:
        console.print(_drawn(account))
        console.print()


def _render(section: Section, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(section.title))
    words = section.columns[-1] == WORDS
    for place, title in enumerate(section.columns):
        last = words and place == len(section.columns) - 1
        table.add_column(title, justify="left" if place == 0 or last else "right", no_wrap=True, overflow="ellipsis")
    for cells in section.rows:
        table.add_row(*map(Text, cells))
    console.print(table)
    if section.note.strip():
        print_paragraph(Text(section.note.strip(), "dim"), console)
    console.print()


def _drawn(account: Account) -> Text:
    """Draw the bytes over the step in one line of blocks."""
    course = account.course
    text = Text("over the step  ")
    for height in _heights(course):
        text.append(STEPS[round(height * (len(STEPS) - 1))])
    where = f"  peak {sized(course.peak)}"
    return text.append(where, "dim")


def _heights(course: Course) -> list[float]:
    """Give the highest of each stretch of the step, as a share of the peak."""
    last = course.at[-1] or 1
    highest = [0.0] * min(WIDE, last)
    for at, size in zip(course.at, course.bytes, strict=True):
        place = min(int((at - 1) * len(highest) / last), len(highest) - 1)
        highest[place] = max(highest[place], size / course.peak if course.peak else 0.0)
    return highest


def _render_counted(event: Mapping[str, Any], console: Console) -> None:
    """Draw what every run counts: the bytes of each module."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module", no_wrap=True)
    for title in ("tensors", "held"):
        table.add_column(title, justify="right", no_wrap=True)
    for module in sorted(event["modules"], key=lambda module: -module["bytes"]):
        table.add_row(named(module["path"]), f"{module['tensors']:,}", sized(module["bytes"]))
    console.print(Text(f"step {event.get('step')}: {sized(event['bytes'])} saved for backward", "bold"))
    console.print(table)
    console.print()
    said = (
        f"This is what every run counts, of {counted(len(event['modules']), 'module')}; "
        "kedge run --saved writes down every tensor, with lines and remedies."
    )
    print_paragraph(Text(said, "dim"), console)
