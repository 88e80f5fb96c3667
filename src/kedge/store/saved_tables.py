"""The account of saved tensors as tables of text: totals, modules, lines, operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kedge.short_text import counted, sized
from kedge.sites.folding import Fold, Folding
from kedge.store.saved_account import LineSums, SavedAccount, Sums

MOST_ROWS = 24
_LONGEST = 44
_BY_MODULE = (
    "module",
    "tensors",
    "packed",
    "held",
    "rebuild",
    "offload",
    "bf16",
    "int8",
    "checkpoint",
)
WORDS = "source"
_BY_LINE = ("line", "tensors", "packed", "held", "rebuild", WORDS)
_NOTE = (
    "packed: all saved tensors, each as often as it was saved. "
    "held: each storage once, for the module that saved it first. "
    "rebuild to checkpoint: what each would free. "
    "A module's figures include those of its submodules."
)
_NOTE_FOLDED = (
    " h.0-47: the sum over all of these blocks, which hold the same bytes; "
    "one that holds more or less stands alone."
)
_NOTE_OPERATIONS = (
    "packed: all saved tensors, each as often as it was saved. "
    "held: each storage once, for the operation that saved it first. "
    "rebuild to int8: what each would free."
)


@dataclass(frozen=True)
class TextTable:
    """A table of text, to be drawn.

    Attributes:
        title: The title.
        columns: The names of the columns; the first holds words, the others figures.
        rows: The cells.
        note: A note to put below the table.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def sections(
    account: SavedAccount,
    most: int | None = MOST_ROWS,
) -> Iterator[TextTable]:
    """Yield the tables of an account.

    Args:
        account: The account.
        most: The most modules and lines to list, the largest ones; None for all.
    """
    yield TextTable("", ("saved for backward", ""), tuple(_totals(account)))
    folds = folded_sums(account.holders, unfolded=most is None)
    chosen, _ = _largest([sums for _, sums in folds], most)
    places = {id(sums) for sums in chosen}
    left = sum(len(fold.members) for fold, sums in folds if id(sums) not in places)
    note = _NOTE
    if any(fold.folded for fold, _ in folds):
        note += _NOTE_FOLDED
    note += _rest(left, "module")
    yield TextTable("by module", _BY_MODULE, tuple(map(_row, chosen)), note)
    chosen, left = _largest(account.lines, most)
    yield TextTable("by line", _BY_LINE, tuple(map(_line, chosen)), _rest(left, "line").strip())


def folded_sums(
    modules: Iterable[Sums], *, unfolded: bool = False
) -> list[tuple[Fold[Sums], Sums]]:
    """Return modules, those of many whose totals are equal together, with the sums over them.

    Args:
        modules: The totals of modules.
        unfolded: Whether each module stands by itself.
    """
    known = list(modules)
    if unfolded:
        folds = _FOLDING.each(known)
    else:
        folds = _FOLDING.shown(known)
    return [(fold, _sum(fold)) for fold in folds]


def _figures(sums: Sums) -> tuple[int, ...]:
    return tuple(getattr(sums, name) for name in _FIGURES)


def _sum(fold: Fold[Sums]) -> Sums:
    """Return the sums over the modules of a fold; they are those of its only one, if it is one."""
    first = fold.members[0]
    if not fold.folded:
        return first
    totals = {}
    for name in _FIGURES:
        totals[name] = sum(getattr(sums, name) for sums in fold.members)
    return replace(first, path=fold.name, **totals)


_FIGURES = [field.name for field in fields(Sums) if field.name != "path"]
_FOLDING = Folding[Sums](lambda sums: named(sums.path), lambda _: None, _figures)


def operations_table(
    operations: Sequence[Sums],
    most: int | None = MOST_ROWS,
) -> TextTable:
    """Return the table of tensors that were saved outside of modules, by the operations."""
    chosen, left = _largest(operations, most)
    columns = ("operation", *_BY_MODULE[1:-1])
    rows = tuple((str(sums.path), *_row(sums)[1:-1]) for sums in chosen)
    return TextTable("by operation", columns, rows, _NOTE_OPERATIONS + _rest(left, "operation"))


def _totals(account: SavedAccount) -> Iterator[tuple[str, str]]:
    total = account.total
    course = account.course
    yield f"packed ({total.tensors:,} tensors, as often as saved)", sized(total.packed)
    yield "held (each storage once, no parameters)", sized(total.bytes)
    yield "inputs among those", sized(account.inputs)
    yield "can be rebuilt exactly", sized(total.rebuild)
    yield "can be moved", sized(total.offload)
    yield "freed by floats in bf16", sized(total.bf16)
    yield "freed by floats in int8", sized(total.int8)
    yield "parameters and buffers saved, in memory in any case", sized(account.parameters)
    if course.peak:
        largest = "-"
        if course.holders:
            largest = named(course.holders[0][0])
        yield "largest holder at the peak", largest
        where = f"after {course.peak_at:,} of {course.at[-1]:,} saves and releases"
        yield f"peak ({where})", sized(course.peak)


def _row(sums: Sums) -> tuple[str, ...]:
    return (
        named(sums.path),
        f"{sums.tensors:,}",
        sized(sums.packed),
        sized(sums.bytes),
        _freed(sums.rebuild),
        _freed(sums.offload),
        _freed(sums.bf16),
        _freed(sums.int8),
        _freed(sums.checkpoint),
    )


def _freed(size: int) -> str:
    if not size:
        return "-"
    return sized(size)


def _line(sums: LineSums) -> tuple[str, ...]:
    text = sums.text or ""
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST - 1]}…"
    return (
        sums.place,
        f"{sums.tensors:,}",
        sized(sums.packed),
        sized(sums.bytes),
        _freed(sums.rebuild),
        text,
    )


def _largest(rows: Sequence[Any], most: int | None) -> tuple[list[Any], int]:
    """Return the rows that hold most, in their order, and the number of the others."""
    held = [row for row in rows if row.bytes or row.packed]
    if most is None or len(held) <= most:
        return held, 0
    places = sorted(range(len(held)), key=lambda place: -held[place].bytes)[:most]
    return [held[place] for place in sorted(places)], len(held) - most


def _rest(left: int, noun: str) -> str:
    if not left:
        return ""
    return f" {counted(left, f'smaller {noun}')} left out."


def named(path: str | None) -> str:
    """Return the name of a module in a table."""
    if path is None:
        return "(outside of modules)"
    return path or "(the model)"
