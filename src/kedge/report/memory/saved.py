"""The memory that autograd saves for backward, by module and by line, in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from kedge.report.fitted_text import cut, print_paragraph
from kedge.report.held import held_tree, icicle
from kedge.report.sparkline import BLOCKS
from kedge.short_text import counted, sized
from kedge.store.events import SavedEvent
from kedge.store.recording import Recording
from kedge.store.saved_account import BytesOverStep, SavedAccount
from kedge.store.saved_tables import WORDS, TextTable, folded_sums, named, sections

WIDE = 64
#: The most characters of the name of a module, an operation or a tensor.
NAMES = 44
TONES = {"module": "blue", "operation": "yellow", "tensor": "green"}

#: The fewest characters for a path or a line, and those between two columns.
LEAST_WORDS, GAP = 16, 2

#: The columns that a narrow terminal leaves out, the first one first.
SPARE = ("int8", "bf16", "offload")


def render_saved(recording: Recording, console: Console, most: int | None) -> None:
    """Print the tables of an account.

    Args:
        recording: The recording.
        console: The console to print to.
        most: The most modules and lines to list; None for all.
    """
    event = recording.saved
    if event is None:
        console.print("no saved tensors were recorded: no step with gradients was watched")
        return
    account = event.account
    if account is None:
        _render_counted(event, console, most)
        return
    console.print(Text(f"step {event.step}, at its peak", "bold"))
    for section in sections(account, most):
        _render(section, console)
    if account.course.bytes:
        console.print(_drawn(account, console.width))
        console.print()
    if account.course.tensors:
        _render_icicle(account.course, console)


def _render(section: TextTable, console: Console) -> None:
    columns = section.columns
    cells = zip(columns, *section.rows, strict=True)
    widths = [max(map(len, column)) for column in cells]
    shown = _fitting(columns, widths, console.width)

    # The words have what the figures leave; a line of source has some of it in any case.
    rest = console.width - GAP * (len(shown) - 1)
    for place in shown:
        if not _is_words(columns, place):
            rest -= widths[place]
    sourced = columns[-1] == WORDS
    widths[0] = min(widths[0], rest)
    if sourced:
        widths[0] = min(widths[0], rest - LEAST_WORDS)

    show_header = bool(section.title)
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=show_header)
    for place in shown:
        justify: JustifyMethod = "left" if _is_words(columns, place) else "right"
        table.add_column(columns[place], justify=justify, no_wrap=True)
    for row in section.rows:
        texts = [Text(row[place]) for place in shown]
        texts[0] = Text(cut(row[0], widths[0]))
        if sourced:
            texts[-1].truncate(rest - widths[0], overflow="ellipsis")
        table.add_row(*texts)
    console.print(table)
    if section.note.strip():
        print_paragraph(Text(section.note.strip(), "dim"), console)
    console.print()


def _is_words(columns: Sequence[str], place: int) -> bool:
    return place == 0 or columns[place] == WORDS


def _fitting(columns: Sequence[str], widths: Sequence[int], width: int) -> list[int]:
    """Return the places of the columns that fit without cutting a figure.

    Those of codecs are left out first.
    """
    least = list(widths)
    for place, wide in enumerate(widths):
        if _is_words(columns, place):
            least[place] = min(wide, LEAST_WORDS)
    shown = list(range(len(columns)))
    for title in SPARE:
        taken = sum(least[place] for place in shown) + GAP * (len(shown) - 1)
        if taken <= width:
            break
        shown = [place for place in shown if columns[place] != title]
    return shown


def _drawn(account: SavedAccount, width: int) -> Text:
    """Return the bytes over the step as a line of blocks."""
    course = account.course
    text = Text("over the step  ")
    where = f"  peak {sized(course.peak)}"
    room = min(WIDE, width - len(text) - len(where))
    for height in _heights(course, room):
        text.append(BLOCKS[round(height * (len(BLOCKS) - 1))])
    return text.append(where, "dim")


def _render_icicle(course: BytesOverStep, console: Console) -> None:
    """Print a line for each large module, operation and tensor at the peak.

    The bar of each lies where it is in the whole.
    """
    names = min(NAMES, console.width * 2 // 5)
    bars = max(console.width - names - 22, 8)
    lines = icicle(held_tree(course.tensors, course.peak_moment), bars, names)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("at the peak", no_wrap=True)
    for title in ("held", "share"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True, overflow="crop")
    for line in lines:
        bar = Text(line.bar, TONES[line.level])
        table.add_row(Text(line.name), Text(line.size), Text(line.share), bar)
    console.print(table)
    console.print()


def _heights(course: BytesOverStep, most: int) -> list[float]:
    """Return the largest of each part of the step, as a share of the peak."""
    last = course.at[-1] or 1
    highest = [0.0] * min(most, last)
    if not course.peak:
        return highest
    for at, size in zip(course.at, course.bytes, strict=True):
        place = min(int((at - 1) * len(highest) / last), len(highest) - 1)
        highest[place] = max(highest[place], size / course.peak)
    return highest


def _render_counted(event: SavedEvent, console: Console, most: int | None) -> None:
    """Print the bytes of each module, which every run counts."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("module", no_wrap=True)
    for title in ("tensors", "held"):
        table.add_column(title, justify="right", no_wrap=True)
    folds = folded_sums(event.modules, unfolded=most is None)
    for _, sums in sorted(folds, key=lambda fold: -fold[1].bytes):
        table.add_row(named(sums.path), f"{sums.tensors:,}", sized(sums.bytes))
    console.print(Text(f"step {event.step}: {sized(event.bytes)} saved for backward", "bold"))
    console.print(table)
    console.print()
    said = f"These are the totals of {counted(len(event.modules), 'module')} that every run counts"
    if any(fold.folded for fold, _ in folds):
        said += ", blocks that hold the same in one line with their sum"
    said += "; kedge run --saved records every tensor, with its line and ways to free its memory."
    print_paragraph(Text(said, "dim"), console)
