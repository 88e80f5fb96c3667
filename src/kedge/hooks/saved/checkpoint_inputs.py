"""The tensors that a checkpoint holds without saving them: in containers, given by keyword, or within its function.

# Note [Withheld]
A checkpoint saves those of its arguments that are tensors, and saved-tensor hooks are asked for them. An argument of
another kind it holds as it is, in the list from which it recomputes, and what is given by keyword in a dict that its
recompute closes over. No hook is asked for either. List and dict are the checkpoint's own, one for each call of it.

So a keeper is asked for these tensors once the checkpoint's forward is over. What it takes goes out of the container,
until the recompute begins: then it is put back, before the checkpoint's function runs. A container is changed only if
nobody but the checkpoint has it, by its count of references: so the program cannot come upon one with something
missing, and what it writes into its own containers is there in the recompute. That is looked at when a module is
called in the next checkpoint, and when the module around this one is left; by then a container that was made for the
call is nobody else's. The modes of whatever runs then have nothing to do with it: a selective checkpoint would count
the operations as its own.

A tensor that is still there when the recompute begins is put back itself. One that is not comes back with the values
that it had when it was taken. What is put back stays, for a backward that runs again.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.utils import checkpoint
from torch.utils.weak import TensorWeakRef

from kedge.hooks.saved.pairs import packed_of
from kedge.hooks.saved.reference import KeptByReference
from kedge.hooks.saved.shared_inputs import SharedInput, arguments_of, give_one
from kedge.sites import leaves
from kedge.torch_internals import modes
from kedge.torch_internals.autograd_nodes import SavedTensor, function_of, saved_by
from kedge.torch_internals.checkpoint import content, frame_of
from kedge.torch_internals.corners import find


class HeldArgument(NamedTuple):
    """Where a checkpoint holds an argument that it has not saved.

    Attributes:
        name: Which argument it is: its position, or its keyword.
        holder: The list or dict that it is in.
        key: Where in there.
    """

    name: str
    holder: Any
    key: Any


def slots(owner: Any) -> list[HeldArgument]:
    """Return the places of all arguments that a checkpoint holds as they are, given its frame or context."""
    held = getattr(owner, "inputs" if is_reentrant(owner) else "saved_args", None) or ()
    keywords = {} if is_reentrant(owner) else _closed_over(owner.recompute_fn).get("kwargs", {})
    given = [
        HeldArgument(str(place), held, place) for place in range(len(held)) if not isinstance(held[place], SavedTensor)
    ]
    return [*given, *(HeldArgument(name, keywords, name) for name in keywords)]


def withheld(owner: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of every tensor that a checkpoint holds and has not saved."""
    for name, holder, key in slots(owner):
        yield from leaves.find(holder[key], name)
    run = owner.run_function if is_reentrant(owner) else owner.recompute_fn
    yield from _within(run if is_reentrant(owner) else _closed_over(run).get("fn"))


