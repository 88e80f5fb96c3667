"""The tensors that a checkpoint holds without saving them: in containers, given by keyword, or within its function.

# Note [Withheld]
A checkpoint saves its tensor arguments, and saved-tensor hooks receive them. It holds other
arguments unchanged, in the list from which it recomputes, and keyword arguments in a dict that its
recompute closes over. No hook receives tensors in either. List and dict are the checkpoint's own,
one for each call of it.

So Kedge offers these tensors to a keeper once the checkpoint's forward is over. It removes the
tensors that the keeper takes from their containers, and puts them back when the recompute begins,
before the checkpoint's function runs. It changes a container only if, by its reference count, the
checkpoint alone holds it: so the program never finds a tensor missing, and the recompute sees
whatever the program writes into its own containers. Kedge checks this when a module is called in
the next checkpoint, and when the module around this one ends; by then nothing else holds a
container that was made for the call. The modes active at that moment are suspended: a selective
checkpoint would count the operations as its own.

A tensor that still exists when the recompute begins is put back itself. Any other comes back with
the values that it had when the keeper took it. A tensor that was put back stays, for a backward
that runs again.
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

from kedge.calls.closure import enclosed
from kedge.hooks.saved.pairs import packed_of
from kedge.hooks.saved.reference import KeptByReference
from kedge.hooks.saved.shared_inputs import SharedInput, arguments_of, share_inputs
from kedge.sites import leaves
from kedge.torch_internals import modes
from kedge.torch_internals.autograd_nodes import SavedTensor, function_of, saved_by
from kedge.torch_internals.checkpoint import frame_of
from kedge.torch_internals.corners import find


class HeldArgument(NamedTuple):
    """The place of an argument that a checkpoint holds without saving it.

    Attributes:
        name: The argument's position, or its keyword.
        holder: The list or dict that contains it.
        key: Its index or key in `holder`.
    """

    name: str
    holder: Any
    key: Any


def slots(owner: Any) -> list[HeldArgument]:
    """Return the places of all arguments that a checkpoint holds unsaved, given its frame or context."""
    keywords = {}
    if is_reentrant(owner):
        held = getattr(owner, "inputs", None) or ()
    else:
        held = getattr(owner, "saved_args", None) or ()
        keywords = _closed_over(owner.recompute_fn).get("kwargs", {})
    given = [
        HeldArgument(str(place), held, place)
        for place in range(len(held))
        if not isinstance(held[place], SavedTensor)
    ]
    return [*given, *(HeldArgument(name, keywords, name) for name in keywords)]


def withheld(owner: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of every tensor that a checkpoint holds without saving it."""
    for name, holder, key in slots(owner):
        yield from leaves.find(holder[key], name)
    if is_reentrant(owner):
        yield from _within(owner.run_function)
    else:
        yield from _within(_closed_over(owner.recompute_fn).get("fn"))


