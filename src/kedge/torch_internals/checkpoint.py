"""Activation checkpointing: the call of the forward that a recompute runs again.

# Note [Which call is recomputed]
A checkpointed block runs a second time inside backward, blocks in the opposite order, and on a GPU
in another thread. So calls cannot be counted there. But each checkpoint keeps one object from its
forward to its recompute - the frame of a non-reentrant one, the context of a reentrant one - and
the calls seen under it in the forward are, in their order, those of the recompute. Both objects
are private to PyTorch; without them a recompute's calls are counted from 0.

A checkpoint inside another one has an object in the forward, and another one in each recompute of
the outer one, which calls it again. The outer recompute repeats the calls of both, so every call is
noted with all checkpoints around it. The frames of PyTorch's checkpoint code show which these are,
in their order.

# Note [Selective checkpoints]
A selective checkpoint holds tensors outside of the graph, without saved-tensor hooks. Since 2.14 a
program may choose that they go through the hooks around it, and PyTorch warns if the program has
hooks there and has not chosen. A Kedge pair is not the program's, so it does not count as long as
the program has not chosen: then PyTorch skips it and looks at the pair below, as it skips the pairs
of its own checkpoints.

# Note [Begun by a hook]
`torch.utils.checkpoint.checkpoint` calls the function that it checkpoints. Hooks of a module cannot:
a pre-hook begins the checkpoint, and a forward hook ends it. PyTorch has a generator for that, with
which `torch.distributed` does the same. It is suspended while the module runs, so its code is not
among the frames; the frame of the module's call stands for it.

# Note [Changed within the recompute]
Without saved-tensor hooks, autograd refuses a saved tensor that was changed in place since. A
checkpoint does not look, and gives the gradient of the changed tensor. So the tensors that a
recompute saves are noted with their versions, which are compared when autograd reads them.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import checkpoint

from kedge.calls.closure import content
from kedge.torch_internals.corners import find
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.saved_hooks import top_hooks
from kedge.torch_internals.tensors import version_of

_PRUNE = 256
_Frame: Any = getattr(checkpoint, "_CheckpointFrame", None)
Stopped: Any = getattr(checkpoint, "_StopRecomputationError", ())
"""The exception that ends a recompute as soon as it has recomputed all needed tensors."""


class _NotAsked:
    """Whether PyTorch should skip a Kedge pair in its search for the program's.

    See Note [Selective checkpoints].
    """

    def __bool__(self) -> bool:
        asker = sys._getframe(1).f_back
        if asker is None:
            return False
        mode = asker.f_locals.get("self")
        return hasattr(mode, _RESPECT) and getattr(mode, _RESPECT) is not True


_RESPECT = "respect_saved_tensors_hooks"


def make_skippable(pack: Any, below: Any) -> None:
    """Let PyTorch skip a Kedge pair, given by its first function; see Note [Selective checkpoints]."""
    while below is not None and getattr(below[0], "_checkpoint_internal", None) is True:
        below = getattr(below[0], "_user_hooks", None)
    pack._checkpoint_internal = _NotAsked()
    pack._user_hooks = below


class Segment:
    """One checkpointed block in one forward: its pass, and the calls in it."""

    __slots__ = (
        "calls",
        "heard",
        "micro_batch",
        "outer",
        "pass_",
        "reentrant",
        "replica",
        "seen",
        "step",
    )

    def __init__(self, here: Any, *, reentrant: bool, outer: Segment | None) -> None:
        self.pass_ = here.pass_
        self.micro_batch = here.micro_batch
        self.replica = here.replica
        self.step = here.step
        self.reentrant = reentrant
        self.outer = outer
        self.heard: set[Any] = set()
        self.calls: dict[Any, list[int]] = {}
        self.seen: dict[tuple[int, Any], int] = {}

    def add(self, key: Any, call: int) -> None:
        """Note a call in this block, and in those around it."""
        self.calls.setdefault(key, []).append(call)
        if self.outer is not None:
            self.outer.add(key, call)

    def hear(self, place: Any) -> None:
        """Note a gradient hook that was set in this block.

        Recomputes of it and of those around must not set it again.
        """
        if self.reentrant:
            self.heard.add(place)
        if self.outer is not None:
            self.outer.hear(place)

    def again(self, task: int, key: Any) -> int:
        """Return the number of the call that a recompute runs again."""
        nth = self.seen.get((task, key), 0)
        self.seen[task, key] = nth + 1
        calls = self.calls.get(key, ())
        if nth >= len(calls):
            return nth
        return calls[nth]


class Segments:
    """The checkpointed blocks of one model that any thread may still recompute."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Segment]] = {}

    @property
    def some(self) -> bool:
        """Whether there have been any."""
        return bool(self._known)

    def awaits(self, key: Any) -> bool:
        """Whether a block with such a call can still be recomputed, and never was."""
        return any(
            owner() is not None and key in known.calls and not known.seen
            for owner, known in self._known.values()
        )

    def forward(self, here: Any) -> Segment | None:
        """Return the innermost block that a forward is in, if any."""
        frame = _frame_in_force()
        if frame is not None and torch.is_grad_enabled():
            known = self._find(frame)
            if known is not None:
                return known
        return self._innermost(_owners_in_forward(frame, here), here)

    def recompute(self) -> tuple[Segment | None, Segment | None]:
        """Return the block that is being recomputed, and the innermost that it calls again.

        The first is None if its forward was not seen, the second if the recompute is in no other
        block.
        """
        *begun, last = [*_running()] or [_NONE]
        if not last.again:
            return None, None
        again = self._find(last.owner)
        if again is None:
            return None, None
        return again, self._innermost(begun, again)

    def _find(self, owner: Any) -> Segment | None:
        known = self._known.get(id(owner))
        if known is None or known[0]() is not owner:
            return None
        return known[1]

    def _innermost(self, owners: Sequence[Owned], here: Any) -> Segment | None:
        """Return the block of the first of some owners, each inside the next.

        New blocks have the pass of `here`.
        """
        outer: Segment | None = None
        for owner, reentrant, _ in reversed(owners):
            known = self._find(owner)
            if known is None:
                known = self._add(owner, Segment(here, reentrant=reentrant, outer=outer))
            outer = known
        return outer

    def _add(self, owner: Any, segment: Segment) -> Segment:
        if len(self._known) >= _PRUNE:
            self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
        self._known[id(owner)] = weakref.ref(owner), segment
        return segment


