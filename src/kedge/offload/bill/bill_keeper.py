"""Notes what autograd saves and when it lets go of it, and changes nothing about it."""

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
from kedge.hooks.saved.pairs import packed_of
from kedge.hooks.saved.reference import KeptByReference
from kedge.offload.bill.program_lines import ProgramLines
from kedge.offload.bill.saved_tensor import Origin, SavedTensor
from kedge.offload.bill.storage_numbers import StorageNumbers, is_plain
from kedge.offload.bill.timeline import SaveTimeline
from kedge.offload.held.handle import HandleByReference
from kedge.offload.rebuild.failure import RuleFailed
from kedge.torch_internals.autograd_nodes import behind, saved_by, sequence_number
from kedge.torch_internals.graph_task import current_node, in_backward
from kedge.torch_internals.tensors import base_of, version_of

LEAST = 65_536
"""Tensors in smaller storages than this are not worth moving."""

Find = Callable[[Tensor, Callable[[Any], Any]], Any]


class BilledReference(HandleByReference):
    """A tensor kept by reference, whose release is noted when autograd lets go of it.

    Attributes:
        packed: What keeps it and checks its version.
        number: Which save it was.
        keeper: The keeper that notes its release.
        maker: Name and number of the node that made it; None for a leaf.
    """

    __slots__ = ("keeper", "maker", "number", "packed")

    def __init__(self, value: Tensor, number: int, keeper: BillKeeper) -> None:
        self.packed, self.number, self.keeper = KeptByReference(value), number, keeper
        super().__init__(self.packed)
        made_by = value.grad_fn
        self.maker = None if made_by is None else (made_by.name(), sequence_number(made_by))

    def __del__(self) -> None:
        """Note that it is not needed any more."""
        self.keeper.timeline.released(self.number)


@dataclass(frozen=True)
class Origins:
    """The numbers of the storages that were there before the forward."""

    parameters: frozenset[int] = frozenset()
    buffers: frozenset[int] = frozenset()
    inputs: frozenset[int] = frozenset()

    def of(self, storages: Iterable[int]) -> Origin:
        """Return where some storages come from."""
        known: list[tuple[Origin, frozenset[int]]] = [
            ("parameter", self.parameters),
            ("buffer", self.buffers),
            ("input", self.inputs),
        ]
        return next((origin for origin, numbers in known if not numbers.isdisjoint(storages)), "made")


class BillKeeper:
    """The keeper that keeps everything by reference, as autograd does, and notes what it is.

    Args:
        innermost: Returns which call of which module is running.
        find: Finds out how a tensor could be rebuilt; None where that is not asked.
        least: The bytes of the smallest storage that is worth moving.
        around: Returns which call has called that one; by default the same.

    Attributes:
        storages: The numbers of all storages.
        timeline: When what was saved and released.
    """

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
        self._lines = ProgramLines()
        self._checkpoints: dict[int, weakref.ref[Any]] = {}

    def pack(self, value: Tensor, place: object = None) -> BilledReference:  # noqa: ARG002 - the spans say where it is
        """Note a tensor that autograd saves."""
        held = BilledReference(value, self._draft(value, self.innermost()), self)
        self.timeline.saved(held.number)
        return held

    def beside(self, owner: Any, place: object = None) -> None:  # noqa: ARG002
        """Note what a checkpoint holds without saving it, given its frame or context; once for each."""
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

    def _draft(self, value: Tensor, span: Span) -> int:
        """Describe a tensor that is held from now on; returns its number."""
        storages, plain = self.storages.of(value), is_plain(value)
        held = self.storages.held(storages)
        size = value.numel() * value.element_size() if value.layout == torch.strided else held
        draft = SavedTensor(
            len(self.drafts), *span, shape=tuple(value.shape), dtype=value.dtype, device=value.device, bytes=size,
            storages=storages, held=held, version=max(0, version_of(value)), movable=plain,
            alias=base_of(value) is not None or size < held, source=self._lines.here(),
        )  # fmt: skip
        if self.find is not None and plain:
            with suppress(RuleFailed):  # then it is moved or kept, as without a rule
                recipe = self.find(value, _held_in)
                if recipe is not None:
                    draft = replace(draft, rule=recipe.rule, extra=recipe.nbytes)
        self.drafts.append(draft)
        return draft.number

    def _learn(self, number: int, **known: Any) -> None:
        """Complete the description of a tensor."""
        self.drafts[number] = replace(self.drafts[number], **known)

    def unpack(self, held: BilledReference) -> Tensor:
        """Return it; in a backward pass, the node that runs is the one that saved it."""
        if self.drafts[held.number].node is None and in_backward():
            node = current_node()
            if node is not None:
                self.meet(node)
        return held.read()

    def meet(self, node: Node) -> None:
        """Note for which tensors a node is the one that needs them."""
        for field, saved in saved_by(node):
            packed = packed_of(saved.data)
            if isinstance(packed, BilledReference) and packed.keeper is self:
                output = packed.maker == (node.name(), sequence_number(node)) or field.startswith("result")
                self._learn(packed.number, node=node.name(), field=field, output=output)

    def walk(self, made: Iterable[Tensor]) -> None:
        """Note every node behind some results, and every checkpoint."""
        for node in behind(tensor.grad_fn for tensor in made):
            self.meet(node)
            if (owner := owner_behind(node)) is not None:
                self.beside(owner)

    def items(self, numbers: Iterable[int], origins: Origins) -> tuple[SavedTensor, ...]:
        """Describe some of what was saved."""
        chosen = [self.drafts[number] for number in numbers]
        sharers: dict[int, set[int]] = {}
        for draft in chosen:
            for storage in draft.storages:
                sharers.setdefault(storage, set()).add(draft.number)
        return tuple(self._item(draft, origins, sharers) for draft in chosen)

    def _item(self, draft: SavedTensor, origins: Origins, sharers: dict[int, set[int]]) -> SavedTensor:
        origin = origins.of(draft.storages)
        others = set().union(*(sharers[storage] for storage in draft.storages)) - {draft.number}
        movable = draft.movable and origin == "made" and draft.held >= self.least
        return replace(draft, origin=origin, shared=tuple(sorted(others)), movable=movable)


def _held_in(saved: Any) -> Any:
    """Return the handle in what a node saved, if it is one of this keeper's kind."""
    packed = packed_of(saved.data)
    return packed if isinstance(packed, BilledReference) else None
