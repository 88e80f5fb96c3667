"""Keepers, which decide over the tensors that autograd saves while modules of a model run.

`keep` puts a `Keeper` in force and returns an object that ends it::

    class Mine:                                        # a Keeper
        def pack(self, value, place): ...              # None: leave it where it is (by reference,
        version checked) def unpack(self, packed): ...                  # gets what pack returned,
        never None

    with ExitStack() as stack:
        keep(stack, model, Mine(), ambient=True)
        loss_fn(model(x), y).backward()

`kedge.hooks.saved.pairs` describes how the hook pair behaves among others.

# Note [Which module is the innermost]
Each module has hooks that note the beginning and the end of its calls, as Note [Calls under way] in
`kedge.hooks.placing.module_calls` describes. What an interrupt leaves goes with the next call of
the model, or with the end of the block.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kedge.errors import SavedAside, warn
from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.installed import ConcealedHook, InstalledHooks
from kedge.hooks.placing.module_calls import OpenCalls
from kedge.hooks.saved import torch_func
from kedge.hooks.saved.checkpoint_inputs import PendingCheckpoints
from kedge.hooks.saved.pairs import is_checkpoint, pair_stack
from kedge.sites.select import ModelLayout, runs
from kedge.torch_internals import dynamo
from kedge.torch_internals.checkpoint import frame_of, reentrant_around
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import graph_task
from kedge.torch_internals.saved_hooks import disabled, top_hooks
from kedge.torch_internals.torchscript import takes_hooks

_ASIDE = {
    "torch.func": (
        "saved tensors are ignored inside a torch.func transform, which runs without "
        "saved-tensor hooks: the tensors it saves stay in place"
    ),
    "torch.compile": (
        "a compiled module saves through a single operation: Kedge sees its saved "
        "tensors after its whole graph has run; they count for the module around it, "
        "and are all read when its backward begins"
    ),
    "fake": (
        "a FakeTensor holds no data, so the tensors saved under a FakeTensorMode stay in place"
    ),
}


class Keeper(Protocol):
    """Decides over saved tensors. Called from any thread; `pack` in the forward, `unpack` in the backward.

    Optional: with ``watches = True`` and a method ``see(value, place)`` it also receives the
    tensors that another keeper or a foreign pair has taken, and those that a checkpoint recomputes;
    with ``sees_recompute = True`` it receives the latter, and may decide over all others. The
    methods ``beside``, ``stays`` and ``passed`` are optional, too; see
    `kedge.hooks.saved.checkpoint_inputs.PendingCheckpoints`.
    """

    def pack(self, value: Tensor, place: SavingPlace) -> Any:
        """Called when autograd saves a tensor; takes it or leaves it.

        Args:
            value: The very tensor, with its graph. Holding it would make a reference cycle: hold
                ``value.detach()``.
            place: Where it is saved; a new object for each call of a module, which may be held.

        Returns:
            The object to save in its place; None, or a
            `kedge.hooks.saved.reference.KeptByReference`, leaves the tensor where it is. The next
            keeper outside may then take it; if none does, it is kept by reference and its version
            checked. The reader of the `KeptByReference` is notified when autograd reads the tensor,
            whichever keeper holds it then.
        """

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor that `pack` took.

        Called for each read by a backward, on any thread.
        """


class SavingPlace:
    """Where a tensor is saved: in which call of which module.

    Attributes:
        path: The path of the innermost module of the model with an active call on this thread; None
            outside of all.
        call: Which call of the module within the model's forward pass, from 0.
        selected: Whether the selection covers this module (for `path` None: the tensors saved
            outside of all modules).
        recompute: Whether a checkpoint's recompute runs this call a second time.
        saves: A number for the keeper's own use, 0 when the call begins.
        spot: The module under this keeper; ``spot.gate`` is the keeper's own.
    """

    __slots__ = ("__weakref__", "call", "path", "placed", "recompute", "saves", "selected", "spot")

    def __init__(self, spot: ModuleUnderKeeper, call: int, *, recompute: bool) -> None:
        self.spot = spot
        self.path = spot.path
        self.selected = spot.selected
        self.call = call
        self.recompute = recompute
        self.saves = 0
        self.placed = False