class Owned(NamedTuple):
    """A checkpoint that is running.

    Attributes:
        owner: Its frame or context; None for no checkpoint.
        reentrant: Whether it is a reentrant one.
        again: Whether this is its recompute.
    """

    owner: Any
    reentrant: bool
    again: bool


_NONE = Owned(None, reentrant=False, again=False)


def owners_around(here: Any) -> list[Owned]:
    """Return the checkpoints whose forward is running, the innermost first.

    In a recompute these are those that it calls again.
    """
    if in_backward():
        return [owned for owned in _running() if not owned.again]
    return _owners_in_forward(_frame_in_force(), here)


def _owners_in_forward(frame: Any, here: Any) -> list[Owned]:
    """Return the checkpoints around a forward, given the frame whose saved-tensor hooks are in force."""
    if frame is None and (torch.is_grad_enabled() or not here.graded):
        return []
    found = [owned for owned in _running() if not owned.again]
    is_shown = frame is None or any(owned.owner is frame for owned in found)
    if not is_shown:  # its code is not among the frames
        found.insert(0, Owned(frame, reentrant=False, again=False))
    return found


def is_in_checkpoint() -> bool:
    """Whether a checkpoint's forward or recompute is running on this thread."""
    return _frame_in_force() is not None or any(True for _ in _running())


def reentrant_around() -> Any:
    """Return the context of the innermost reentrant checkpoint around a forward; None without one."""
    for owned in _running():
        if owned.reentrant and not owned.again:
            return owned.owner
    return None


def is_cut(context: Any) -> bool:
    """Whether no input of a reentrant checkpoint requires a gradient, so that no backward runs it again."""
    return not any(getattr(context, "needs_input_grad", (True,)))


def _frame_in_force() -> Any:
    hooks = top_hooks(True)
    if hooks is None:
        return None
    return frame_of(hooks[0])


def frame_of(hook: Any) -> Any:
    """Return the frame of the non-reentrant checkpoint that a saved-tensor hook belongs to, if any."""
    cells = getattr(hook, "__closure__", None) or ()
    return next((c for c in map(content, cells) if _Frame and isinstance(c, _Frame)), None)


def _running() -> Iterator[Owned]:
    """Yield the checkpoints whose code is running, the innermost first, up to the first recompute."""
    begun = _thread.begun
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if id(frame) in begun:  # as a rule there is none
            for owner in reversed(begun[id(frame)]):
                yield Owned(owner, reentrant=False, again=False)
        found = None
        if frame.f_code.co_filename == checkpoint.__file__:
            found = _READ.get(frame.f_code.co_name)
        if found is not None:
            owner = found.read(frame.f_locals)
            if owner is not None:
                yield Owned(owner, found.reentrant, found.again)
                if found.again:
                    return
        frame = frame.f_back


def _of_generator(names: Mapping[str, Any]) -> Any:
    """Return the frame of a non-reentrant checkpoint, which a generator holds while the forward runs."""
    frame = getattr(names.get("gen"), "gi_frame", None)
    if frame is None:
        return None
    return frame.f_locals.get("new_frame")


class _Reader(NamedTuple):
    """How to find a checkpoint's object among the local variables of one of PyTorch's functions."""

    read: Callable[[Mapping[str, Any]], Any]
    reentrant: bool
    again: bool


_READ = {
    "forward": _Reader(methodcaller("get", "ctx"), reentrant=True, again=False),
    "backward": _Reader(methodcaller("get", "ctx"), reentrant=True, again=True),
    "checkpoint": _Reader(_of_generator, reentrant=False, again=False),
    "_checkpoint_impl": _Reader(_of_generator, reentrant=False, again=False),  # since 2.14
    "unpack_hook": _Reader(methodcaller("get", "frame"), reentrant=False, again=True),
}
"""By the name of the function."""


