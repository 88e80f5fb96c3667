"""The engine: the decision for each tensor that autograd saves, by reference, in a new entry or in an existing one.

# Note [Filled later]
`torch.rrelu` saves its noise tensor before it draws the noise, and no version counts that. A tensor
kept by reference is right in backward; bytes taken when it was saved are not. PyTorch does not pass
the hook the operation that saves: the code that calls the operation names it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import OffloadFailed, warn
from kedge.hooks.saved.keeper import SavingPlace
from kedge.hooks.saved.reference import KeptByReference
from kedge.offload.engine.known_storages import KeptReader, KeptStorage, KnownStorages
from kedge.offload.engine.policy import Choice, PlannedCall, Policy
from kedge.offload.engine.proof import ProvenRecipes
from kedge.offload.engine.sources import Coded, Moved, Rebuilt, encode
from kedge.offload.held.entry import PartOfEntry, RecentlyRestored, StorageEntries, StorageEntry
from kedge.offload.held.raw_bytes import digest, is_alone, own_key, take, taken_bytes
from kedge.offload.held.steps import StepBoundaries, is_compared
from kedge.offload.outcomes import ModuleAccount, OffloadAccount, Outcome
from kedge.offload.stores.store import FULL
from kedge.torch_internals.storages import identity_of
from kedge.torch_internals.tensors import is_only_zeros

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_ROOM = 64 << 20
"""The restored bytes that are held a moment longer."""
_REMEMBERED = 1 << 16
"""The number of storages remembered for one step."""
_REBUILDS = (Choice.ALL, Choice.REBUILD)
_ENCODES = (Choice.ALL, Choice.COMPRESS)
_MOVES = (Choice.ALL, Choice.MOVE, Choice.COMPRESS)
_FILLING = frozenset({"rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"})
_BETWEEN = frozenset({"__torch_function__", "__call__"})
"""Functions that may lie between Kedge and the call.

