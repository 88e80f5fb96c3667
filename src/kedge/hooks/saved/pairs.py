"""Kedge's pairs of saved-tensor hooks on one thread, among those of the program.

# Note [One pair that asks all]
PyTorch calls the innermost pair alone, and each thread has its own stack. So each Kedge pair asks
all keepers in force on its thread, and the program's own pair below. The program's pair receives
the tensor first; if it returns a tensor, that goes on to the keepers, anything else stays unchanged
and goes to its unpack. The innermost keeper decides; a tensor that it leaves goes to the next
keeper outside, and one that all leave is kept by reference (Note [By reference]). A keeper's reader
is notified when autograd reads a tensor that the keeper left, also if another has taken it.

# Note [Checkpoints keep nothing]
Inside a checkpointed function autograd saves nothing: it notes which tensors to recompute. So there
the checkpoint's pair acts alone. In its recompute the tensors live briefly: the keepers that watch
see them, and the checkpoint keeps them. Tensor arguments of a checkpoint are saved like other
tensors; tensors inside lists and dicts, and keyword arguments, the checkpoint holds without saving
them, so no hook pair receives them. `kedge.hooks.saved.checkpoint_inputs` offers those to the
keepers.

# Note [A pair in another's place]
Pairs lie on a stack, and a block that ends pops the top, whichever pair that is. If an interrupt
leaves a Kedge pair on top of the program's, the program's block pops Kedge's, and its own stays. So
for a missing Kedge pair, the pair below it is removed in its place.

# Note [Changes within a backward pass]
Autograd runs a backward pass with a copy of the thread's stack, and puts the stack back afterwards.
So a pair that was there before and is removed or replaced within the pass, as by a gradient hook
that ends a session, is on the stack again. The changes are kept, and made once more when the stack
is next rebuilt: with the next tensor that the old pair receives.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils import checkpoint

from kedge.hooks.saved.reference import KeptByReference, UnpackListener
from kedge.torch_internals.checkpoint import make_skippable
from kedge.torch_internals.graph_task import graph_task, in_backward
from kedge.torch_internals.modes import is_fake
from kedge.torch_internals.own_work import OwnWork, is_watched, own_work
from kedge.torch_internals.saved_hooks import disable, disabled, enable, pop, push, top_hooks

Hooks = tuple[Any, Any]


class ActiveKeeper(Protocol):
    """One keeper on one thread."""

    place: Any

    def pack(self, value: Tensor, place: Any) -> Any:
        """Return the object to save in the tensor's place.

        None leaves the tensor to others.
        """

    def see(self, value: Tensor, place: Any) -> None:
        """Called with a tensor that another has taken."""

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that `pack` took."""

    def step_aside(self, what: str) -> None:
        """Warn once that the keeper sees nothing here."""


