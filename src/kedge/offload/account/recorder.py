"""The recorder of saved tensors: it notes what autograd saves and when it releases it, and changes nothing."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.nn import Parameter
from torch.nn.parameter import is_lazy

from kedge.frames import SourceLine, is_between
from kedge.hooks.placing.module_calls import ModuleCalls
from kedge.hooks.saved.checkpoint_inputs import owner_behind, saved_arguments, withheld
from kedge.hooks.saved.keeper import SavingPlace
from kedge.hooks.saved.pairs import packed_of
from kedge.hooks.saved.reference import KeptByReference
from kedge.offload.account.over_step import SaveTimeline, over_step
from kedge.offload.account.tensors import Origin, SavedTensor, SavedTensors
from kedge.offload.held.handle import HandleByReference
from kedge.offload.rebuild.failure import RuleFailed
from kedge.stderr import Shield
from kedge.store.held_tensors import TensorKind
from kedge.torch_internals.autograd_nodes import behind, saved_by, sequence_number
from kedge.torch_internals.graph_task import current_node, in_backward
from kedge.torch_internals.source_lines import source_of
from kedge.torch_internals.storages import parts
from kedge.torch_internals.tensors import base_of, version_of

LEAST = 65_536
"""The bytes of the smallest storage that is worth moving."""

Find = Callable[[Tensor, Callable[[Any], Any]], Any]


class StorageNumbers:
    """The numbers of storages in the order of their first use; keeps no storage alive.

    All tensors that share a storage have the same number, and none is used again.

    Attributes:
        sizes: The bytes of each, by its number.
    """

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self._numbers: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()

    def of(self, tensor: Tensor) -> tuple[int, ...]:
        """Return the numbers of a tensor's storages.

        It has one, several if it consists of several tensors, or none.
        """
        return tuple(self._number(part.untyped_storage()) for part in parts(tensor))

    def of_all(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Return the numbers of the storages of several tensors; a lazy parameter has none yet."""
        numbers: set[int] = set()
        for tensor in tensors:
            if not is_lazy(tensor):
                numbers.update(self.of(tensor))
        return frozenset(numbers)

    def _number(self, storage: torch.UntypedStorage) -> int:
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers[storage] = len(self.sizes)
            self.sizes.append(storage.nbytes())
        return number


class RecordedReference(HandleByReference):
    """A tensor kept by reference, whose release is recorded when autograd drops it.

    Attributes:
        packed: The reference, which checks its version.
        number: The number of its save.
        recorder: The recorder of its release.
        maker: Name and number of the node that made it; None for a leaf.
    """

    __slots__ = ("maker", "number", "packed", "recorder")

    def __init__(self, value: Tensor, number: int, recorder: SaveRecorder) -> None:
        self.packed = KeptByReference(value)
        super().__init__(self.packed)
        self.number = number
        self.recorder = recorder
        made_by = value.grad_fn
        self.maker: tuple[str, int] | None = None
        if made_by is not None:
            self.maker = made_by.name(), sequence_number(made_by)

    def __del__(self) -> None:
        """Record the release of the tensor."""
        self.recorder.timeline.released(self.number)


