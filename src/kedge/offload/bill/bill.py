"""The bill: the modules and lines that hold memory for backward, and the remedies that would free it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from kedge import notebook
from kedge.offload.bill.bill_keeper import BillKeeper, Origins
from kedge.offload.bill.held_spans import held_spans
from kedge.offload.bill.saved_tensor import SavedTensor
from kedge.offload.bill.timeline import course
from kedge.report.memory.picture import StepMemory
from kedge.store.saved_account import (
    WORDS,
    BytesOverStep,
    LineSums,
    SavedAccount,
    Sums,
    TextTable,
    operations_table,
    sections,
)

MOST_ITEMS, MOST_LINES = 20, 50
UNKNOWN = "(unknown)"
_NOTHING = (
    "autograd saved nothing: none of the operations needs a tensor for its backward, none of their "
    "inputs requires grad, or they ran under torch.no_grad"
)
_GRADIENTS_WERE_OFF = (
    "Gradients are off where kedge.saved was called, so a call there saves none of this: these are the tensors of a call "
    "with gradients on."
)
Given = Mapping[str, Iterable[int]]


class Bill(notebook.Printed):
    """The tensors that autograd held for backward, one by one and added up.

    ``print(bill)`` prints the tables. The bill holds no reference to the model or to its tensors.

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
        given: Given,
        sizes: Sequence[int],
        followed: BytesOverStep,
        roots: Sequence[str] = ("",),
    ) -> None:
        self.items, self.timeline, self._roots = tuple(items), followed, roots
        self.gradients_were_off = False
        self._given, self._sizes = given, sizes
        self._charged = _charged(self.items, sizes)

    @property
    def total(self) -> Sums:
        """The sums of all tensors."""
        return self._sums(None, self.items)

    @property
    def parameters(self) -> int:
        """Bytes of saved parameters and buffers, each storage once; in memory in any case."""
        known = {storage for item in self.items if not item.counts for storage in item.storages}
        return sum(self._sizes[storage] for storage in known)

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
        if not inner:
            own: dict[str | None, list[SavedTensor]] = {}
            for item in self.items:
                own.setdefault(item.path, []).append(item)
            return tuple(self._sums(path, items) for path, items in own.items())
        return tuple(self._tree())

    def by_line(self) -> tuple[LineSums, ...]:
        """Return the sums by the running line of the program, the largest first."""
        lines: dict[tuple[str, int] | None, list[SavedTensor]] = {}
        for item in self.items:
            lines.setdefault(
                None if item.source is None else (item.source.file, item.source.line), []
            ).append(item)
        return tuple(sorted(map(self._line, lines.values()), key=lambda line: -line.bytes))

    def by_operation(self) -> tuple[Sums, ...]:
        """Return the sums by the operation that needs the tensors and its name for them, in the order of the data.

        The path of each is PyTorch's name of the node, and in brackets that of the tensor:
        ``ExpBackward0 (result)``.
        """
        needed: dict[str, list[SavedTensor]] = {}
        for item in self.items:
            needed.setdefault(f"{item.node} ({item.field})" if item.node else UNKNOWN, []).append(
                item
            )
        return tuple(self._sums(name, items) for name, items in needed.items())

    def account(self) -> SavedAccount:
        """Return all sums, and the largest tensors."""
        largest = sorted(
            (item for item in self._charged.values() if item.counts), key=lambda item: -item.held
        )
        return SavedAccount(
            total=self.total,
            parameters=self.parameters,
            inputs=self.inputs,
            modules=tuple(sums for sums in self.by_module() if sums.bytes),
            tree=self.by_module(inner=True),
            lines=self.by_line()[:MOST_LINES],
            items=tuple(item.entry() for item in largest[:MOST_ITEMS]),
            course=self.timeline,
        )

    def flame(self) -> StepMemory:
        """Return the memory over the call as a picture: a timeline, and a flame graph of modules, operations and tensors.

        A notebook shows it; ``print`` draws it as text, and its ``save("memory.html")`` writes a
        page.
        """
        return StepMemory(self.timeline, self.parameters)

    def __str__(self) -> str:
        """The tables as text."""
        return "\n\n".join("\n".join(_aligned(section)) for section in _tables(self)) or _NOTHING

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

    def _line(self, items: Sequence[SavedTensor]) -> LineSums:
        source, sums = items[0].source, self._sums(None, items)
        known = (
            LineSums()
            if source is None
            else LineSums(source.file, source.line, source.function, source.text)
        )
        return replace(
            known, tensors=sums.tensors, packed=sums.packed, bytes=sums.bytes, rebuild=sums.rebuild
        )

    def _tree(self) -> Iterator[Sums]:
        """The sums of each module with the modules in it; a module comes before its inner modules."""
        inside: dict[str | None, list[SavedTensor]] = {}
        for item in self.items:
            for path in _holders(item.path, self._roots):
                inside.setdefault(path, []).append(item)
        for path, items in sorted(
            inside.items(), key=lambda pair: (pair[1][0].number, len(pair[0] or ""))
        ):
            sums = self._sums(path, items)
            never = (
                path is None or path in self._roots or path not in self._given
            )  # a list of modules is not called
            yield sums if never else replace(sums, checkpoint=self._checkpoint(str(path), items))

    def _checkpoint(self, path: str, items: Sequence[SavedTensor]) -> int:
        """Return the bytes that a checkpoint around a module frees; see Note [What a remedy frees]."""
        inside, given = {item.number for item in items}, set(self._given[path])
        made = {s: item for item in items if item.origin == "made" for s in item.storages}
        mine = {s for s, item in made.items() if inside.issuperset(item.shared)}
        held = {storage for item in self.items for storage in item.storages}
        newly = given - held
        return max(
            sum(self._sizes[s] for s in mine - given) - sum(self._sizes[s] for s in newly), 0
        )


