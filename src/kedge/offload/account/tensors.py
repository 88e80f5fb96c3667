"""The tensors that autograd held for backward, one by one and added up, without a reference to them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from kedge import notebook
from kedge.frames import SourceLine
from kedge.report.memory.picture import StepMemory
from kedge.store.saved_account import BytesOverStep, LineSums, SavedAccount, Sums
from kedge.store.saved_tables import WORDS, TextTable, operations_table, sections

MOST_ITEMS = 20
MOST_LINES = 50
UNKNOWN = "(unknown)"
_NOTHING = (
    "autograd saved nothing: none of the operations needs a tensor for its backward, "
    "none of their inputs requires grad, or they ran under torch.no_grad"
)
_GRADIENTS_WERE_OFF = (
    "Gradients are off where kedge.saved was called, so a call there saves none of this: "
    "these are the tensors of a call with gradients on."
)

Origin = Literal["parameter", "buffer", "input", "made", "recomputed"]

_BLOCK = 256
"""The numbers that share a scale in 8 bits."""
_SCALE = 4
"""The bytes of that scale."""


@dataclass(frozen=True)
class SavedTensor:
    """One save of a tensor; a tensor that is saved several times has several.

    Attributes:
        number: The number of the save, from 0.
        path: The innermost module that was running; None outside of all.
        call: The number of that module's call in this forward, from 0.
        node: The autograd node that needs it; None if unknown.
        field: The node's name for it, such as ``"self"`` or ``"result"``.
        shape: Its shape.
        dtype: Its dtype.
        device: Its device.
        bytes: Its own bytes, as if it were contiguous.
        storages: The numbers of its storages in this account: one, unless it consists of several
            tensors.
        held: The bytes of these storages, of which it may be a part.
        version: Its version when it was saved: the number of changes in place before.
        origin: The origin of its storage: a parameter, a buffer, an input of the model, made in the
            forward, or recomputed by a checkpoint in backward.
        alias: Whether it is a view of another tensor, or of a part of its storage.
        output: Whether the node that needs it also made it.
        shared: The numbers of the other saves on its storage.
        source: The line of the program that saved it.
        rule: The rule that can rebuild it; None if there is none.
        extra: The bytes to keep for rebuilding it.
        movable: Whether `kedge.offload` could move it.
    """

    number: int
    path: str | None
    call: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    bytes: int
    storages: tuple[int, ...]
    held: int
    version: int
    alias: bool
    source: SourceLine | None
    node: str | None = None
    field: str | None = None
    origin: Origin = "made"
    output: bool = False
    shared: tuple[int, ...] = ()
    rule: str | None = None
    extra: int = 0
    movable: bool = False

    @property
    def storage(self) -> int | None:
        """The number of its storage, the first one of several; None without a storage."""
        return next(iter(self.storages), None)

    @property
    def line(self) -> str | None:
        """The file and line of the program that saved it; None if none was running."""
        if self.source is None:
            return None
        return f"{self.source.file}:{self.source.line}"

    @property
    def counts(self) -> bool:
        """Whether its storage is held only for backward, unlike that of a parameter or a buffer."""
        return self.origin in ("input", "made", "recomputed")

    @property
    def rebuild(self) -> int:
        """The bytes that rebuilding it frees."""
        if self.rule is None or not self.counts:
            return 0
        return max(self.held - self.extra, 0)

    @property
    def offload(self) -> int:
        """The bytes that moving it frees."""
        return self.held if self.movable else 0

    def compressed(self, bits: Literal[8, 16]) -> int:
        """Return the bytes that storing it in floats of so many bits frees."""
        itemsize = self.dtype.itemsize
        if not self.movable or not self.dtype.is_floating_point or itemsize * 8 <= bits:
            return 0

        numbers = self.held // itemsize
        coded = numbers * (bits // 8)
        if bits == 8:
            coded += math.ceil(numbers / _BLOCK) * _SCALE
        return max(self.held - coded, 0)

    def entry(self) -> dict[str, Any]:
        """Return the description as a recording stores it."""
        return {
            "path": self.path,
            "call": self.call,
            "node": self.node,
            "field": self.field,
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "bytes": self.bytes,
            "storage": self.storage,
            "held": self.held,
            "origin": self.origin,
            "alias": self.alias,
            "output": self.output,
            "shared": len(self.shared),
            "line": self.line,
            "rule": self.rule,
            "movable": self.movable,
        }


class SavedTensors(notebook.Printed):
    """The tensors that autograd held for backward, one by one and added up.

    ``print`` shows the tables. No reference to the model or to its tensors is held.

    Args:
        items: The tensors.
        given: The inputs of each module: the numbers of their storages, by its path.
        sizes: The bytes of each storage, by its number.
        followed: The bytes held over time.
        roots: The path of each model, with which the paths of its modules begin.

    Attributes:
        items: The tensors, in the order in which they were saved.
        timeline: The bytes held after each save and, if a backward was run, after each release.
        gradients_were_off: Whether gradients were off, and switched on for the recorded call.
    """

    def __init__(
        self,
        items: Sequence[SavedTensor],
        given: Mapping[str, frozenset[int]],
        sizes: Sequence[int],
        followed: BytesOverStep,
        roots: Sequence[str] = ("",),
    ) -> None:
        self.items = tuple(items)
        self.timeline = followed
        self.gradients_were_off = False
        self._given = given
        self._sizes = sizes
        self._roots = roots
        self._charged = _charged(self.items, sizes)

    @property
    def total(self) -> Sums:
        """The sums of all tensors."""
        return self._sums(None, self.items)

    @property
    def parameters(self) -> int:
        """Bytes of saved parameters and buffers, each storage once; in memory in any case."""
        storages: set[int] = set()
        for item in self.items:
            if not item.counts:
                storages.update(item.storages)
        return self._bytes(storages)

    @property
    def inputs(self) -> int:
        """Bytes of saved inputs of the model, each storage once."""
        return sum(item.held for item in self._charged.values() if item.origin == "input")

    def by_module(self, *, inner: bool = False) -> tuple[Sums, ...]:
        """Return the sums by module, in the order of the data.

        Args:
            inner: Whether a module counts with all modules in it, as it does if they are
                checkpointed together; otherwise each tensor counts only for the innermost module
                that was running.
        """
        if inner:
            return tuple(self._tree())
        own: dict[str | None, list[SavedTensor]] = {}
        for item in self.items:
            own.setdefault(item.path, []).append(item)
        return tuple(self._sums(path, items) for path, items in own.items())

    def by_line(self) -> tuple[LineSums, ...]:
        """Return the sums by the running line of the program, the largest first."""
        saved_by: dict[str | None, list[SavedTensor]] = {}
        for item in self.items:
            saved_by.setdefault(item.line, []).append(item)

        lines = []
        for items in saved_by.values():
            line = LineSums()
            source = items[0].source
            if source is not None:
                line = LineSums(source.file, source.line, source.function, source.text)

            sums = self._sums(None, items)
            line = replace(
                line,
                tensors=sums.tensors,
                packed=sums.packed,
                bytes=sums.bytes,
                rebuild=sums.rebuild,
            )
            lines.append(line)

        return tuple(sorted(lines, key=lambda line: -line.bytes))

    def by_operation(self) -> tuple[Sums, ...]:
        """Return the sums by the operation that needs the tensors and its name for them.

        They are in the order of the data. The path of each is PyTorch's name of the node, and in
        brackets that of the tensor: ``ExpBackward0 (result)``.
        """
        needed: dict[str, list[SavedTensor]] = {}
        for item in self.items:
            name = UNKNOWN
            if item.node:
                name = f"{item.node} ({item.field})"
            needed.setdefault(name, []).append(item)
        return tuple(self._sums(name, items) for name, items in needed.items())

    def account(self) -> SavedAccount:
        """Return all sums, and the largest tensors."""
        counted = [item for item in self._charged.values() if item.counts]
        counted.sort(key=lambda item: -item.held)
        modules = [sums for sums in self.by_module() if sums.bytes]
        largest = [item.entry() for item in counted[:MOST_ITEMS]]
        return SavedAccount(
            total=self.total,
            parameters=self.parameters,
            inputs=self.inputs,
            modules=tuple(modules),
            tree=self.by_module(inner=True),
            lines=self.by_line()[:MOST_LINES],
            items=tuple(largest),
            course=self.timeline,
        )

    def flame(self) -> StepMemory:
        """Return the memory over the call as a picture.

        It has a timeline, and a flame graph of modules, operations and tensors. A notebook shows
        it; ``print`` draws it as text, and its ``save("memory.html")`` writes a page.
        """
        return StepMemory(self.timeline, self.parameters)

    def __str__(self) -> str:
        """The tables as text."""
        tables = ["\n".join(_aligned(section)) for section in _tables(self)]
        return "\n\n".join(tables) or _NOTHING

    def _repr_html_(self) -> str:
        """The tables for a notebook."""
        return "".join(map(_table, _tables(self))) or notebook.paragraph(_NOTHING)

    def _sums(self, path: str | None, items: Sequence[SavedTensor]) -> Sums:
        own = [self._charged[item.number] for item in items if item.number in self._charged]
        return Sums(
            path=path,
            tensors=len(items),
            packed=sum(item.bytes for item in items),
            bytes=sum(item.held for item in own),
            rebuild=sum(item.rebuild for item in own),
            offload=sum(item.offload for item in own),
            bf16=sum(item.compressed(16) for item in own),
            int8=sum(item.compressed(8) for item in own),
        )

    def _tree(self) -> Iterator[Sums]:
        """Yield the sums of each module with the modules in it, a module before its inner ones."""
        inside: dict[str | None, list[SavedTensor]] = {}
        for item in self.items:
            for path in _holders(item.path, self._roots):
                inside.setdefault(path, []).append(item)

        def place(path: str | None) -> tuple[int, int]:
            return inside[path][0].number, len(path or "")

        for path in sorted(inside, key=place):
            items = inside[path]
            sums = self._sums(path, items)
            # A list of modules is not called, and was given nothing.
            if path is not None and path in self._given and path not in self._roots:
                sums = replace(sums, checkpoint=self._checkpoint(path, items))
            yield sums

    def _checkpoint(self, path: str, items: Sequence[SavedTensor]) -> int:
        """Return the bytes that a checkpoint around a module frees; see Note [What a remedy frees]."""
        inside = {item.number for item in items}
        given = self._given[path]
        freed: set[int] = set()
        for item in items:
            if item.origin == "made" and inside.issuperset(item.shared):
                freed.update(item.storages)

        held: set[int] = set()
        for item in self.items:
            held.update(item.storages)
        return max(self._bytes(freed - given) - self._bytes(given - held), 0)

    def _bytes(self, storages: Iterable[int]) -> int:
        return sum(self._sizes[storage] for storage in storages)


def _tables(saved: SavedTensors) -> Iterator[TextTable]:
    """Yield the tables: by module, or by operation if no module was running."""
    if not saved.items:
        return
    totals, modules, lines = sections(saved.account())
    if saved.gradients_were_off:
        totals = replace(totals, note=_GRADIENTS_WERE_OFF)
    if all(item.path is None for item in saved.items):
        modules = operations_table(saved.by_operation())
    yield from (totals, modules, lines)


def _charged(items: Sequence[SavedTensor], sizes: Sequence[int]) -> dict[int, SavedTensor]:
    """Return the items charged for storages.

    Each storage is charged for its first item, with the first rule that rebuilds one on it.

    Returns:
        The items that bear a storage, by their numbers, each with the bytes of its storages.
    """
    bearers: dict[int, SavedTensor] = {}
    rules: dict[int, tuple[str, int]] = {}
    for item in items:
        if not item.counts:
            continue
        for storage in item.storages:
            bearers.setdefault(storage, item)
            if item.rule is not None:
                rules.setdefault(storage, (item.rule, item.extra))

    borne: dict[int, list[int]] = {}
    for storage, item in bearers.items():
        borne.setdefault(item.number, []).append(storage)

    charged = {}
    for item in items:
        own = borne.get(item.number)
        if own:
            rule, extra = rules.get(own[0], (None, 0))
            held = sum(sizes[storage] for storage in own)
            charged[item.number] = replace(item, held=held, rule=rule, extra=extra)
    return charged


def _holders(path: str | None, roots: Sequence[str]) -> list[str | None]:
    """Return a path and the paths of all modules around it, the model's own among them."""
    if path is None:
        return [None]
    paths: list[str | None] = [""]
    if path:
        names = path.split(".")
        paths += [".".join(names[:end]) for end in range(1, len(names) + 1)]

    begins = [at for at, each in enumerate(paths) if each in roots]
    if begins:
        return paths[begins[-1] :]
    return paths


def _aligned(section: TextTable) -> Iterator[str]:
    """The lines of a table in plain text."""
    lines: list[tuple[str, ...]] = [section.columns, *section.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
        cells[0] = line[0].ljust(widths[0])
        if section.columns[-1] == WORDS:
            cells[-1] = line[-1]
        yield "  ".join(cells).rstrip()
    if section.note:
        yield section.note.strip()


def _table(section: TextTable) -> str:
    """Return a table as HTML."""
    figures = len(section.columns) - 1 - (section.columns[-1] == WORDS)
    align = ("m" + "r" * figures).ljust(len(section.columns), "m")
    return notebook.table(
        section.columns, section.rows, title=section.title, note=section.note.strip(), align=align
    )
