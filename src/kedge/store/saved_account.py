"""The memory that autograd held for backward: by module, by line of the program, and over time; plain numbers.

# Note [What a remedy frees]
Of the storages that one module holds, each counted once, for the module that saved it first:

- *rebuild*: the bytes of tensors that can be computed again from others that are in memory in any
  case, less the bytes that this needs, such as one bit per element of a dropout mask.
- *offload*: the bytes of plain strided tensors, in storages from a least size on, other than
  parameters, buffers and inputs of the model.
- *bf16*, *int8*: of floating-point tensors, the bytes saved by 2 bytes a number, or by 1 byte a
  number and 4 bytes of scale for every 256 numbers.
- *checkpoint*: the bytes that only calls of the module and of its submodules hold, less the inputs
  of those calls: a checkpoint keeps the inputs, even if nothing else would. During its backward it
  needs the rest again.

A model's own inputs count as held, and no remedy frees them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kedge.json_input.classes import Count, left_out, required
from kedge.json_input.shape import Misshapen
from kedge.short_text import sized
from kedge.sites.folding import Fold, Folding
from kedge.store.held_tensors import NO_TENSORS, HeldTensors

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
    "packed: all saved tensors, each as often as it was saved. held: each storage once, for the module that saved it first. "
    "rebuild to checkpoint: what each would free. A module's figures include those of its submodules."
)
_NOTE_FOLDED = " h.0-47: the sum over all of these blocks, which hold the same bytes; one that holds more or less stands alone."
_NOTE_OPERATIONS = (
    "packed: all saved tensors, each as often as it was saved. held: each storage once, for the operation that saved it first. "
    "rebuild to int8: what each would free."
)


@dataclass(frozen=True)
class Sums:
    """Totals of some saved tensors; see Note [What a remedy frees].

    Attributes:
        path: The module; None for tensors saved outside of modules.
        tensors: The number of saves that are still held.
        packed: The bytes of all these tensors, each as often as it was saved.
        bytes: The bytes of their storages, each once, without parameters and buffers.
        rebuild: The bytes that rebuilding frees.
        offload: The bytes that offloading frees.
        bf16: The bytes that keeping floats in bfloat16 frees.
        int8: The bytes that keeping floats in 8 bits frees.
        checkpoint: The bytes that checkpointing the module frees; 0 if there is no module.
    """

    path: str | None = required(None)
    tensors: Count = required(0)
    packed: Count = left_out(0)
    bytes: Count = required(0)
    rebuild: Count = left_out(0)
    offload: Count = left_out(0)
    bf16: Count = left_out(0)
    int8: Count = left_out(0)
    checkpoint: Count = left_out(0)


@dataclass(frozen=True)
class TotalSums(Sums):
    """Totals of all saved tensors, as a recording stores them.

    Attributes:
        parameters: Bytes of saved parameters and buffers.
        inputs: Bytes of the model's inputs.
    """

    parameters: Count = 0
    inputs: Count = 0


@dataclass(frozen=True)
class LineSums:
    """Totals of the tensors that one line of the program saved.

    Attributes:
        file: The file; None if no line of the program was running.
        line: The number of the line.
        function: The function with the line.
        text: The source of the line, if it can be read.
        tensors: The number of saves that are still held.
        packed: The bytes of all these tensors.
        bytes: The bytes of their storages, each once, without parameters and buffers.
        rebuild: The bytes that rebuilding frees.
    """

    file: str | None = None
    line: int = 0
    function: str = ""
    text: str | None = None
    tensors: Count = 0
    packed: Count = 0
    bytes: Count = 0
    rebuild: Count = 0

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}" if self.file is not None else "(no line of the program)"


@dataclass(frozen=True)
class BytesOverStep:
    """Bytes held over a step.

    Attributes:
        bytes: The bytes held after each save and each release; a sample where there were very many.
        at: The number of the save or release of each, counted from 1.
        peak: The largest of all.
        peak_at: The number of the save or release after which it was reached.
        backward: The number of the first release, with which backward begins to free memory; None
            if there was none.
        holders: The modules that hold memory at the peak, with their bytes, the largest first.
        seconds: The time of each since the first save; with what the recording itself takes. Empty
            if not recorded.
        tensors: The tensors held at each; empty if not recorded.
    """

    bytes: tuple[Count, ...] = ()
    at: tuple[Count, ...] = ()
    peak: Count = 0
    peak_at: Count = 0
    backward: Count | None = None
    holders: tuple[tuple[str | None, Count], ...] = ()
    seconds: tuple[float, ...] = ()
    tensors: HeldTensors = NO_TENSORS

    @property
    def peak_moment(self) -> int:
        """The place of the peak in `bytes`."""
        return self.at.index(self.peak_at)

    def __post_init__(self) -> None:
        """Check that everything is of the same moments."""
        if len(self.bytes) != len(self.at) or (self.peak and not self.at):
            raise Misshapen(f"has {len(self.bytes)} heights at {len(self.at)} places")
        if len(self.seconds) not in (0, len(self.at)):
            raise Misshapen(f"has {len(self.seconds)} times at {len(self.at)} places")
        try:
            self.tensors.check(len(self.at))
        except Misshapen as error:
            raise error.within(".tensors") from None


@dataclass(frozen=True)
class SavedAccount:
    """The memory that autograd held at one moment, or at the peak of one step.

    Attributes:
        total: All together; its `checkpoint` is not used.
        parameters: Bytes of saved parameters and buffers, which are in memory in any case; not part
            of `total`.
        inputs: Bytes of the model's inputs, part of `total`.
        modules: The totals of each module by itself, in data-flow order.
        tree: The totals of each module with its submodules.
        lines: The totals of each line, the largest first.
        items: Descriptions of the largest saved tensors.
        course: The bytes over time.
    """

    total: Sums
    parameters: int
    inputs: int
    modules: tuple[Sums, ...]
    tree: tuple[Sums, ...]
    lines: tuple[LineSums, ...]
    items: tuple[Mapping[str, Any], ...]
    course: BytesOverStep

    @property
    def holders(self) -> list[Sums]:
        """The totals of each module with its submodules, if it saved anything."""
        return [sums for sums in self.tree if sums.bytes or sums.packed]


# -- as tables -----------------------------------------------------------------------------------


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


def sections(account: SavedAccount, most: int | None = MOST_ROWS) -> Iterator[TextTable]:
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
    several = _NOTE_FOLDED if any(fold.folded for fold, _ in folds) else ""
    yield TextTable(
        "by module", _BY_MODULE, tuple(map(_row, chosen)), _NOTE + several + _rest(left, "module")
    )
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
    folds = _FOLDING.each(known) if unfolded else _FOLDING.shown(known)
    return [(fold, _sum(fold)) for fold in folds]


def _figures(sums: Sums) -> tuple[int, ...]:
    return tuple(getattr(sums, name) for name in _FIGURES)


def _sum(fold: Fold[Sums]) -> Sums:
    """Return the sums over the modules of a fold; they are those of its only one, if it is one."""
    totals = (sum(column) for column in zip(*map(_figures, fold.members), strict=True))
    return replace(
        fold.members[0],
        path=fold.name if fold.folded else fold.members[0].path,
        **dict(zip(_FIGURES, totals, strict=True)),
    )


_FIGURES = [field.name for field in fields(Sums) if field.name != "path"]
_FOLDING = Folding[Sums](lambda sums: named(sums.path), lambda _: None, _figures)


def operations_table(operations: Sequence[Sums], most: int | None = MOST_ROWS) -> TextTable:
    """Return the table of tensors that were saved outside of modules, by the operations that need them."""
    chosen, left = _largest(operations, most)
    rows = tuple((str(sums.path), *_row(sums)[1:-1]) for sums in chosen)
    return TextTable(
        "by operation",
        ("operation", *_BY_MODULE[1:-1]),
        rows,
        _NOTE_OPERATIONS + _rest(left, "operation"),
    )


def _totals(account: SavedAccount) -> Iterator[tuple[str, str]]:
    total, course = account.total, account.course
    yield f"packed ({total.tensors:,} tensors, as often as saved)", sized(total.packed)
    yield "held (each storage once, no parameters)", sized(total.bytes)
    yield "inputs among those", sized(account.inputs)
    yield "can be rebuilt exactly", sized(total.rebuild)
    yield "can be moved", sized(total.offload)
    yield "freed by floats in bf16", sized(total.bf16)
    yield "freed by floats in int8", sized(total.int8)
    yield "parameters and buffers saved, in memory in any case", sized(account.parameters)
    if course.peak:
        yield "largest holder at the peak", named(course.holders[0][0]) if course.holders else "-"
        yield (
            f"peak (after {course.peak_at:,} of {course.at[-1]:,} saves and releases)",
            sized(course.peak),
        )


def _row(sums: Sums) -> tuple[str, ...]:
    freed = (sums.rebuild, sums.offload, sums.bf16, sums.int8, sums.checkpoint)
    figures = (
        sized(sums.packed),
        sized(sums.bytes),
        *(sized(size) if size else "-" for size in freed),
    )
    return (named(sums.path), f"{sums.tensors:,}", *figures)


def _line(sums: LineSums) -> tuple[str, ...]:
    text = sums.text or ""
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    figures = (sized(sums.packed), sized(sums.bytes), sized(sums.rebuild) if sums.rebuild else "-")
    return (sums.place, f"{sums.tensors:,}", *figures, text)


def _largest(rows: Sequence[Any], most: int | None) -> tuple[list[Any], int]:
    """Return the rows that hold most, in their order, and the number of the others."""
    held = [row for row in rows if row.bytes or row.packed]
    if most is None or len(held) <= most:
        return held, 0
    places = sorted(range(len(held)), key=lambda place: -held[place].bytes)[:most]
    return [held[place] for place in sorted(places)], len(held) - most


def _rest(left: int, noun: str) -> str:
    return f" {left:,} smaller {noun}{'s' if left != 1 else ''} left out." if left else ""


def named(path: str | None) -> str:
    """Return the name of a module in a table."""
    return "(outside of modules)" if path is None else path or "(the model)"