# -- checkpoints that hooks begin and end ------------------------------------------------------

_GENERATOR = "torch.utils.checkpoint:_checkpoint_without_reentrant_generator"
_EARLY_STOP = True
_RNG = True
_DEBUG = False


class _Thread(threading.local):
    """The checkpoints on each thread that hooks have begun, by the id of the frame of the module's call."""

    def __init__(self) -> None:
        self.begun: dict[int, list[Any]] = {}


_thread = _Thread()


def can_begin() -> bool:
    """Whether this PyTorch has what `BegunCheckpoint` needs."""
    return find(_GENERATOR) is not None and isinstance(Stopped, type)


class BegunCheckpoint:
    """A checkpoint whose forward runs until `end`; see Note [Begun by a hook].

    Args:
        run: Runs the forward again, given the tensors.
        tensors: The tensors that the checkpoint saves.
        around: The frame of the module's call.
        whole: Whether the recompute goes on to the end, and does not stop once it has recomputed
            all that is needed.
        see: Called with each tensor that is saved in the forward, and so is not kept.
        explained: Returns the error to raise in place of one that the recompute raises before
            `run` begins, or after it has ended.
        written: Returns the error to raise for a recomputed tensor that the recompute has changed
            since it was saved.
    """

    __slots__ = ("_around", "_frame", "_generator", "_metadata")

    def __init__(
        self,
        run: Callable[..., None],
        tensors: Sequence[Tensor],
        around: FrameType,
        *,
        whole: bool,
        see: Callable[[Tensor], None],
        explained: Callable[[RuntimeError], RuntimeError],
        written: Callable[[], RuntimeError],
    ) -> None:
        begin = find(_GENERATOR)
        self._generator = begin(
            run, _RNG, checkpoint.noop_context_fn, "default", _DEBUG, _EARLY_STOP, *tensors
        )
        next(self._generator)
        frame: Any = self._generator.gi_frame.f_locals["new_frame"]
        self._frame = frame
        if whole:  # also if the program has set it for all checkpoints
            frame.early_stop = False
        self._metadata = frame.metadata_fn

        def seen(value: Tensor, metadata: Any = frame.metadata_fn) -> Any:
            see(value)
            return metadata(value)

        frame.metadata_fn = seen
        _explain_errors(frame, explained)
        frame.recomputed = defaultdict(partial(_RecomputedTensors, written))
        self._around = id(around)
        _thread.begun.setdefault(self._around, []).append(frame)

    def end(self) -> None:
        """End the checkpoint's forward."""
        self._leave()
        next(self._generator, None)

    def abandon(self) -> None:
        """End the checkpoint of a call that never came to its end."""
        self._leave()
        self._generator.close()

    def _leave(self) -> None:
        self._frame.metadata_fn = self._metadata
        begun = _thread.begun.get(self._around, [])
        if self._frame in begun:
            begun.remove(self._frame)
        if not begun:
            _thread.begun.pop(self._around, None)
        self._frame = self._metadata = None


class _RecomputedTensors(weakref.WeakKeyDictionary[Any, Tensor]):
    """The tensors that one recompute has saved; see Note [Changed within the recompute].

    Args:
        written: Returns the error for one that was changed.

    Attributes:
        read: Whether autograd reads them now; before, PyTorch compares their shapes.
    """

    def __init__(self, written: Callable[[], RuntimeError]) -> None:
        super().__init__()
        self.read = False
        self._written = written
        self._versions: dict[int, int] = {}  # by the ids of the handles

    def __setitem__(self, handle: Any, value: Tensor) -> None:
        """Note a tensor that is saved."""
        super().__setitem__(handle, value)
        self._versions[id(handle)] = version_of(value)

    def __getitem__(self, handle: Any) -> Tensor:
        """Return a tensor, which is as it was saved."""
        value = super().__getitem__(handle)
        if self.read and version_of(value) != self._versions[id(handle)]:
            raise self._written()
        return value


def _explain_errors(frame: Any, explained: Callable[[RuntimeError], RuntimeError]) -> None:
    """Replace the errors of a checkpoint whose inputs cannot be read, or that recomputed other tensors."""
    there = weakref.ref(frame)  # the frame must not hold itself
    for name in ("get_inputs", "check_recomputed_tensors_match"):
        setattr(frame, name, _explaining(there, getattr(type(frame), name), explained))


def _explaining(
    there: Callable[[], Any],
    method: Callable[..., Any],
    explained: Callable[[RuntimeError], RuntimeError],
) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        frame = there()
        try:
            found = method(frame, *args)
        except RuntimeError as error:
            instead = explained(error)
            if instead is error:
                raise
            raise instead from error
        for gid in args:  # none for `get_inputs`
            frame.recomputed[gid].read = True
        return found

    return call
