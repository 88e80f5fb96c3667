"""Activation checkpointing: the call of the forward that a recompute runs again.

# Note [Which call is recomputed]
A checkpointed block runs a second time inside backward, blocks in the opposite order, and on a GPU
in another thread. So calls cannot be counted there. But each checkpoint keeps one object from its
forward to its recompute - the frame of a non-reentrant one, the context of a reentrant one - and
the calls seen under it in the forward are, in their order, those of the recompute. Both objects
are private to PyTorch; without them a recompute's calls are counted from 0.

# Note [Selective checkpoints]
A selective checkpoint holds tensors outside of the graph, without saved-tensor hooks. Since 2.14 a program may choose
that they go through the hooks around it, and PyTorch warns if the program has hooks there and has not chosen. A Kedge
pair is not the program's, so it does not count as long as the program has not chosen: then PyTorch skips it and looks at
the pair below, as it skips the pairs of its own checkpoints.
"""

from __future__ import annotations

import sys
import weakref
from types import FrameType
from typing import Any

import torch
from torch.utils import checkpoint

from kedge.torch_internals.saved_hooks import top_hooks

_PRUNE = 256
_Frame: Any = getattr(checkpoint, "_CheckpointFrame", None)
Stopped: Any = getattr(checkpoint, "_StopRecomputationError", ())
"""The exception that ends a recompute as soon as it has recomputed all needed tensors."""


class _NotAsked:
    """Whether PyTorch should skip a Kedge pair in its search for the program's; see Note [Selective checkpoints]."""

    def __bool__(self) -> bool:
        asker = sys._getframe(1).f_back
        mode = None if asker is None else asker.f_locals.get("self")
        return hasattr(mode, _RESPECT) and getattr(mode, _RESPECT) is not True


_RESPECT = "respect_saved_tensors_hooks"


def make_skippable(pack: Any, below: Any) -> None:
    """Let PyTorch skip a Kedge pair, given by its first function; see Note [Selective checkpoints]."""
    while below is not None and getattr(below[0], "_checkpoint_internal", None) is True:
        below = getattr(below[0], "_user_hooks", None)
    pack._checkpoint_internal, pack._user_hooks = _NotAsked(), below


class Segment:
    """One checkpointed block in one forward: its pass, and the calls in it."""

    __slots__ = ("calls", "heard", "micro_batch", "pass_", "reentrant", "replica", "seen", "step")

    def __init__(self, here: Any, *, reentrant: bool) -> None:
        self.pass_, self.micro_batch, self.replica = here.pass_, here.micro_batch, here.replica
        self.reentrant, self.step = reentrant, here.step
        self.heard: set[Any] = set()
        self.calls: dict[Any, list[int]] = {}
        self.seen: dict[tuple[int, Any], int] = {}

    def again(self, task: int, key: Any) -> int:
        """Return the number of the call that a recompute runs again."""
        nth = self.seen.get((task, key), 0)
        self.seen[task, key] = nth + 1
        calls = self.calls.get(key, ())
        return calls[nth] if nth < len(calls) else nth


class Segments:
    """The checkpointed blocks of one model that any thread may still recompute."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Segment]] = {}

    @property
    def some(self) -> bool:
        """Whether there have been any."""
        return bool(self._known)

    def forward(self, here: Any) -> Segment | None:
        """Return the block that a forward is in, if any."""
        owner, reentrant = owner_around(here)
        return None if owner is None else self._of(owner, here, reentrant=reentrant)

    def recompute(self) -> Segment | None:
        """Return the block that is being recomputed, if its forward was seen."""
        owner = _owner("unpack_hook", "frame") or _owner("backward", "ctx")
        known = self._known.get(id(owner))
        return known[1] if known is not None and known[0]() is owner else None

    def _of(self, owner: Any, here: Any, *, reentrant: bool) -> Segment:
        known = self._known.get(id(owner))
        if known is not None and known[0]() is owner:
            return known[1]
        if len(self._known) >= _PRUNE:
            self._known = {k: v for k, v in self._known.items() if v[0]() is not None}
        segment = Segment(here, reentrant=reentrant)
        self._known[id(owner)] = weakref.ref(owner), segment
        return segment


def owner_around(here: Any) -> tuple[Any, bool]:
    """Return the object of the checkpoint around a forward, None without one, and whether it is reentrant."""
    hooks = top_hooks(True)
    if hooks is not None:
        return frame_of(hooks[0]), False
    return (reentrant_around(), True) if here.graded and not torch.is_grad_enabled() else (None, False)


def reentrant_around() -> Any:
    """Return the context of the reentrant checkpoint around a forward; None without one."""
    return _owner("forward", "ctx")


def frame_of(hook: Any) -> Any:
    """Return the frame of the non-reentrant checkpoint that a saved-tensor hook belongs to; None without one."""
    cells = getattr(hook, "__closure__", None) or ()
    return next((c for c in map(content, cells) if _Frame and isinstance(c, _Frame)), None)


def content(cell: Any) -> Any:
    """Return the content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:
        return None


def _owner(function: str, variable: str) -> Any:
    """Return a checkpoint's object from the running frames of PyTorch's checkpoint code; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and frame.f_code.co_filename == checkpoint.__file__:
            return frame.f_locals.get(variable)
        frame = frame.f_back
    return None