class JointPacked(NamedTuple):
    """The packed form of a tensor that several keepers saw.

    Attributes:
        packed: The packed object.
        back: The unpack functions, applied in order.
        readers: Notified when autograd reads the tensor.
    """

    packed: Any
    back: tuple[Callable[[Any], Tensor], ...]
    readers: tuple[UnpackListener, ...] = ()

    def read(self) -> Tensor:
        """Notify the readers, and return the tensor, unpacked by each function in turn."""
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
        owner: The owner of the pair: a `KeeperInForce`, or the `SavingPlace` of a module's call.
        below: The program's pair below it; None without one.
        on: The stack entry right below it; None at the bottom.
        hooks: The two functions, as PyTorch has them.
        task: The number of the backward pass in which it was made; -1 outside of one.
    """

    def __init__(
        self, lives: tuple[ActiveKeeper, ...], owner: Any, below: Hooks | None, on: Hooks | None
    ) -> None:
        self.lives = lives
        self.owner = owner
        self.below = below
        self.on = on
        self.task = graph_task()
        self.hooks: Hooks
        if below is None and len(lives) == 1:
            self.hooks = _alone(lives[0])
        elif below is not None and is_checkpoint(below):
            self.hooks = _watching(lives, below)
        else:
            self.hooks = _joint(lives, below)
        make_skippable(self.hooks[0], below)


def _alone(live: ActiveKeeper) -> Hooks:
    """Return the hooks for one keeper: the common case, which must be fast."""

    def pack(value: Tensor) -> Any:
        if is_watched():
            with OwnWork():
                return pack(value)
        if is_fake(value):
            live.step_aside("fake")
            return KeptByReference(value)
        packed = live.pack(value, live.place)
        return KeptByReference(value) if packed is None else packed

    def unpack(packed: Any) -> Tensor:
        if is_watched():
            with OwnWork():
                return unpack(packed)
        return packed.unpack() if type(packed) is KeptByReference else live.unpack(packed)

    return pack, unpack


def _joint(lives: tuple[ActiveKeeper, ...], below: Hooks | None) -> Hooks:
    """Return the hooks for several keepers, or for a pair below.

    See Note [One pair that asks all].
    """

    def pack(value: Tensor) -> Any:
        theirs: Any = value if below is None else below[0](value)
        with own_work():
            return pack_of(value, theirs)

    def pack_of(value: Tensor, theirs: Any) -> JointPacked:
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
        return JointPacked(packed, (_unpack_of(decider), *back), readers)

    return pack, JointPacked.read


def _unpack_of(decider: ActiveKeeper | None) -> Callable[[Any], Tensor]:
    read = KeptByReference.read if decider is None else decider.unpack

    def unpack(packed: Any) -> Tensor:
        with own_work():
            return read(packed)

    return unpack


def _watching(lives: tuple[ActiveKeeper, ...], below: Hooks) -> Hooks:
    """Return hooks that show keepers the recomputed tensors.

    See Note [Checkpoints keep nothing].
    """

    def pack(value: Tensor) -> Any:
        with own_work():
            for live in lives:
                live.see(value, live.place)
        return below[0](value)

    return pack, below[1]


def is_checkpoint(hooks: Hooks) -> bool:
    """Whether a pair belongs to PyTorch's non-reentrant checkpoint: to its forward, or to its recompute."""
    code = getattr(getattr(hooks[0], "__wrapped__", hooks[0]), "__code__", None)
    return code is not None and code.co_filename == checkpoint.__file__


def packed_of(data: Any) -> Any:
    """Return the object packed by a keeper or a foreign pair, given the ``data`` of a raw `SavedTensor`."""
    return data.packed if type(data) is JointPacked else data


class PairChange(NamedTuple):
    """What became of a pair within a backward pass; see Note [Changes within a backward pass].

    Attributes:
        before: The pair, which is on the stack again after the pass.
        after: The pair in its place; None if it was removed.
    """

    before: Pair
    after: Pair | None