class SaveRecorder:
    """The keeper that keeps everything by reference, as autograd does, and records a description of it.

    Args:
        find: Returns the recipe that could rebuild a tensor.
        least: The bytes of the smallest storage that is worth moving.
        shield: Runs what follows the calls of modules; None: without one.

    Attributes:
        calls: The calls of the modules that save, to which models are added.
        timeline: The saves and releases in their order.
        drafts: The description of each save, as far as it is known.
    """

    sees_recompute = True

    def __init__(self, find: Find, least: int = LEAST, shield: Shield | None = None) -> None:
        self._storages = StorageNumbers()
        self.calls = ModuleCalls(self._storages.of, shield=shield)
        self.timeline = SaveTimeline()
        self.drafts: list[SavedTensor] = []
        self._find = find
        self._least = least
        self._parameters: frozenset[int] = frozenset()
        self._buffers: frozenset[int] = frozenset()
        self._inputs: frozenset[int] = frozenset()
        self._known: set[int] = set()
        self._lines: dict[tuple[str, str, int | None], SourceLine] = {}
        self._checkpoints: dict[int, weakref.ref[Any]] = {}

    # -- what existed before the forward ---------------------------------------------------------

    def own(self, parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> None:
        """Add parameters and buffers of the model; a forward may replace or make some."""
        self._parameters |= self._storages.of_all(parameters)
        self._buffers |= self._storages.of_all(buffers)

    def give(self, inputs: Iterable[Tensor]) -> None:
        """Add inputs, besides the arguments of the outermost modules."""
        self._inputs |= self._storages.of_all(inputs)

    # -- as a keeper -----------------------------------------------------------------------------

    def pack(self, value: Tensor, place: SavingPlace) -> RecordedReference:
        """Record a tensor that autograd saves."""
        number = self._draft(value, self.calls.innermost)
        held = RecordedReference(value, number, self)
        if place.recompute:  # of a reentrant checkpoint
            self._learn(number, origin="recomputed")
        self.timeline.saved(number)
        return held

    def unpack(self, held: RecordedReference) -> Tensor:
        """Return the tensor.

        In a backward pass, the running node is the one that saved it, and is recorded.
        """
        if self.drafts[held.number].node is None and in_backward():
            node = current_node()
            if node is not None:
                self._record_node(node)
        return held.read()

    def see(self, value: Tensor, place: SavingPlace) -> None:
        """Record a tensor that a checkpoint recomputes in backward, for as long as its storage exists.

        What was held before the recompute, such as the inputs of the block, is recorded already.
        """
        if not place.recompute or not self._known.isdisjoint(self._storages.of(value)):
            return
        number = self._draft(value, self.calls.innermost, rebuild=False)
        self._learn(number, node="checkpoint", field="recomputed", origin="recomputed")
        self.timeline.saved(number)
        for part in parts(value)[:1]:
            weakref.finalize(part.untyped_storage(), self.timeline.released, number).atexit = False

    def beside(self, owner: Any, place: object = None) -> None:  # noqa: ARG002
        """Record the tensors that a checkpoint holds without saving them, once.

        Args:
            owner: The checkpoint's frame or context.
            place: Not needed.
        """
        known = self._checkpoints.get(id(owner))
        if known is not None and known() is owner:
            return

        for name, packed in saved_arguments(owner):
            if isinstance(packed, RecordedReference) and packed.recorder is self:
                self._learn(packed.number, node="checkpoint", field=name)

        numbers = []
        for name, value in withheld(owner):
            number = self._draft(value, self.calls.around)
            self._learn(number, node="checkpoint", field=name)
            self.timeline.saved(number)
            numbers.append(number)

        timeline = self.timeline

        def gone(_: object) -> None:
            for number in numbers:
                timeline.released(number)

        self._checkpoints[id(owner)] = weakref.ref(owner, gone)

    # -- descriptions ----------------------------------------------------------------------------

    def walk(self, made: Iterable[Tensor]) -> None:
        """Record every node behind some results, and every checkpoint."""
        for node in behind(tensor.grad_fn for tensor in made):
            self._record_node(node)
            owner = owner_behind(node)
            if owner is not None:
                self.beside(owner)

    def _record_node(self, node: Node) -> None:
        """Record a node as the one that needs the tensors that it saved."""
        name = node.name()
        for field, saved in saved_by(node):
            packed = packed_of(saved.data)
            if isinstance(packed, RecordedReference) and packed.recorder is self:
                made_it = packed.maker == (name, sequence_number(node))
                output = made_it or field.startswith("result")
                self._learn(packed.number, node=name, field=field, output=output)

    def _draft(self, value: Tensor, span: tuple[str | None, int], *, rebuild: bool = True) -> int:
        """Record the description of a tensor that is held from now on; returns its number."""
        number = len(self.drafts)
        storages = self._storages.of(value)
        held = sum(self._storages.sizes[storage] for storage in storages)
        size = held
        strided = value.layout == torch.strided
        if strided:
            size = value.numel() * value.element_size()

        plain = type(value) in (Tensor, Parameter) and strided
        draft = SavedTensor(
            number,
            *span,
            shape=tuple(value.shape),
            dtype=value.dtype,
            device=value.device,
            bytes=size,
            storages=storages,
            held=held,
            version=max(0, version_of(value)),
            movable=plain,
            alias=base_of(value) is not None or size < held,
            source=self._running_line(),
        )

        if plain and rebuild:
            with suppress(RuleFailed):  # then offload moves or keeps it, as without a rule
                recipe = self._find(value, _held_in)
                if recipe is not None:
                    draft = replace(draft, rule=recipe.rule, extra=recipe.nbytes)
        self.drafts.append(draft)
        self._known.update(storages)
        return number

    def _learn(self, number: int, **known: Any) -> None:
        self.drafts[number] = replace(self.drafts[number], **known)

    def _running_line(self) -> SourceLine | None:
        """Return the program's running line; None if this thread runs none of it, as in backward.

        It is that of the innermost frame outside of PyTorch, Kedge and Python's standard library.
        """
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and is_between(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None:
            return None
        code = frame.f_code  # hashing the code object would take longer than everything else
        place = code.co_filename, code.co_qualname, frame.f_lineno
        if place not in self._lines:
            self._lines[place] = source_of(frame)
        return self._lines[place]

    # -- the account -----------------------------------------------------------------------------

    def tensors(
        self,
        moment: int | None = None,
        roots: Sequence[str] = ("",),
        given: Mapping[str, Iterable[int]] | None = None,
    ) -> SavedTensors:
        """Return the tensors held at a moment, and the bytes held over the step.

        Args:
            moment: The number of saves and releases after which they are held; None for the peak.
            roots: The path of each model, with which the paths of its modules begin.
            given: The storages of each module's inputs; None for those of all calls.
        """
        resident = self._parameters | self._buffers
        inputs = self._inputs | frozenset(self.calls.entered)
        sizes = self._storages.sizes
        # Recomputed tensors that are still there are held by the program, and not by autograd.
        outlived = {n for n in self.timeline.alive() if self.drafts[n].origin == "recomputed"}

        def origin(draft: SavedTensor) -> Origin:
            if not self._parameters.isdisjoint(draft.storages):
                return "parameter"
            if not self._buffers.isdisjoint(draft.storages):
                return "buffer"
            if not inputs.isdisjoint(draft.storages):
                return "input"
            return draft.origin

        def counted(number: int) -> list[tuple[int, int]]:
            if number in outlived:
                return []
            held = self.drafts[number].storages
            return [(storage, sizes[storage]) for storage in held if storage not in resident]

        def kind(number: int) -> TensorKind:
            draft = self.drafts[number]
            dtype = str(draft.dtype).removeprefix("torch.")
            return TensorKind(
                path=draft.path,
                node=draft.node,
                field=draft.field,
                shape=draft.shape,
                dtype=dtype,
                origin=origin(draft),
                line=draft.line,
            )

        course = over_step(self.timeline, counted, kind)
        if moment is None:
            moment = course.peak_at
        alive = self.timeline.alive(moment)
        drafts = [self.drafts[number] for number in alive]
        sharers: dict[int, set[int]] = {}
        for draft in drafts:
            for storage in draft.storages:
                sharers.setdefault(storage, set()).add(draft.number)

        items = []
        for draft in drafts:
            found = origin(draft)
            movable = draft.movable and found == "made" and draft.held >= self._least
            others: set[int] = set()
            for storage in draft.storages:
                others |= sharers[storage]
            others.discard(draft.number)
            items.append(
                replace(draft, origin=found, movable=movable, shared=tuple(sorted(others)))
            )

        if given is None:
            given = self.calls.given
        there = resident | inputs
        passed = {path: frozenset(numbers) - there for path, numbers in given.items()}
        return SavedTensors(items, passed, list(sizes), course, roots)


def _held_in(saved: Any) -> Any:
    """Return the handle behind a node's saved tensor; None if it is not a `RecordedReference`."""
    packed = packed_of(saved.data)
    if isinstance(packed, RecordedReference):
        return packed
    return None