def saved_arguments(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name of every argument that a non-reentrant checkpoint has saved, and its packed form."""
    for place, value in enumerate(getattr(owner, "saved_args", ())):
        if isinstance(value, SavedTensor):
            yield str(place), packed_of(value.data)


def owner_behind(node: Node) -> Any:
    """Return the frame or context of the checkpoint that made a node of the graph.

    None without one.
    """
    if function_of(node) is checkpoint.CheckpointFunction:
        return node
    for _, saved in saved_by(node):
        if not isinstance(saved.data, Tensor):
            return frame_of(saved.unpack_hook)
    return None


def is_reentrant(owner: Any) -> bool:
    """Whether a checkpoint's object is the context of a reentrant checkpoint, not the frame of another."""
    return hasattr(owner, "run_function")


def _closed_over(run: Any) -> dict[str, Any]:
    """Return the variables that a checkpoint's recompute closes over, also if other functions wrap it."""
    while (code := getattr(run, "__code__", None)) is not None:
        cells = enclosed(run)
        if code.co_filename == checkpoint.__file__:
            return cells
        run = cells.get("run")
    return {}


def _within(function: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a function closes over, or that `functools.partial` binds to it."""
    while isinstance(function, partial):
        yield from leaves.find((function.args, function.keywords), "function")
        function = function.func
    function = getattr(function, "__func__", function)
    for value in enclosed(function).values():
        yield from leaves.find(value, "function")


class _Given:
    """Placeholder in a container for a tensor that is also an argument of the checkpoint."""

    def __init__(self, place: int, value: Tensor) -> None:
        self.place = place
        self.origin = SharedInput(value)
        self.value: Tensor | None = None

    def read(self, args: Sequence[Any]) -> Any:
        """Return the argument; every call returns the same tensor."""
        if self.value is None:
            still = self.origin.unchanged()
            self.value = args[self.place] if still is None else still
        return self.value


class _Taken:
    """Placeholder in a container for a tensor that a keeper has taken."""

    __slots__ = ("origin", "saved", "value")

    def __init__(self, saved: Any, value: Tensor) -> None:
        self.saved = saved
        self.origin = TensorWeakRef(value)
        self.value: Tensor | None = None

    def read(self, args: Sequence[Any]) -> Any:
        """Return the tensor, with its graph; every call returns the same one."""
        if self.value is None:
            origin: Tensor | None = self.origin()
            self.value = self.saved.unpack() if origin is None else origin
            self.saved = None
        return self.value


class _Tuple:
    """Placeholder for a tuple that contains other placeholders."""

    __slots__ = ("items", "kind", "value")

    def __init__(self, kind: type, items: list[Any]) -> None:
        self.kind = kind
        self.items = items
        self.value: Any = None

    def read(self, args: Sequence[Any]) -> Any:
        """Return the tuple, whose items were put back before."""
        if self.value is None:
            self.value = tuple.__new__(
                self.kind, self.items
            )  # a named tuple's own `__new__` may want other arguments
        return self.value


_Instead = _Given | _Taken | _Tuple


class KeeperOnThread(Protocol):
    """A keeper on one thread."""

    pack: Callable[[Tensor, Any], Any]
    unpack: Callable[[Any], Tensor]


class CheckpointInputs:
    """The tensors that one checkpoint holds without saving them, until all were offered to a keeper.

    Args:
        owner: The checkpoint's frame or context.
        place: Where the checkpoint was called.

    Attributes:
        tried: Whether they were offered to the keeper.
    """

    def __init__(self, owner: Any, place: Any) -> None:
        self._owner = weakref.ref(owner)
        self.place = place
        self.tried = False
        self._asked: set[int] = set()
        self._given: list[_Given] = []
        for i, argument in enumerate(arguments_of(owner)):
            if isinstance(argument, Tensor):
                self._given.append(_Given(i, argument))

    def is_of(self, owner: Any) -> bool:
        """Whether these are the inputs of a checkpoint, given its frame or context."""
        return self._owner() is owner

    @property
    def over(self) -> bool:
        """Whether the checkpoint's forward has ended.

        Always true for a reentrant one, whose context does not record it.
        """
        return bool(getattr(self._owner(), "forward_completed", True))

    def take(self, active: KeeperOnThread) -> None:
        """Offer a keeper all tensors in containers that only the checkpoint holds."""
        owner = self._owner()
        if owner is None or not self.over:
            return
        self.tried = True

        def pack(value: Tensor) -> Any:
            return active.pack(value, self.place)

        taking = _Taking(pack, active.unpack, self._asked, self._given)
        try:
            for _, holder, key in slots(owner):
                taking.lift(holder, key, alone=_count(holder, key) <= _ALONE)
        finally:
            # Also if the keeper fails: the tensors that it took before must come back.
            if taking.back:
                _put_back_before(owner, taking.back)

    def stays(self) -> list[Tensor]:
        """Return the tensors that the keeper was not offered."""
        owner = self._owner()
        if owner is None:
            return []
        tensors = (tensor for _, tensor in withheld(owner))
        return [tensor for tensor in tensors if id(tensor) not in self._asked]


class _Taking:
    """Offers a keeper the tensors in containers, and puts placeholders where it takes one."""

    def __init__(
        self,
        pack: Callable[[Tensor], Any],
        unpack: Callable[[Any], Tensor],
        asked: set[int],
        given: Sequence[_Given],
    ) -> None:
        self.pack = pack
        self.unpack = unpack
        self.asked = asked
        self.back: list[tuple[Any, Any, _Instead]] = []
        self._known: dict[int, _Given | _Taken] = {
            id(each.origin()): each for each in reversed(given)
        }

    def lift(self, holder: Any, key: Any, *, alone: bool) -> None:
        """Offer the tensor in one place, or the tensors of the container there if it is held `alone`."""
        value = holder[key]
        if isinstance(value, Tensor):
            if id(value) in self.asked:
                return
            taken = self._instead_of(value)
            if taken is not None:
                self._put(holder, key, taken)
        elif not alone:
            return
        elif isinstance(value, tuple) and (
            type(value) is tuple or (hasattr(value, "_fields") and _is_bare(value))
        ):
            alone_in = [_count(value, place) <= _ALONE for place in range(len(value))]
            items = list(value)
            before = len(self.back)
            for place, itself in enumerate(alone_in):
                self.lift(items, place, alone=itself)
            if any(into is items for into, _, _ in self.back[before:]):
                self._put(holder, key, _Tuple(type(value), items))
        elif (inner := _container(value)) is not None:
            keys = list(inner) if isinstance(inner, dict) else range(len(inner))
            for name in keys:
                self.lift(inner, name, alone=_count(inner, name) <= _ALONE)

    def _put(self, holder: Any, key: Any, instead: _Instead) -> None:
        self.back.append((holder, key, instead))
        holder[key] = instead

    def _instead_of(self, value: Tensor) -> _Given | _Taken | None:
        """Return a tensor's placeholder, the same in all its places.

        See Note [One tensor in several places].
        """
        known = self._known.get(id(value))
        if known is not None and known.origin() is value:
            return known
        if (taken := self._ask(value)) is not None:
            self._known[id(value)] = taken
        return taken

    def _ask(self, value: Tensor) -> _Taken | None:
        make_saved = find("torch:_C._autograd._make_saved_tensor")
        if (
            make_saved is None
            or not modes.has_data(value)
            or value.is_inference()
            or not _is_bare(value)
        ):
            return None
        decided: list[Any] = []
        # A closure over `self` would make a cycle through the saved tensor, which the collector
        # does not see.
        ask = self.pack

        def pack(inner: Tensor) -> Any:
            decided.append(ask(inner))
            return decided[0]

        with (
            modes.without_modes(),
            modes.without_function_modes(),
            saved_tensors_hooks(pack, self.unpack),
        ):
            saved = make_saved(value, is_output=False)
        packed = decided.pop()
        if packed is None or type(packed) is KeptByReference:
            self.asked.add(id(value))  # the tensor outlives the use of its id
            return None
        return _Taken(saved, value)


def _put_back_before(owner: Any, back: list[tuple[Any, Any, _Instead]]) -> None:
    """Wrap a checkpoint's recompute so that it first puts back the taken tensors."""
    name = "run_function" if is_reentrant(owner) else "recompute_fn"
    run = getattr(owner, name)
    lock = threading.Lock()
    given = {instead for _, _, instead in back if isinstance(instead, _Given)}

    def whole(*args: Any) -> Any:
        now = list(args)
        # Without grad: the recompute would count the saves of these operations as its own.
        with lock, torch.no_grad():
            while back:
                holder, key, instead = back[0]
                holder[key] = instead.read(args)
                del back[0]  # only after a successful read: a failed one may be repeated

        for each in given:
            now[each.place] = each.read(args)
        for i, arg in enumerate(now):
            if isinstance(arg, _Instead):
                now[i] = arg.read(args)
        return run(*now)

    setattr(owner, name, whole)


def _is_bare(value: Any) -> bool:
    """Whether an object has neither attributes nor, for a tuple, weak references, which a rebuilt one would lack."""
    return not getattr(value, "__dict__", None) and not (
        isinstance(value, tuple) and weakref.getweakrefcount(value)
    )


def _container(value: Any) -> Any:
    """Return the dict or list to replace a container's values in: itself, or a data class's `__dict__`; None for others."""
    if type(value) in (dict, list):
        return value
    if not dataclasses.is_dataclass(value):
        return None
    if isinstance(value, (type, dict, torch.nn.Module)):
        return None
    if weakref.getweakrefcount(value):
        return None
    return getattr(value, "__dict__", None)


def _count(holder: Any, key: Any) -> int:
    """Return the number of references to the object in a place."""
    return sys.getrefcount(holder[key])


_ALONE = _count([object()], 0)
"""The reference count of an object that nothing else holds.

Interpreters differ in counting their own references.
"""


_OfCheckpoint = Callable[[Any, Any], None]
_OfTensor = Callable[[Tensor, Any], None]
_OfPlace = Callable[[Any], None]


def _none() -> None:
    return None


class PendingCheckpoints:
    """The checkpoints with arguments still to offer to one keeper, on one thread; see Note [Withheld].

    A keeper with a method ``beside(owner, place)`` receives each checkpoint instead, and takes
    nothing out of it. A method ``stays(value, place)`` receives the tensors that could not be
    offered, and ``passed(place)`` each call of a module in a checkpoint's forward, because autograd
    drops the tensors saved there. A keeper that ``watches`` is offered nothing here.

    Args:
        active: The keeper on this thread.
        keeper: The keeper itself.

    Attributes:
        known: The checkpoints, by the places where they were called.
    """

    def __init__(self, active: KeeperOnThread, keeper: Any) -> None:
        self._active = active
        self._beside: _OfCheckpoint | None = getattr(keeper, "beside", None)
        self._stays: _OfTensor | None = getattr(keeper, "stays", None)
        self._passed: _OfPlace | None = getattr(keeper, "passed", None)
        self._watches: bool = getattr(keeper, "watches", False)
        self.known: dict[Any, list[CheckpointInputs]] = {}
        self._latest: Callable[[], Any] = _none

    def add(self, owner: Any, place: Any) -> None:
        """Called when a module is called in a checkpoint's forward, with the place where that checkpoint was called."""
        if self._latest() is owner:  # nearly always
            return
        self._latest = weakref.ref(owner)
        share_inputs(owner)
        known = [each for group in self.known.values() for each in group]
        if self._watches or any(each.is_of(owner) for each in known):
            return
        if self._beside is not None:
            self._beside(owner, place)
            return
        for each in known:
            if not each.tried:
                each.take(self._active)
        self.known.setdefault(place, []).append(CheckpointInputs(owner, place))

    def left(self, running: Sequence[Any]) -> None:
        """Called after a module's call, with the calls still active.

        Offers the tensors held by checkpoints in the others.
        """
        for place in [place for place in self.known if place not in running]:
            group = self.known[place]
            for each in [each for each in group if each.over]:
                group.remove(each)
                each.take(self._active)
                if self._stays is not None:
                    for tensor in each.stays():
                        self._stays(tensor, place)
            if not group:
                del self.known[place]

    def passed(self, place: Any) -> None:
        """Called when a module is called in a checkpoint's forward, with its place."""
        if self._passed is not None:
            self._passed(place)