class HookPairStack(threading.local):
    """The Kedge pairs on this thread: one object, with separate state for each thread.

    Attributes:
        pairs: The pairs, the outermost first.
        lives: The keepers in force, the innermost last.
        changed: The changes within backward passes, by the id of the old pair's first function.
        lifted: Whether the pairs are off the stack for now.
    """

    def __init__(self) -> None:
        self.pairs: list[Pair] = []
        self.lives: list[ActiveKeeper] = []
        self.changed: dict[int, PairChange] = {}
        self.lifted = False

    def covers(self, live: ActiveKeeper, top: Hooks | None) -> bool:
        """Whether the innermost pair is Kedge's and asks this keeper."""
        pairs = self.pairs
        return (
            bool(pairs)
            and top is not None
            and top[0] is pairs[-1].hooks[0]
            and live in pairs[-1].lives
        )

    def put(self, live: ActiveKeeper, owner: Any, top: Hooks | None) -> None:
        """Push a pair that asks this keeper and all others in force on this thread."""
        if self.pairs or self.changed:
            self.mend()
            top = top_hooks(True)
        if live not in self.lives:
            self.lives.append(live)
        ours = {id(pair.hooks[0]) for pair in self.pairs}
        below = top
        if top is not None and id(top[0]) in ours:
            below = next(pair.below for pair in self.pairs if pair.hooks[0] is top[0])
        pair = Pair(tuple(reversed(self.lives)), owner, below, top)
        self._push(pair)
        for key, (before, after) in self.changed.items():
            if after is None and before.owner is owner:
                self.changed[key] = PairChange(before, pair)

    def _push(self, pair: Pair) -> None:
        push(*pair.hooks)
        self.pairs.append(pair)

    def take(self, owner: Any) -> None:
        """Remove every pair of an owner."""
        pairs = self.pairs
        top = top_hooks(True)
        if pairs and pairs[-1].owner is owner and top is not None and top[0] is pairs[-1].hooks[0]:
            pop()
            self._note(pairs.pop(), None)
            if not any(pair.owner is owner for pair in pairs):
                return
        self._rebuild(lambda pair: None if pair.owner is owner else pair)

    def leave(self, live: ActiveKeeper) -> None:
        """Remove a keeper from all pairs."""
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
        """Repair the stack after pairs popped in another's place.

        See Note [A pair in another's place].
        """
        self._rebuild(lambda pair: pair)

    def _rebuild(self, keep: Callable[[Pair], Pair | None]) -> None:
        """Pass the Kedge pairs on the stack through a function that keeps, replaces or drops each."""
        if self.lifted:
            kept = map(keep, self.pairs)
            self.pairs = [pair for pair in kept if pair is not None]
            return
        # A transform that failed midway disables the hooks: Kedge's pairs are still on the stack.
        why = disabled()
        if why is not None:
            enable()
        try:
            self._restack(keep)
        finally:
            if why is not None:
                disable(why, False)

    def _note(self, before: Pair, after: Pair | None) -> None:
        """Note a change within a backward pass, which autograd undoes unless the pair was made in the pass."""
        if graph_task() not in (-1, before.task):
            self.changed[id(before.hooks[0])] = PairChange(before, after)

    def _restack(self, keep: Callable[[Pair], Pair | None]) -> None:
        stack = drain()
        there = {id(hooks[0]) for hooks in stack}
        ours = self._ours()
        reached = {id(ours[key]) for key in there & ours.keys()}
        lost = [pair for pair in self.pairs if id(pair) not in reached]
        for pair in [*lost, *self._removed_and_popped(ours, there)]:
            if pair.on is not None and id(pair.on[0]) not in ours:
                for at in reversed(range(len(stack))):
                    if stack[at][0] is pair.on[0]:
                        del stack[at]
                        break
        self.pairs = []
        for hooks in stack:
            if id(hooks[0]) not in ours:
                push(*hooks)
            elif (own := ours[id(hooks[0])]) is not None:
                kept = keep(own)
                if kept is not None:
                    self._push(kept)
                if kept is not own:
                    self._note(own, kept)
        if not in_backward():
            self.changed.clear()

    def _ours(self) -> dict[int, Pair | None]:
        """Return the pair that stands for each of Kedge's on the stack now, by the id of its first function; None for none."""
        known = {id(pair.hooks[0]): pair for pair in self.pairs}
        ours: dict[int, Pair | None] = {}
        for key, change in self.changed.items():
            now = change.after
            while now is not None and id(now.hooks[0]) in self.changed:
                now = self.changed[id(now.hooks[0])].after
            ours[key] = None
            if now is not None:
                ours[key] = known.get(id(now.hooks[0]))
        return {**ours, **known}

    def _removed_and_popped(self, ours: dict[int, Pair | None], there: set[int]) -> list[Pair]:
        """Return the pairs that a backward pass put back, and that a block has popped since."""
        if in_backward():
            return []
        replacing = (change.after for change in self.changed.values())
        later = {id(pair.hooks[0]) for pair in replacing if pair is not None}
        return [
            change.before
            for key, change in self.changed.items()
            if key not in later and key not in there and ours[key] is None
        ]

    def lift(self) -> list[Pair | Hooks]:
        """Remove all Kedge pairs until `lower`.

        Returns the stack that `lower` needs.
        """
        self.mend()
        known = {id(pair.hooks[0]): pair for pair in self.pairs}
        stack = [known.get(id(hooks[0]), hooks) for hooks in drain()]
        for entry in stack:
            if not isinstance(entry, Pair):
                push(*entry)
        self.lifted = True
        return stack

    def lower(self, stack: list[Pair | Hooks]) -> None:
        """Push the pairs again that `lift` removed, except those that have ended since."""
        drain()
        self.lifted = False
        now = {(id(pair.owner), id(pair.on)): pair for pair in self.pairs}
        for entry in stack:
            if not isinstance(entry, Pair):
                push(*entry)
            elif (pair := now.get((id(entry.owner), id(entry.on)))) is not None:
                push(*pair.hooks)


def drain() -> list[Hooks]:
    """Empty this thread's stack of pairs; returns the pairs, the outermost first."""
    stack: list[Hooks] = []
    while (top := top_hooks(True)) is not None:
        stack.append(top)
        pop()
    return stack[::-1]


pair_stack = HookPairStack()
