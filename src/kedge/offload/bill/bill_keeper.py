"""The keeper of the bill: it records what autograd saves and when it releases it, and changes nothing."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.hooks.placing.module_calls import Span
from kedge.hooks.saved.checkpoint_inputs import owner_behind, saved_arguments, withheld
from kedge.hooks.saved.keeper import SavingPlace
from kedge.hooks.saved.pairs import packed_of
from kedge.hooks.saved.reference import KeptByReference
from kedge.offload.bill.program_lines import ProgramLines
from kedge.offload.bill.saved_tensor import Origin, SavedTensor, line_of
from kedge.offload.bill.storage_numbers import StorageNumbers, is_plain
from kedge.offload.bill.timeline import SaveTimeline
from kedge.offload.held.handle import HandleByReference
from kedge.offload.rebuild.failure import RuleFailed
from kedge.store.held_tensors import TensorKind
from kedge.torch_internals.autograd_nodes import behind, saved_by, sequence_number
from kedge.torch_internals.graph_task import current_node, in_backward
from kedge.torch_internals.storages import parts
from kedge.torch_internals.tensors import base_of, version_of

LEAST = 65_536
"""The bytes of the smallest storage that is worth moving."""

Find = Callable[[Tensor, Callable[[Any], Any]], Any]


class BilledReference(HandleByReference):
    """A tensor kept by reference, whose release is recorded when autograd drops it.

    Attributes:
        packed: The reference, which checks its version.
        number: The number of its save.
        keeper: The keeper that records its release.
        maker: Name and number of the node that made it; None for a leaf.
    """

    __slots__ = ("keeper", "maker", "number", "packed")

    def __init__(self, value: Tensor, number: int, keeper: BillKeeper) -> None:
        self.packed, self.number, self.keeper = KeptByReference(value), number, keeper
        super().__init__(self.packed)
        made_by = value.grad_fn
        self.maker = None if made_by is None else (made_by.name(), sequence_number(made_by))

    def __del__(self) -> None:
        """Record the release of the tensor."""
        self.keeper.timeline.released(self.number)


@dataclass(frozen=True)
class Origins:
    """The numbers of the storages that existed before the forward."""

    parameters: frozenset[int] = frozenset()
    buffers: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()

    def of(self, storages: Iterable[int]) -> Origin:
        """Return the origin of some storages."""
        known: list[tuple[Origin, frozenset[int]]] = [
            ("parameter", self.parameters),
            ("buffer", self.buffers),
            ("input", self.inputs),
        ]
        return next(
            (origin for origin, numbers in known if not numbers.isdisjoint(storages)), "made"
        )

    def of_draft(self, draft: SavedTensor) -> Origin:
        """Return the origin of a saved tensor's storages; that of a recomputed one is known when it is saved."""
        found = self.of(draft.storages)
        return draft.origin if found == "made" else found