class ModuleUnderKeeper:
    """One module of a model under one keeper."""

    __slots__ = ("gate", "path", "root", "selected")

    def __init__(self, path: str | None, *, selected: bool, root: bool = False) -> None:
        self.path = path
        self.selected = selected
        self.root = root
        self.gate: Any = None


class KeeperCalls(OpenCalls[SavingPlace]):
    """One keeper on one thread, with the active calls there.

    The note on a call is where it saves.

    Attributes:
        asleep_in: The module of a call that saves nothing to keep: the keeper does not follow the
            calls inside. None as a rule.
    """

    def __init__(self, kept: KeeperInForce) -> None:
        super().__init__()
        self.kept = kept
        keeper = kept.keeper
        self.outside = self.place = SavingPlace(kept.outside, 0, recompute=False)
        self.watches: bool = getattr(keeper, "watches", False) or getattr(
            keeper, "sees_recompute", False
        )
        self.pack: Callable[[Tensor, SavingPlace], Any] = keeper.pack
        self.unpack: Callable[[Any], Tensor] = keeper.unpack
        self.see: Callable[[Tensor, SavingPlace], None] = _nothing
        if self.watches:
            self.see = getattr(keeper, "see", _nothing)
        self.waiting = PendingCheckpoints(self, keeper)
        self.asleep_in: nn.Module | None = None
        self.ended = self.graded = False

    def enter(self, spot: ModuleUnderKeeper, module: nn.Module) -> None:
        """Called when a module's call begins."""
        task = graph_task()
        if spot.root and task == -1:
            self._begin_pass()
        call, recompute = self.kept.count(self, spot, task)
        place = SavingPlace(spot, call, recompute=recompute)
        top = top_hooks(True)
        if not pair_stack.covers(self, top):
            place.placed = self._put(place, top)
        if self.graded and task == -1 and not torch.is_grad_enabled():
            self._pass(reentrant_around(), place)
        self.begin(module, place)
        self.place = place

    def _begin_pass(self) -> None:
        """Begin a forward pass of the model, unless the model calls itself."""
        if self.called:
            self.forget_interrupted()
        if not self.called:
            self.counts.clear()
            self.graded = torch.is_grad_enabled()

    def _put(self, place: SavingPlace, top: Any) -> bool:
        """Push a hook pair for the length of a call; returns whether it did."""
        if disabled() is not None:
            self.step_aside("torch.func")
            return False
        if top is not None and is_checkpoint(top) and not (self.watches and graph_task() != -1):
            if graph_task() == -1 and self.asleep_in is None:
                self._pass(frame_of(top[0]), place)
            return False  # see Note [Checkpoints keep nothing]
        pair_stack.put(self, place, top)
        return True

    def _pass(self, owner: Any, place: SavingPlace) -> None:
        """Called when a module's call begins in a checkpoint's forward."""
        if owner is not None:
            self.waiting.add(owner, self.place)
            self.waiting.passed(place)

    def leave(self, module: nn.Module) -> None:
        """Called when a module's call ends."""
        ended = self.end(module)
        if ended is not None:
            if ended.placed:
                self._take(ended)
            self.place = self.notes[-1] if self.notes else self.outside
        if self.waiting.known and disabled() is None:
            self.waiting.left([self.outside, *self.notes] if self.notes else [])

    def cut(self, at: int) -> bool:
        """Remove all calls from an index on, with their hook pairs.

        Returns whether there were any.
        """
        lost = self.notes[at:]
        there_were = super().cut(at)
        for place in reversed(lost):
            if place.placed:
                self._take(place)
        self.place = self.notes[-1] if self.notes else self.outside
        return there_were

    def _take(self, place: SavingPlace) -> None:
        """Remove the hook pair of a call.

        Without any, this keeper is no longer in force on this thread.
        """
        pair_stack.take(place)
        if not any(self in pair.lives for pair in pair_stack.pairs):
            pair_stack.leave(self)

    def step_aside(self, what: str) -> None:
        """Warn once that the keeper sees nothing here."""
        self.kept.step_aside(what)

    def stop(self) -> None:
        """Stop asking the keeper on this thread.

        Pairs on another thread's stack are removed at their next use.
        """
        self.ended = True
        self.pack = self._expired
        self.see = _nothing

    def clear(self) -> None:
        """Remove all pairs of this keeper from the calling thread's stack."""
        self.called.clear()
        self.notes.clear()
        self.place = self.outside
        pair_stack.take(self.kept)
        pair_stack.leave(self)

    def _expired(self, value: Tensor, place: SavingPlace) -> None:
        self.clear()


