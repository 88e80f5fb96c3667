"""The pairs of saved-tensor hooks that Kedge has in force on one thread, among those of the program.

# Note [One pair that asks all]
PyTorch calls the innermost pair alone, and each thread has its own. So each of our pairs asks all
keepers that are in force on its thread, and the program's own pair below: that gets the tensor
first; a tensor that it returns goes on to the keepers, anything else stays as it is and goes to its
unpack. The innermost keeper decides; what it leaves alone is offered to the next one outside, and
what all leave alone is kept by reference (Note [By reference]). Who is to be told that autograd asks for what it
left alone is told, whoever has taken it.

# Note [Checkpoints keep nothing]
Inside a checkpointed function autograd saves nothing: it notes what will be made again. So there the
checkpoint's pair acts alone. In its recompute the tensors live for a moment: they are shown to those who
watch, and left to the checkpoint. Its arguments are saved like other tensors if they are tensors themselves; those inside
lists and dicts, and keyword arguments, the checkpoint holds without saving them, so no pair of hooks is asked: how a keeper
comes to them is in `kedge.hooks.saved.checkpoint_inputs`.

# Note [A pair in another's place]
Pairs lie on a stack, and a block that ends takes off the top, whatever it is. If an interrupt leaves one of
ours on top of the program's, the program's block takes ours off, and its own stays. So a pair of ours that
is gone stands for the one it lay on, which is taken off for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils import checkpoint

from kedge.hooks.saved.reference import KeptByReference, UnpackListener
from kedge.torch_internals.checkpoint import make_skippable
from kedge.torch_internals.modes import is_fake
from kedge.torch_internals.saved_hooks import disable, disabled, enable, pop, push, top_hooks

Hooks = tuple[Any, Any]


class ActiveKeeper(Protocol):
    """One keeper on one thread."""

    place: Any

    def pack(self, value: Tensor, place: Any) -> Any:
        """Decide; None leaves the tensor to others."""

    def see(self, value: Tensor, place: Any) -> None:
        """Be shown a tensor on which another has decided."""

    def unpack(self, packed: Any) -> Tensor:
        """Give back what `pack` took."""

    def step_aside(self, what: str) -> None:
        """Say once that nothing is seen here."""


class JointPacked(NamedTuple):
    """What stands in a saved tensor's place where several had a say: what one packed, the ways back, who is told."""

    packed: Any
    back: tuple[Callable[[Any], Tensor], ...]
    readers: tuple[UnpackListener, ...] = ()

    def read(self) -> Tensor:
        """Give the tensor back, through each in turn."""
        for reader in self.readers:
            reader.unpacked()
        *others, last = self.back
        value = self.packed
        for unpack in others:
            value = unpack(value)
        return last(value)


class Pair:
    """A pair of hooks on the stack of one thread.

    Attributes:
        lives: The keepers it asks, the innermost first.
        owner: Who put it there: the keep of a block, or the call of a module.
        on: The entry of the stack that it was put on; None at the bottom.
        hooks: The two functions, as PyTorch has them.
    """

    def __init__(self, lives: tuple[ActiveKeeper, ...], owner: Any, below: Hooks | None, on: Hooks | None) -> None:
        self.lives, self.owner, self.below, self.on = lives, owner, below, on
        self.hooks: Hooks
        if below is None and len(lives) == 1:
            self.hooks = _alone(lives[0])
        elif below is not None and is_checkpoint(below):
            self.hooks = _watching(lives, below)
        else:
            self.hooks = _joint(lives, below)
        make_skippable(self.hooks[0], below)


def _alone(live: ActiveKeeper) -> Hooks:
    """The common case, and the one that has to be fast."""

    def pack(value: Tensor) -> Any:
        if is_fake(value):
            live.step_aside("fake")
            return KeptByReference(value)
        packed = live.pack(value, live.place)
        return KeptByReference(value) if packed is None else packed

    def unpack(packed: Any) -> Tensor:
        return packed.unpack() if type(packed) is KeptByReference else live.unpack(packed)

    return pack, unpack


def _joint(lives: tuple[ActiveKeeper, ...], below: Hooks | None) -> Hooks:
    """Ask several; see Note [One pair that asks all]."""

    def pack(value: Tensor) -> Any:
        theirs: Any = value if below is None else below[0](value)
        back = () if below is None else (below[1],)
        if not isinstance(theirs, Tensor):
            for live in lives if not is_fake(value) else ():
                live.see(value, live.place)
            return JointPacked(theirs, back)
        packed: Any = None
        decider: ActiveKeeper | None = None
        readers: tuple[UnpackListener, ...] = ()
        for live in lives:
            if is_fake(theirs):
                live.step_aside("fake")
            elif decider is not None:
                live.see(value, live.place)
            else:
                packed = live.pack(theirs, live.place)
                decider = None if packed is None or type(packed) is KeptByReference else live
                if type(packed) is KeptByReference and packed.reader is not None:
                    readers = (*readers, packed.reader)
        if decider is None:
            packed = packed if type(packed) is KeptByReference else KeptByReference(theirs)
        return JointPacked(packed, (_way_back(decider), *back), readers)

    return pack, JointPacked.read


def _way_back(decider: ActiveKeeper | None) -> Callable[[Any], Tensor]:
    return KeptByReference.read if decider is None else decider.unpack