A mode, or an overload, calls the operation for the program.
"""


class Engine:
    """The keeper behind `kedge.offload`.

    Attributes:
        account: The outcome of all saved tensors.
        policy: The policy in force.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.account = OffloadAccount()
        if policy.planner is not None:
            self.account.plan = policy.planner.shown
        self.work_by(policy)
        self._known = KnownStorages(model, StorageEntries(RecentlyRestored(_ROOM)), self.account)
        self._recipes = ProvenRecipes(self.account.dropped)
        self._steps = StepBoundaries()
        self._numbers = TensorNumbers()
        self._warned = False

    def work_by(self, policy: Policy) -> None:
        """Set the policy from now on."""
        self.policy = policy
        self._least = policy.least
        takes: Callable[[torch.device], bool] = _nowhere
        if policy.store is not None:
            takes = policy.store.takes
        self._takes = functools.cache(takes)

    def begin(self, inputs: Any) -> None:
        """Called when the model is called, with its inputs; see Note [Steps]."""
        self._known.of_model.update(inputs)
        self._steps.begin()

    def plan_call(self, path: str) -> PlannedCall:
        """Return the planner's plan for a call that may be run again, and begins now."""
        planner = self.policy.planner
        assert planner is not None  # noqa: S101 - only then are calls planned
        steps = self._steps
        if steps.called or steps.step.read:
            self._advance(path, recompute=False)
        return planner.plan_call(path)

    def pack(self, value: Tensor, place: SavingPlace) -> PartOfEntry | KeptByReference:
        """Return the handle that replaces a saved tensor.

        A `KeptByReference` leaves the tensor in memory.
        """
        steps = self._steps
        if steps.called or steps.step.read:  # rarely
            self._advance(place.path, recompute=place.recompute)
        call = steps.step.latest() or steps.step.call()
        row: ModuleAccount = place.spot.gate or self._row(place)

        try:
            nbytes = value.nbytes
        except RuntimeError:  # of a sparse tensor
            row.book(Outcome("kept", "unknown", 0))
            return KeptByReference(value, call)
        if nbytes < self._least:
            small = row.small
            small.number += 1
            small.bytes += nbytes
            return KeptByReference(value, call)

        outcome = self._decide(value, place, row)
        held = outcome.held
        packed = None
        if isinstance(held, StorageEntry):
            packed = PartOfEntry(held, value, call)
        row.book(outcome)
        if outcome.chosen and self.policy.planner is not None:
            self.policy.planner.took(outcome)

        if packed is not None:
            return packed
        if isinstance(held, KeptStorage):
            return KeptByReference(value, KeptReader(call, held))
        return KeptByReference(value, call)

    def unpack(self, packed: PartOfEntry) -> Tensor:
        """Return the tensor that a handle from `pack` replaced."""
        return packed.unpack()

    def stays(self, value: Tensor, place: SavingPlace) -> None:
        """Count a tensor that a checkpoint holds in a way that keeps it in memory."""
        if place.selected and not _is_unknown(value) and value.nbytes >= self._least:
            storage = value.untyped_storage()
            number = identity_of(storage)
            why = self._known.of_model.why(value, number) or "checkpoint"
            row: ModuleAccount = place.spot.gate or self._row(place)
            row.book(Outcome("kept", why, value.nbytes, storage, number))

    def passed(self, place: SavingPlace) -> None:
        """Count a module call in a checkpoint's forward, which saves nothing."""
        self.account.checkpointed += place.selected

    def _decide(self, value: Tensor, place: SavingPlace, row: ModuleAccount) -> Outcome:
        """Return the outcome of a tensor.

        If its storage is new in this step, choose an outcome and carry it out.
        """
        if not place.selected:
            return Outcome("kept", "excluded", value.nbytes)
        if _is_unknown(value):
            return Outcome("kept", "unknown", value.nbytes)
        if len(self.account.seen) > _REMEMBERED:
            self._forget()

        storage = value.untyped_storage()
        number = identity_of(storage)
        why = self._known.of_model.why(value, number)
        if why is not None:
            return Outcome("kept", why, value.nbytes, storage, number)
        held = self._known.find(value, number)
        if held is not None:
            return Outcome("again", "", value.nbytes, storage, number, held)
        return self._take(value, number, place.path, row)

    def _take(self, value: Tensor, number: int, path: str | None, row: ModuleAccount) -> Outcome:
        """Rebuild a tensor if that is chosen and a rule applies; otherwise encode, move or keep it."""
        policy = self.policy
        known = self._known
        index, nth = self._numbers.following(path, self._steps.step.calls)
        choice = Choice.ALL
        if policy.planner is not None:
            choice = policy.planner.choose(path, index, taken_bytes(value))
        if policy.find is None or choice not in _REBUILDS:
            return self._put_away(value, number, choice, row)

        lasting = known.of_model.lasting
        recipe = self._recipes.find(policy.find, value, (path, nth), lasting=lasting)
        if recipe is None:
            return self._put_away(value, number, choice, row)
        found = None
        if self._is_compared(value):
            found = digest(value, alone=False)
        entry = StorageEntry(known.entries, number, Rebuilt(recipe), value, found, row)
        return Outcome(
            "rebuilt",
            recipe.rule,
            value.nbytes,
            value.untyped_storage(),
            number,
            entry,
            chosen=True,
            extra=recipe.nbytes,
        )

    def _put_away(self, value: Tensor, number: int, choice: Choice, row: ModuleAccount) -> Outcome:
        """Encode or move a tensor; keep it if neither is chosen or possible."""
        policy = self.policy
        known = self._known
        storage = value.untyped_storage()
        alone = is_alone(value)
        begun = time.perf_counter()
        store = None
        if choice in _MOVES and self._takes(value.device):
            store = policy.store

        source: Coded | Moved | None = None
        compared = self._is_compared(value)
        found = None
        why = ""
        try:
            if policy.codec is not None and choice in _ENCODES:
                source = encode(store, policy.codec, value, alone=alone)
            if source is None and store is not None:
                taken = take(value, alone=alone, compared=compared)
                source = Moved(store.put(taken.data), taken.layout)
                found = taken.digest
        except FULL as failure:
            self._warn(failure)
            why = "failed"

        if source is None:
            nbytes = value.nbytes if alone else storage.nbytes()
            shared = None if alone else number
            kept = known.kept.begin(nbytes, shared)
            why = why or policy.why_kept(choice)
            return Outcome("kept", why, value.nbytes, storage, number, kept, chosen=True)

        seconds = time.perf_counter() - begun
        key = own_key(value, number) if alone else number
        if compared and found is None:
            found = digest(value, alone=alone)
        entry = StorageEntry(known.entries, key, source, value, found, row)
        return Outcome(
            "moved",
            "memory" if store is None else store.name,
            value.nbytes,
            storage,
            number,
            entry,
            chosen=True,
            stored=source.slot.nbytes,
            seconds=seconds,
        )

    def _is_compared(self, value: Tensor) -> bool:
        """Whether to take the digest of a tensor; see Note [Compared steps] in `held.steps`."""
        return value.is_cpu or is_compared(self._steps.number)

    def _warn(self, failure: BaseException) -> None:
        if self._warned:
            return
        self._warned = True
        error = f"{type(failure).__name__}: {failure}"
        warn(
            OffloadFailed(
                f"a saved tensor could not be moved and stays in memory ({error}); "
                "gradients are correct, but this memory is not freed. "
                "The account counts each such tensor; this warning appears once."
            )
        )

    def _forget(self) -> None:
        """Forget the storages of this step; this bounds memory in programs whose steps never end."""
        self._known.kept.forget()
        self.account.seen = {}

    def _row(self, place: SavingPlace) -> ModuleAccount:
        row = place.spot.gate = self.account.row(place.path)
        return row

    def _advance(self, path: str | None, *, recompute: bool) -> None:
        """Begin another step if the tensor that is about to be saved belongs to one."""
        if self._steps.advance(path, recompute=recompute):
            self._known.kept.forget()
            self._numbers = TensorNumbers()
            self.account.turn()
            if self.policy.planner is not None:
                self.policy.planner.turn(self.account)