def _nothing(*args: Any) -> None:
    return None


class _Threads(threading.local):
    live: KeeperCalls | None = None


class SavingBegins(KedgeHook):
    """Forward-pre hook that notes the beginning of a module's call."""

    def __init__(self, kept: KeeperInForce, spot: ModuleUnderKeeper) -> None:
        self.kept = kept
        self.spot = spot

    def __call__(self, module: nn.Module, args: Any) -> None:
        """Forward-pre hook."""
        if torch.compiler.is_compiling() or self.kept.idle:
            return
        live = self.kept.threads.live or self.kept.here()
        if live.asleep_in is None or live.asleep_in is module:
            live.enter(self.spot, module)


class SavingEnds(KedgeHook):
    """Forward hook that notes the end of a module's call."""

    def __init__(self, kept: KeeperInForce) -> None:
        self.kept = kept

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook."""
        live = self.kept.threads.live
        if live is None or torch.compiler.is_compiling():
            return
        if live.asleep_in is None or (live.called and live.called[-1] is module):
            live.leave(module)


def number(live: KeeperCalls, spot: ModuleUnderKeeper, task: int) -> tuple[int, bool]:
    """Return the number of a module's call within the model's forward pass, and whether it is a recompute.

    Calls of a recompute continue the count.
    """
    return live.count(spot), task != -1


class KeeperInForce:
    """One keeper in force over one model, until `end`.

    Attributes:
        ended: Whether the keeper has ended.
        idle: Whether the keeper needs nothing for now: module calls then push no hook pair.
        compiled: Whether the model, or a module of it, is compiled.
        spots: The modules of the model, by path.
    """

    def __init__(
        self,
        model: nn.Module,
        keeper: Keeper,
        places: Callable[[str], bool],
        *,
        outside: bool,
        compiled: bool,
    ) -> None:
        self.keeper = keeper
        self.outside = ModuleUnderKeeper(None, selected=outside)
        self.count: Callable[[KeeperCalls, ModuleUnderKeeper, int], tuple[int, bool]] = number
        self.threads = _Threads()
        self.ended = self.idle = False
        self.spots: dict[str, ModuleUnderKeeper] = {}
        self.installed = InstalledHooks()
        self._lives: weakref.WeakSet[KeeperCalls] = weakref.WeakSet()
        self._said: set[str] = set()
        root = dynamo.unwrap(model)
        layout = ModelLayout(root)
        modules = (model, *layout.modules.values())
        self.compiled = compiled or any(map(dynamo.compiles, modules))
        with ExitStack() as attached:
            self._undo = attached
            torch_func.begin()
            self._undo.callback(torch_func.end)
            for path, module in layout.modules.items():
                if layout.first[id(module)] == path and runs(module) and takes_hooks(module):
                    is_root = module is root
                    spot = ModuleUnderKeeper(path, selected=places(path), root=is_root)
                    self._attach(module, spot)
            if self.compiled:
                self.step_aside("torch.compile")
            self._undo = attached.pop_all()

    def here(self) -> KeeperCalls:
        """This keeper on the calling thread."""
        live = self.threads.live
        if live is None:
            live = self.threads.live = KeeperCalls(self)
            self._lives.add(live)
        return live

    def begin(self) -> None:
        """Put the keeper in force on this thread outside of module calls, too, until the end."""
        live = self.here()
        top = top_hooks(True)
        if disabled() is not None:
            self.step_aside("torch.func")
        elif top is None or not is_checkpoint(top):
            pair_stack.put(live, self, top)

    def end(self) -> None:
        """Remove the keeper with all its hooks.

        Packed tensors stay readable. A second call does nothing.
        """
        if self.ended:
            return
        self.ended = self.idle = True
        for live in list(self._lives):
            live.stop()
        if (here := self.threads.live) is not None:
            here.clear()
        self._undo.close()

    def out(self) -> None:
        """Remove all hooks until `back`, and this keeper's pairs on the calling thread."""
        self.installed.out()
        if (here := self.threads.live) is not None:
            here.clear()

    def back(self) -> None:
        """Put the hooks back that `out` removed."""
        self.installed.back()

    def remove(self) -> None:
        """Remove the keeper, as `end` does."""
        self.end()

    def spot(self, path: str, module: nn.Module) -> ModuleUnderKeeper:
        """Return a module's entry under this keeper.

        Attaches to a module that joined the model later.
        """
        if path not in self.spots:
            self._attach(module, ModuleUnderKeeper(path, selected=True))
        return self.spots[path]

    def step_aside(self, what: str) -> None:
        """Warn, once for each reason, that this keeper sees nothing there."""
        captured = (
            what == "fake" and torch.compiler.is_compiling()
        )  # export or Dynamo captures it; nothing of it runs
        if what not in self._said and not self.ended and not captured:
            self._said.add(what)
            warn(SavedAside(_ASIDE[what]))

    def _attach(self, module: nn.Module, spot: ModuleUnderKeeper) -> None:
        self.spots[spot.path or ""] = spot
        if not takes_hooks(module):
            return
        enter = module.register_forward_pre_hook(SavingBegins(self, spot))
        leave = module.register_forward_hook(SavingEnds(self), always_call=True)
        for handle in (enter, leave):
            self._undo.callback(self.installed.add(ConcealedHook(handle)))