def _watching(lives: tuple[ActiveKeeper, ...], below: Hooks) -> Hooks:
    """Show what a checkpoint makes again; see Note [Checkpoints keep nothing]."""

    def pack(value: Tensor) -> Any:
        for live in lives:
            live.see(value, live.place)
        return below[0](value)

    return pack, below[1]


def is_checkpoint(hooks: Hooks) -> bool:
    """Whether a pair belongs to PyTorch's non-reentrant checkpoint: to its forward, or to its recompute."""
    code = getattr(getattr(hooks[0], "__wrapped__", hooks[0]), "__code__", None)
    return code is not None and code.co_filename == checkpoint.__file__


def packed_of(data: Any) -> Any:
    """Return what a keeper or a foreign pair made of a saved tensor, given the ``data`` of a raw `SavedTensor`."""
    return data.packed if type(data) is JointPacked else data


class HookPairStack(threading.local):
    """The pairs of ours on this thread; there is one object, which each thread sees its own state of."""

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.lives: list[ActiveKeeper] = []
        self.lifted = False

    def covers(self, live: ActiveKeeper, top: Hooks | None) -> bool:
        """Whether the innermost pair is ours and asks this keeper."""
        pairs = self.pairs
        return bool(pairs) and top is not None and top[0] is pairs[-1].hooks[0] and live in pairs[-1].lives

    def put(self, live: ActiveKeeper, owner: Any, top: Hooks | None) -> None:
        """Put a pair on the stack that asks this keeper and all others in force here."""
        if self.pairs:
            self.mend()
        if live not in self.lives:
            self.lives.append(live)
        ours = {id(pair.hooks[0]) for pair in self.pairs}
        below = top
        if top is not None and id(top[0]) in ours:
            below = next(pair.below for pair in self.pairs if pair.hooks[0] is top[0])
        self._push(Pair(tuple(reversed(self.lives)), owner, below, top))

    def _push(self, pair: Pair) -> None:
        push(*pair.hooks)
        self.pairs.append(pair)

    def take(self, owner: Any) -> None:
        """Take off every pair that this owner has put there."""
        pairs = self.pairs
        top = top_hooks(True)
        if pairs and pairs[-1].owner is owner and top is not None and top[0] is pairs[-1].hooks[0]:
            pop()
            pairs.pop()
            if not any(pair.owner is owner for pair in pairs):
                return
        self._rebuild(lambda pair: None if pair.owner is owner else pair)

    def leave(self, live: ActiveKeeper) -> None:
        """Ask a keeper no longer, in whichever pair."""
        if live in self.lives:
            self.lives.remove(live)

        def without(pair: Pair) -> Pair | None:
            if live not in pair.lives:
                return pair
            others = tuple(other for other in pair.lives if other is not live)
            return Pair(others, pair.owner, pair.below, pair.on) if others else None

        if any(live in pair.lives for pair in self.pairs):
            self._rebuild(without)

    def mend(self) -> None:
        """Make good for pairs that were taken off in another's place; see Note [A pair in another's place]."""
        self._rebuild(lambda pair: pair)

    def _rebuild(self, keep: Callable[[Pair], Pair | None]) -> None:
        """Pass our pairs on the stack through a function that keeps, replaces or drops each."""
        if self.lifted:
            self.pairs = [kept for pair in self.pairs if (kept := keep(pair)) is not None]
            return
        if (why := disabled()) is not None:  # by a transform that failed in the middle: what is ours is still there
            enable()
        try:
            self._restack(keep)
        finally:
            if why is not None:
                disable(why, False)

    def _restack(self, keep: Callable[[Pair], Pair | None]) -> None:
        stack = drain()
        there = {id(hooks[0]) for hooks in stack}
        known = {id(pair.hooks[0]): pair for pair in self.pairs}
        for pair in self.pairs:
            if id(pair.hooks[0]) not in there and pair.on is not None and id(pair.on[0]) not in known:
                at = next((i for i in reversed(range(len(stack))) if stack[i][0] is pair.on[0]), None)
                if at is not None:
                    del stack[at]
        self.pairs = []
        for hooks in stack:
            ours = known.get(id(hooks[0]))
            if ours is None:
                push(*hooks)
            elif (kept := keep(ours)) is not None:
                self._push(kept)

    def lift(self) -> list[Pair | Hooks]:
        """Take all pairs of ours off for a while; returns what `lower` needs to put them back."""
        self.mend()
        known = {id(pair.hooks[0]): pair for pair in self.pairs}
        stack = [known.get(id(hooks[0]), hooks) for hooks in drain()]
        for entry in stack:
            if not isinstance(entry, Pair):
                push(*entry)
        self.lifted = True
        return stack

    def lower(self, stack: list[Pair | Hooks]) -> None:
        """Put back what `lift` took off, but for what has ended since."""
        drain()
        self.lifted = False
        now = {(id(pair.owner), id(pair.on)): pair for pair in self.pairs}
        for entry in stack:
            if not isinstance(entry, Pair):
                push(*entry)
            elif (pair := now.get((id(entry.owner), id(entry.on)))) is not None:
                push(*pair.hooks)


def drain() -> list[Hooks]:
    """Empty this thread's stack of pairs; returns them, the outermost first."""
    stack: list[Hooks] = []
    while (top := top_hooks(True)) is not None:
        stack.append(top)
        pop()
    return stack[::-1]


lane = HookPairStack()