class TensorNumbers:
    """Numbers for those tensors of each module that leave a choice, in one step."""

    def __init__(self) -> None:
        self._calls = 0
        self._in_step: defaultdict[str | None, Iterator[int]] = defaultdict(itertools.count)
        self._in_call: defaultdict[str | None, Iterator[int]] = defaultdict(itertools.count)

    def following(self, path: str | None, calls: int) -> tuple[int, int]:
        """Return the number of a module's next tensor in the step, and in this call of the model.

        Both begin at 0.
        """
        if calls != self._calls:
            if calls > 1:  # tensors saved before the first call count with it
                self._in_call.clear()
            self._calls = calls
        return next(self._in_step[path]), next(self._in_call[path])


def _nowhere(_: torch.device) -> bool:
    """Whether bytes can go to a store, without a store: never."""
    return False


def _is_unknown(value: Tensor) -> bool:
    """Whether tensors of this kind can only be kept by reference."""
    plain = type(value) in _PLAIN and value.layout is torch.strided and not value.is_nested
    if not plain or value.is_quantized or value.is_meta:
        return True
    return value.is_inference() or is_only_zeros(value) or _is_filled_later(value)


def _is_filled_later(value: Tensor) -> bool:
    """Whether a tensor that is being saved may not have its values yet; see Note [Filled later]."""
    if value.requires_grad or not value.is_floating_point():
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("kedge."):
        frame = frame.f_back
    while frame is not None and _FILLING.isdisjoint(frame.f_code.co_names):
        if frame.f_code.co_name not in _BETWEEN:
            return False
        frame = frame.f_back
    return frame is not None