def keep(
    stack: ExitStack,
    model: nn.Module,
    keeper: Keeper,
    *,
    places: Callable[[str], bool] = lambda path: True,
    outside: bool = True,
    ambient: bool,
    compiled: bool = False,
) -> KeeperInForce:
    """Put a keeper in force over what autograd saves.

    The keeper receives the tensors saved on every thread that calls a module of the model, for the
    length of that call. With `ambient` it receives those of this thread all the time, and so also
    tensors saved between modules, such as by a functional loss. It receives *every* tensor saved
    there, also where `places` returns False; ``place.selected`` holds that result, so that a keeper
    can count the tensors it does not take.

    It does not receive tensors of a `FakeTensor` mode, nor those saved inside a transform of
    `torch.func` or a checkpointed function (which save nothing that lasts). A `SavedAside` warning
    reports a fake mode, a transform and a compiled module once each.

    Args:
        stack: Receives the keeper's end: ``stack.close()`` removes everything, on all threads.
            Packed tensors can still be unpacked afterwards.
        model: The model, compiled or not.
        keeper: The keeper.
        places: Which modules are selected, by path: ``""`` for the model itself, the first of
            several names.
        outside: Whether tensors saved outside of all modules of the model are selected.
        ambient: Whether the keeper is in force on this thread between module calls, too.
        compiled: Whether the model is known to be compiled, where `model` does not show it.

    Returns:
        The `KeeperInForce`: ``kept.end()`` ends it early.
    """
    kept = KeeperInForce(model, keeper, places, outside=outside, compiled=compiled)
    stack.callback(kept.end)
    if ambient:
        kept.begin()
    return kept


untraced(SavingBegins.__call__, SavingEnds.__call__)