class BillKeeper:
    """The keeper that keeps everything by reference, as autograd does, and records a description of it.

    Args:
        innermost: Returns the innermost active module call.
        find: Returns the recipe that could rebuild a tensor; None: recipes are not looked for.
        least: The bytes of the smallest storage that is worth moving.
        around: Returns the call around the innermost one; by default the innermost itself.

    Attributes:
        storages: The numbers of all storages.
        timeline: The saves and releases in their order.
    """

    sees_recompute = True

    def __init__(
        self,
        innermost: Callable[[], Span],
        storages: StorageNumbers,
        find: Find | None,
        least: int = LEAST,
        around: Callable[[], Span] | None = None,
    ) -> None:
        self.around = around or innermost
        self.innermost, self.find, self.least = innermost, find, least
        self.storages, self.timeline = storages, SaveTimeline()
        self.drafts: list[SavedTensor] = []
        self._known: set[int] = set()
        self._lines = ProgramLines()
        self._checkpoints: dict[int, weakref.ref[Any]] = {}

    def pack(self, value: Tensor, place: SavingPlace) -> BilledReference:
        """Record a tensor that autograd saves."""
        held = BilledReference(value, self._draft(value, self.innermost()), self)
        if place.recompute:  # of a reentrant checkpoint
            self._learn(held.number, origin="recomputed", movable=False)
        self.timeline.saved(held.number)
        return held

    def see(self, value: Tensor, place: SavingPlace) -> None:
        """Record a tensor that a checkpoint recomputes in backward, for as long as its storage exists.

        What was held before the recompute, such as the inputs of the block, is on the bill already.
        """
        if not place.recompute or not self._known.isdisjoint(self.storages.of(value)):
            return
        number = self._draft(value, self.innermost(), rebuild=False)
        self._learn(
            number, node="checkpoint", field="recomputed", origin="recomputed", movable=False
        )
        self.timeline.saved(number)
        for part in parts(value)[:1]:
            weakref.finalize(part.untyped_storage(), self.timeline.released, number).atexit = False

    def outlived(self) -> frozenset[int]:
        """Return the recomputed tensors that are still there: the program holds them, and not autograd."""
        return frozenset(n for n in self.timeline.alive() if self.drafts[n].origin == "recomputed")

    def beside(self, owner: Any, place: object = None) -> None:  # noqa: ARG002
        """Record the tensors that a checkpoint holds without saving them, given its frame or context; once for each."""
        known = self._checkpoints.get(id(owner))
        if known is not None and known() is owner:
            return
        for name, packed in saved_arguments(owner):
            if isinstance(packed, BilledReference) and packed.keeper is self:
                self._learn(packed.number, node="checkpoint", field=name)
        numbers = []
        for name, value in withheld(owner):
            numbers.append(self._draft(value, self.around()))
            self._learn(numbers[-1], node="checkpoint", field=name)
            self.timeline.saved(numbers[-1])
        timeline = self.timeline

        def gone(_: object) -> None:
            for number in numbers:
                timeline.released(number)

        self._checkpoints[id(owner)] = weakref.ref(owner, gone)

    def _draft(self, value: Tensor, span: Span, *, rebuild: bool = True) -> int:
        """Record the description of a tensor that is held from now on; returns its number."""
        storages, plain = self.storages.of(value), is_plain(value)
        held = self.storages.held(storages)
        size = value.numel() * value.element_size() if value.layout == torch.strided else held
        draft = SavedTensor(
            len(self.drafts), *span, shape=tuple(value.shape), dtype=value.dtype, device=value.device, bytes=size,
            storages=storages, held=held, version=max(0, version_of(value)), movable=plain,
            alias=base_of(value) is not None or size < held, source=self._lines.here(),
        )  # fmt: skip
        if self.find is not None and plain and rebuild:
            with suppress(RuleFailed):  # then offload moves or keeps it, as without a rule
                recipe = self.find(value, _held_in)
                if recipe is not None:
                    draft = replace(draft, rule=recipe.rule, extra=recipe.nbytes)
        self.drafts.append(draft)
        self._known.update(storages)
        return draft.number

    def _learn(self, number: int, **known: Any) -> None:
        """Update the description of a tensor."""
        self.drafts[number] = replace(self.drafts[number], **known)

    def unpack(self, held: BilledReference) -> Tensor:
        """Return the tensor; in a backward pass, the running node is the one that saved it, and is recorded."""
        if self.drafts[held.number].node is None and in_backward():
            node = current_node()
            if node is not None:
                self.record_node(node)
        return held.read()

    def record_node(self, node: Node) -> None:
        """Record a node as the one that needs the tensors that it saved."""
        for field, saved in saved_by(node):
            packed = packed_of(saved.data)
            if isinstance(packed, BilledReference) and packed.keeper is self:
                output = packed.maker == (node.name(), sequence_number(node)) or field.startswith(
                    "result"
                )
                self._learn(packed.number, node=node.name(), field=field, output=output)

    def walk(self, made: Iterable[Tensor]) -> None:
        """Record every node behind some results, and every checkpoint."""
        for node in behind(tensor.grad_fn for tensor in made):
            self.record_node(node)
            if (owner := owner_behind(node)) is not None:
                self.beside(owner)

    def items(self, numbers: Iterable[int], origins: Origins) -> tuple[SavedTensor, ...]:
        """Return the descriptions of some saves, with origins and shared storages."""
        chosen = [self.drafts[number] for number in numbers]
        sharers: dict[int, set[int]] = {}
        for draft in chosen:
            for storage in draft.storages:
                sharers.setdefault(storage, set()).add(draft.number)
        return tuple(self._item(draft, origins, sharers) for draft in chosen)

    def kind(self, number: int, origins: Origins) -> TensorKind:
        """Return what a save shares with alike ones."""
        draft = self.drafts[number]
        dtype = str(draft.dtype).removeprefix("torch.")
        origin = origins.of_draft(draft)
        return TensorKind(
            draft.path, draft.node, draft.field, draft.shape, dtype, origin, line_of(draft)
        )

    def _item(
        self, draft: SavedTensor, origins: Origins, sharers: dict[int, set[int]]
    ) -> SavedTensor:
        origin = origins.of_draft(draft)
        others = set().union(*(sharers[storage] for storage in draft.storages)) - {draft.number}
        movable = draft.movable and origin == "made" and draft.held >= self.least
        return replace(draft, origin=origin, shared=tuple(sorted(others)), movable=movable)


def _held_in(saved: Any) -> Any:
    """Return the handle behind a node's saved tensor; None if it is not a `BilledReference`."""
    packed = packed_of(saved.data)
    return packed if isinstance(packed, BilledReference) else None