def saved_arguments(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of every argument that a non-reentrant checkpoint has saved, and what stands for it."""
    for place, value in enumerate(getattr(owner, "saved_args", ())):
        if isinstance(value, SavedTensor):
            yield str(place), packed_of(value.data)


def owner_behind(node: Node) -> Any:
    """Return the frame or context of the checkpoint that a node of the graph comes from; None if from none."""
    if function_of(node) is checkpoint.CheckpointFunction:
        return node
    for _, saved in saved_by(node):
        if not isinstance(saved.data, Tensor):
            return frame_of(saved.unpack_hook)
    return None


def is_reentrant(owner: Any) -> bool:
    """Whether a checkpoint's object is the context of a reentrant one."""
    return hasattr(owner, "run_function")


def _closed_over(run: Any) -> dict[str, Any]:
    """Return what a checkpoint's recompute closes over, whoever has put a function of theirs around it."""
    while (code := getattr(run, "__code__", None)) is not None:
        cells = dict(zip(code.co_freevars, map(content, run.__closure__ or ()), strict=True))
        if code.co_filename == checkpoint.__file__:
            return cells
        run = cells.get("run")
    return {}


def _within(function: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a function was bound to, or closes over."""
    while isinstance(function, partial):
        yield from leaves.find((function.args, function.keywords), "function")
        function = function.func
    function = getattr(function, "__func__", function)
    for cell in getattr(function, "__closure__", None) or ():
        yield from leaves.find(content(cell), "function")


class _Given:
    """Stands in a container for a tensor that the checkpoint was given as an argument, too."""

    def __init__(self, place: int, value: Tensor) -> None:
        self.place, self.origin = place, SharedInput(value)
        self.value: Tensor | None = None

    def read(self, args: Sequence[Any]) -> Any:
        """Return the argument; later on the same again."""
        if self.value is None:
            still = self.origin.unchanged()
            self.value = args[self.place] if still is None else still
        return self.value


class _Taken:
    """Stands in a container for a tensor that a keeper has taken."""

    __slots__ = ("origin", "saved", "value")

    def __init__(self, saved: Any, value: Tensor) -> None:
        self.saved, self.origin = saved, TensorWeakRef(value)
        self.value: Tensor | None = None

    def read(self, args: Sequence[Any]) -> Any:
        """Return the tensor, with its graph; later on the same again."""
        if self.value is None:
            origin: Tensor | None = self.origin()
            self.value = self.saved.unpack() if origin is None else origin
            self.saved = None
        return self.value


class _Tuple:
    """Stands for a tuple in which there are some of these."""

    __slots__ = ("items", "kind", "value")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind, self.items = kind, items
        self.value: Any = None

    def read(self, args: Sequence[Any]) -> Any:
        """Return the tuple; what is in it was put back before."""
        if self.value is None:
            self.value = tuple.__new__(self.kind, self.items)  # a named tuple's own `__new__` may want other arguments
        return self.value


_Instead = _Given | _Taken | _Tuple


class KeeperOnThread(Protocol):
    """A keeper on one thread."""

    pack: Callable[[Tensor, Any], Any]
    unpack: Callable[[Any], Tensor]


class CheckpointInputs:
    """What one checkpoint holds and has not saved, until a keeper has been asked for all of it.

    Args:
        owner: The checkpoint's frame or context.
        place: Where the checkpoint was called.

    Attributes:
        tried: Whether the keeper was asked.
    """

    def __init__(self, owner: Any, place: Any) -> None:
        self._owner, self.place, self.tried = weakref.ref(owner), place, False
        self._asked: set[int] = set()
        self._given = [_Given(i, arg) for i, arg in enumerate(arguments_of(owner)) if isinstance(arg, Tensor)]

    def is_of(self, owner: Any) -> bool:
        """Whether this is the checkpoint."""
        return self._owner() is owner

    @property
    def over(self) -> bool:
        """Whether the checkpoint's forward has come to its end; the context of a reentrant one does not tell."""
        return bool(getattr(self._owner(), "forward_completed", True))

    def take(self, asker: KeeperOnThread) -> None:
        """Ask a keeper for all that nobody else holds."""
        owner = self._owner()
        if owner is None or not self.over:
            return
        self.tried = True
        taking = _Taking(lambda value: asker.pack(value, self.place), asker.unpack, self._asked, self._given)
        try:
            for _, holder, key in slots(owner):
                taking.lift(holder, key, alone=_count(holder, key) <= _ALONE)
        finally:
            if taking.back:  # also if the keeper fails: what it has taken until then is to come back
                _put_back_before(owner, taking.back)

    def stays(self) -> list[Tensor]:
        """Return what the keeper could not be asked for."""
        owner = self._owner()
        found = () if owner is None else withheld(owner)
        return [tensor for _, tensor in found if id(tensor) not in self._asked]


class _Taking:
    """Asks a keeper for the tensors in containers, and puts something else in the place of what it takes."""

    def __init__(
        self, pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor], asked: set[int], given: Sequence[_Given]
    ) -> None:
        self.pack, self.unpack, self.asked = pack, unpack, asked
        self.back: list[tuple[Any, Any, _Instead]] = []
        self._known: dict[int, _Given | _Taken] = {id(each.origin()): each for each in reversed(given)}

    def lift(self, holder: Any, key: Any, *, alone: bool) -> None:
        """Take what is in one place, or what is in there."""
        value = holder[key]
        if isinstance(value, Tensor):
            if id(value) not in self.asked and (taken := self._instead_of(value)) is not None:
                self._put(holder, key, taken)
        elif not alone:
            return
        elif isinstance(value, tuple) and (type(value) is tuple or (hasattr(value, "_fields") and _is_bare(value))):
            alone_in = [_count(value, place) <= _ALONE for place in range(len(value))]
            items, before = list(value), len(self.back)
            for place, itself in enumerate(alone_in):
                self.lift(items, place, alone=itself)
            if any(into is items for into, _, _ in self.back[before:]):
                self._put(holder, key, _Tuple(type(value), items))
        elif (inner := _container(value)) is not None:
            for name in list(inner) if isinstance(inner, dict) else range(len(inner)):
                self.lift(inner, name, alone=_count(inner, name) <= _ALONE)

    def _put(self, holder: Any, key: Any, instead: _Instead) -> None:
        self.back.append((holder, key, instead))
        holder[key] = instead

    def _instead_of(self, value: Tensor) -> _Given | _Taken | None:
        """Return what stands for a tensor: the same in all its places; see Note [One tensor in several places]."""
        known = self._known.get(id(value))
        if known is not None and known.origin() is value:
            return known
        if (taken := self._ask(value)) is not None:
            self._known[id(value)] = taken
        return taken

    def _ask(self, value: Tensor) -> _Taken | None:
        make_saved = find("torch:_C._autograd._make_saved_tensor")
        if make_saved is None or modes.is_fake(value) or value.is_inference() or not _is_bare(value):
            return None
        decided: list[Any] = []
        ask = self.pack  # `self` leads to what is saved, and the collector does not see into that

        def pack(inner: Tensor) -> Any:
            decided.append(ask(inner))
            return decided[0]

        with modes.without_modes(), modes.without_function_modes(), saved_tensors_hooks(pack, self.unpack):
            saved = make_saved(value, is_output=False)
        packed = decided.pop()
        if packed is None or type(packed) is KeptByReference:
            self.asked.add(id(value))  # which lives as long as its place is asked for
            return None
        return _Taken(saved, value)


def _put_back_before(owner: Any, back: list[tuple[Any, Any, _Instead]]) -> None:
    """Have a checkpoint's recompute begin with putting back what was taken."""
    name = "run_function" if is_reentrant(owner) else "recompute_fn"
    run, lock = getattr(owner, name), threading.Lock()
    given = {instead for _, _, instead in back if isinstance(instead, _Given)}

    def whole(*args: Any) -> Any:
        now = list(args)
        with lock, torch.no_grad():  # what is computed for it would be taken for a part of the recompute
            while back:
                holder, key, instead = back[0]
                holder[key] = instead.read(args)
                del back[0]  # not before: what cannot be read now may be asked for again
        for each in given:
            now[each.place] = each.read(args)
        return run(*(arg.read(args) if isinstance(arg, _Instead) else arg for arg in now))

    setattr(owner, name, whole)


def _is_bare(value: Any) -> bool:
    """Whether an object is no more than what it holds: what the program has noted on it would not come back with that."""
    return not getattr(value, "__dict__", None) and not (isinstance(value, tuple) and weakref.getweakrefcount(value))


def _container(value: Any) -> Any:
    """Return what a container's values can be replaced in: itself, or a data class's attributes; None for another kind."""
    if type(value) in (dict, list):
        return value
    own = getattr(value, "__dict__", None)
    plain = dataclasses.is_dataclass(value) and not isinstance(value, (type, dict, torch.nn.Module))
    return own if plain and own is not None and not weakref.getweakrefcount(value) else None


def _count(holder: Any, key: Any) -> int:
    """Count the references to what is in a place."""
    return sys.getrefcount(holder[key])


_ALONE = _count([object()], 0)
"""How many there are if it is nowhere else; an interpreter may count what it does itself or not."""


class PendingCheckpoints:
    """The checkpoints for whose arguments one keeper is still to be asked, on one thread; see Note [Withheld].

    A keeper with a method ``beside(owner, place)`` is told of each checkpoint instead, and takes nothing out of it. One with
    a method ``stays(value, place)`` is told what it could not be asked for, and one with ``passed(place)`` of each call of a
    module in there, for what that saves is dropped. One that ``watches`` is asked for nothing here.

    Args:
        asker: The keeper there.
        keeper: The keeper itself.
    """

    def __init__(self, asker: KeeperOnThread, keeper: Any) -> None:
        self._asker = asker
        self._beside: Callable[[Any, Any], None] | None = getattr(keeper, "beside", None)
        self._stays: Callable[[Tensor, Any], None] | None = getattr(keeper, "stays", None)
        self._passed: Callable[[Any], None] | None = getattr(keeper, "passed", None)
        self._watches: bool = getattr(keeper, "watches", False)
        self.known: list[CheckpointInputs] = []

    def meet(self, owner: Any, place: Any) -> None:
        """Hear that a module is called in a checkpoint's forward, and where that checkpoint was called."""
        give_one(owner)
        if self._watches or any(each.is_of(owner) for each in self.known):
            return
        if self._beside is not None:
            self._beside(owner, place)
            return
        for each in self.known:
            if not each.tried:
                each.take(self._asker)
        self.known.append(CheckpointInputs(owner, place))

    def left(self, running: Sequence[Any]) -> None:
        """Hear that a module was left, and which calls are under way still; asks for what was held in the others."""
        for each in [each for each in self.known if each.place not in running and each.over]:
            self.known.remove(each)
            each.take(self._asker)
            if self._stays is not None:
                for tensor in each.stays():
                    self._stays(tensor, each.place)

    def passed(self, place: Any) -> None:
        """Hear that a module is called in a checkpoint's forward."""
        if self._passed is not None:
            self._passed(place)
