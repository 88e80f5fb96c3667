"""Decides over each tensor that autograd saves: kept by reference, or an entry of its own, or one that there is.

# Note [Proof]
At each place, which is the how manieth tensor of a module in a call of the model, a rule's first result is compared with
the truth. What a rule assumes may hold at one place and not at another: a program can change what lies between under
``no_grad``, where the graph does not show it. Later results are compared by what their bytes come to, when they are
rebuilt (`kedge.offload.held.digest`).
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import OffloadFailed, warn
from kedge.hooks.saved.keeper import Place
from kedge.hooks.saved.pairs import packed_of
from kedge.hooks.saved.reference import Kept
from kedge.offload.account import Account, Row
from kedge.offload.engine.filled import is_filled_later
from kedge.offload.engine.kept_in_place import Stay, Stayer, Staying
from kedge.offload.engine.own_storages import Owned
from kedge.offload.engine.policy import Choice, HandleOf, Policy
from kedge.offload.engine.proof import disproof
from kedge.offload.engine.sources import Rebuilt, encode, move
from kedge.offload.held.digest import KNOWN
from kedge.offload.held.entry import Entries, Entry, Source, Window
from kedge.offload.held.handle import Handle, Part, Referred
from kedge.offload.held.span import is_alone, own_key
from kedge.offload.held.steps import Turns
from kedge.offload.rebuild.failure import RuleFailed
from kedge.offload.rebuild.recipe import Recipe
from kedge.offload.stores.store import FULL
from kedge.torch_internals.storages import identity_of
from kedge.torch_internals.tensors import is_only_zeros

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)
_ROOM = 64 << 20
"""The bytes of what was brought back that are held for a moment more."""
_REMEMBERED = 1 << 16
"""How many storages are remembered of one step."""
_REBUILDS = (Choice.ALL, Choice.REBUILD)
_MOVES = (Choice.ALL, Choice.MOVE, Choice.COMPRESS)


class _Passing:
    """Gives handles where parameters do not last.

    See Note [Parameters that do not last] in `kedge.offload.rebuild.recipe_builder`.
    """

    lasting = False

    def __init__(self, handle_of: HandleOf) -> None:
        self._handle_of = handle_of

    def __call__(self, saved: Any) -> Handle | None:
        return self._handle_of(saved)


class Engine:
    """The keeper behind `kedge.offload`.

    Attributes:
        policy: What it works by.
        account: What became of what was saved.
    """

    def __init__(self, policy: Policy, model: nn.Module) -> None:
        self.account = Account()
        self.policy, self._least = policy, policy.least
        self._owned = Owned(model)
        self._entries = Entries(Window(_ROOM))
        self._staying = Staying(self.account)
        self._proven: set[Any] = set()
        self._dropped: set[Any] = set()
        self._warned = False
        self._turns = Turns()

    def begin(self, inputs: Any) -> None:
        """Hear that the model is called; see Note [Steps]."""
        self._owned.look(inputs)
        self._turns.begin()

    def pack(self, value: Tensor, place: Place) -> Part | Kept:
        """Return what stands for a tensor; a `Kept` leaves it where it is."""
        if self._turns.due(place.path, recompute=place.recompute):
            self._turn()
        call = self._turns.step.call()
        row: Row = place.spot.gate or self._row(place)
        try:
            nbytes = value.nbytes
        except RuntimeError:  # of a sparse tensor
            row.keep("unknown", 0)
            return Kept(value, call)
        if nbytes < self._least:
            small = row.small
            small.number += 1
            small.bytes += nbytes
            return Kept(value, call)
        why = self._why(value, place)
        if why is None:
            held = self._held(value, place, row)
            if isinstance(held, Entry):
                return Part(held, value, call)
            return Kept(value, call if held is None else Stayer(call, held))
        row.keep(why, nbytes)
        return Kept(value, call)

    def stays(self, value: Tensor, place: Place) -> None:
        """Count a tensor that a checkpoint holds in a way that leaves it where it is."""
        row: Row = place.spot.gate or self._row(place)
        why = self._why(value, place)
        if why is None and value.nbytes >= self._least:
            storage = value.untyped_storage()
            number = identity_of(storage)
            row.saw(storage, number)
            row.keep(self._owned.why(value, number) or "checkpoint", value.nbytes)

    def passed(self, place: Place) -> None:
        """Count a call of a module in a checkpoint's forward, of which nothing is saved."""
        self.account.checkpointed += place.selected

    def unpack(self, packed: Part) -> Tensor:
        """Return a tensor that `pack` took."""
        packed.call.unpacked()
        return packed.read()

    def handle_of(self, saved: Any) -> Handle | None:
        """Return the handle that stands for what a node saved, if its bytes are still those that were saved."""
        data = packed_of(saved.data)
        handle = Referred(data) if type(data) is Kept else data
        return handle if isinstance(handle, Handle) and handle.intact() else None

    def _why(self, value: Tensor, place: Place) -> str | None:
        """Return why nothing can be done with a tensor; None if something can."""
        if not place.selected:
            return "excluded"
        plain = type(value) in _PLAIN and value.layout is torch.strided and not value.is_nested
        if not plain or value.is_inference() or is_only_zeros(value) or is_filled_later(value):
            return "unknown"
        return None

    def _held(self, value: Tensor, place: Place, row: Row) -> Entry | Stay | None:
        """Return what holds a tensor's bytes; if it stays where it is what counts it, or None if it is there anyhow."""
        self._forget()
        storage = value.untyped_storage()
        number = identity_of(storage)
        row.saw(storage, number)
        if (reason := self._owned.why(value, number)) is not None:
            row.keep(reason, value.nbytes)
            return None
        entry = self._entries.find(number, value)
        if entry is None and value.nbytes < storage.nbytes():
            entry = self._entries.find(own_key(value, number), value)
        held = self._staying.find(number) if entry is None else entry
        if held is None:
            return self._take(value, place, row, number)
        row.again(value.nbytes)
        return held

    def _take(self, value: Tensor, place: Place, row: Row, number: int) -> Entry | Stay:
        """Make an entry for a tensor, or keep it."""
        planner = self.policy.planner
        alone = is_alone(value)
        index, nbytes = row.ask(self._turns.step.calls), value.nbytes if alone else value.untyped_storage().nbytes()
        choice = planner.choose(place.path, index, nbytes)
        begun = time.perf_counter()
        source, what, alone = self._source(value, row, choice, alone=alone)
        planner.took(place.path, index, what, time.perf_counter() - begun)
        if source is None:
            why = what.removeprefix("kept ")
            row.keep(why, value.nbytes)
            return self._staying.begin(nbytes, None if alone else number)
        return Entry(self._entries, source, value, own_key(value, number) if alone else number, row)

    def _source(self, value: Tensor, row: Row, choice: Choice, *, alone: bool) -> tuple[Source | None, str, bool]:
        """Return what a tensor can be brought back from, what was done, and whether it is for this tensor alone."""
        recipe = self._recipe(value, row) if choice in _REBUILDS else None
        if recipe is not None:
            row.rebuild(recipe.rule, value.nbytes, recipe.nbytes)
            return Rebuilt(recipe), f"rebuilt {recipe.rule}", False
        try:
            source = self._put(value, row, choice, alone=alone)
        except FULL as failure:
            row.fail(value.nbytes)
            self._warn(failure)
            return None, "kept failed", alone
        if isinstance(source, str):
            return None, f"kept {source}", alone
        return source, "moved", alone

    def _put(self, value: Tensor, row: Row, choice: Choice, *, alone: bool) -> Source | str:
        """Encode or move a tensor; or say why it is kept."""
        policy, begun = self.policy, time.perf_counter()
        if choice not in _MOVES:
            return "planned" if choice is Choice.KEEP else "no rule"
        store = policy.store if policy.store is not None and policy.store.takes(value.device) else None
        if policy.codec is not None and choice is not Choice.MOVE:
            coded = encode(store, policy.codec, value, alone=alone)
            if coded is not None:
                row.move("memory" if store is None else store.name, value.nbytes, coded[1], time.perf_counter() - begun)
                return coded[0]
        if store is None:
            return "no rule" if policy.store is None else "here"
        moved = move(store, value, alone=alone)
        row.move(store.name, value.nbytes, moved.nbytes, time.perf_counter() - begun)
        return moved

    def _recipe(self, value: Tensor, row: Row) -> Recipe | None:
        """Find how a tensor is rebuilt; see Note [Proof]."""
        find = self.policy.find
        if find is None or value.is_conj() or value.is_neg() or value.device.type not in KNOWN:
            return None
        try:
            recipe = find(value, self.handle_of if self._owned.lasting else _Passing(self.handle_of))
        except RuleFailed as failed:  # see Note [Whatever fails]
            self.account.dropped[failed.rule] = f"{value.dtype} on {value.device.type}, in {row.path!r}: {failed.why}"
            return None
        if recipe is None:
            return None
        exact = all(handle.exact for handle in recipe.inputs)
        key = recipe.rule, value.dtype, value.device.type, exact
        site = key, row.path, row.nth
        if key in self._dropped or site in self._dropped:
            return None
        if site not in self._proven:
            if (wrong := disproof(recipe, value)) is not None:
                if not wrong.passing:
                    self._dropped.add(key if wrong.false else site)
                where = f"{value.dtype} on {value.device.type}, in {row.path!r}" + ("" if wrong.false else " alone")
                of = "" if exact else ", of what a codec has rounded"
                self.account.dropped[recipe.rule] = f"{where}{of}: {wrong.why}"
                return None
            self._proven.add(site)
        return recipe

    def _warn(self, failure: BaseException) -> None:
        if not self._warned:
            self._warned = True
            warn(
                OffloadFailed(
                    f"a saved tensor could not be moved and stays in memory ({type(failure).__name__}: {failure}); gradients "
                    "are right, but this memory is not saved. The account counts each such tensor; this is said once."
                )
            )

    def _forget(self) -> None:
        """Bound what is remembered of a step, for programs in which none is seen to end."""
        if len(self.account.seen) > _REMEMBERED:
            self._staying.forget()
            self.account.seen = {}

    def _row(self, place: Place) -> Row:
        row = place.spot.gate = self.account.row(place.path)
        return row

    def _turn(self) -> None:
        """Begin a step."""
        self._staying.forget()
        self.account.turn()
        self.policy.planner.turn(self.account)