def bill_of(
    keeper: BillKeeper,
    given: Given,
    origins: Origins,
    moment: int | None,
    roots: Sequence[str] = ("",),
) -> Bill:
    """Return the bill of a keeper's records.

    Args:
        keeper: The keeper.
        given: The storage numbers of each module's inputs.
        origins: The storages that existed before the forward.
        moment: The number of saves and releases after which to draw up the bill; None for the peak.
        roots: The path of each model, with which the paths of its modules begin.
    """
    resident = origins.parameters | origins.buffers
    sizes, outlived = keeper.storages.sizes, keeper.outlived()

    def counted(number: int) -> list[tuple[int, int]]:
        if number in outlived:
            return []
        return [(s, sizes[s]) for s in keeper.drafts[number].storages if s not in resident]

    def at(after: int) -> Bill:
        return Bill(
            keeper.items(keeper.timeline.alive(after), origins), given, sizes, BytesOverStep()
        )

    def holders(after: int) -> list[tuple[str | None, int]]:
        held = [(sums.path, sums.bytes) for sums in at(after).by_module() if sums.bytes]
        return sorted(held, key=lambda pair: -pair[1])[:MOST_ITEMS]

    there = resident | origins.inputs
    given = {path: frozenset(numbers) - there for path, numbers in given.items()}
    events = keeper.timeline.events
    followed = course(events, counted, holders)

    followed = replace(
        followed,
        seconds=keeper.timeline.seconds(followed.at),
        tensors=held_spans(events, counted, partial(keeper.kind, origins=origins), followed.at),
    )
    found = keeper.items(
        keeper.timeline.alive(followed.peak_at if moment is None else moment), origins
    )
    return Bill(found, given, list(sizes), followed, roots)


def _tables(bill: Bill) -> Iterator[TextTable]:
    """The tables: by module, or by operation if no module was running; none if nothing was saved."""
    totals, modules, lines = sections(bill.account())
    if bill.gradients_were_off:
        totals = replace(totals, note=_GRADIENTS_WERE_OFF)
    if bill.items:
        outside = all(item.path is None for item in bill.items)
        yield from (totals, operations_table(bill.by_operation()) if outside else modules, lines)


def _charged(items: Sequence[SavedTensor], sizes: Sequence[int]) -> dict[int, SavedTensor]:
    """Return the items charged for storages: each storage for its first item, with the first rule that rebuilds one on it.

    Returns:
        The items that bear a storage, by their numbers, each with the bytes of its storages.
    """
    bearers: dict[int, SavedTensor] = {}
    rules: dict[int, tuple[str, int]] = {}
    for item in items:
        for storage in item.storages if item.counts else ():
            bearers.setdefault(storage, item)
            if item.rule is not None:
                rules.setdefault(storage, (item.rule, item.extra))
    borne: dict[int, list[int]] = {}
    for storage, item in bearers.items():
        borne.setdefault(item.number, []).append(storage)
    charged = {}
    for item in items:
        if own := borne.get(item.number):
            rule, extra = rules.get(own[0], (None, 0))
            charged[item.number] = replace(
                item, held=sum(sizes[s] for s in own), rule=rule, extra=extra
            )
    return charged


def _holders(path: str | None, roots: Sequence[str]) -> list[str | None]:
    """Return a path and the paths of all modules around it, the model's own among them."""
    if path is None:
        return [None]
    names = path.split(".") if path else []
    paths = ["", *(".".join(names[: end + 1]) for end in range(len(names)))]
    begins = [at for at, each in enumerate(paths) if each in roots]
    return [*paths[begins[-1] if begins else 0 :]]


def _aligned(section: TextTable) -> Iterator[str]:
    """The lines of a table in plain text."""
    lines: list[tuple[str, ...]] = [section.columns, *section.rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(section.columns))]
    for line in lines:
        cells = [
            line[0].ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ]
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
