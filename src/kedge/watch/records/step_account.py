"""The list of all tensors saved in one step of a watched program: ``kedge run --saved``."""

from __future__ import annotations

import threading
import weakref
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Protocol

from torch import Tensor, nn

from kedge.hooks.saved.keeper import KeeperInForce, SavingPlace
from kedge.offload.account.recorder import RecordedReference, SaveRecorder
from kedge.offload.rebuild import find
from kedge.stderr import Shield, say
from kedge.store.events import SavedEvent
from kedge.torch_internals.autograd_nodes import RAW
from kedge.torch_internals.graph_task import graph_task
from kedge.torch_internals.module_tables import buffers_in, parameters_in
from kedge.torch_internals.saved_hooks import top_hooks
from kedge.torch_internals.source_lines import line_with


class Labelled(Protocol):
    """A watched model: its own modules, and their recorded paths."""

    types: dict[str, str]

    def label(self, path: str) -> str:
        """Return the recorded path of a module."""


class QuietKeeper(KeeperInForce):
    """A keeper inside the user's program: it warns on stderr, where ``-W error`` does not reach."""

    def step_aside(self, what: str) -> None:
        """Warn without raising; after the listed step, leave."""
        if isinstance(self.keeper, StepAccount) and self.keeper.is_over:
            self.keeper.stop()
        elif what not in self._said and not self.ended:
            self._said.add(what)
            say(f"the list of saved tensors leaves out code under {what}")


class StepAccount:
    """Lists the tensors saved in the first step that saves any.

    It lists those of the models, of the losses, and of all other code.

    In that step a pair of saved-tensor hooks keeps everything in place and checks for in-place
    changes as autograd does. The pair is active to the end of the step; or, where the program has a
    pair of its own active when it calls a model, to the end of that call. A program that may
    register hooks on a saved tensor itself, of which PyTorch allows one pair, has no list.

    # Note [A step that ends in a backward]
    When a backward ends, PyTorch gives its thread back the pairs that it had when the backward
    began. So a pair that is removed during a backward would be in force again after it, where a
    transform of `torch.func` refuses to run. Such a pair stays, does nothing, and leaves with the
    next saved tensor or the next transform.

    Args:
        shield: Runs work that must not end the program.

    Attributes:
        is_over: Whether the listed step is over, or listing has failed.
    """

    sees_recompute = True

    def __init__(self, shield: Shield) -> None:
        self.recorder = SaveRecorder(find, shield=shield)
        self.seconds = 0.0
        self.is_over = False
        self._packing = Shield(
            "listing saved tensors", "the recording has no list of them", on_failure=self._give_up
        )
        self._thread: int | None = None
        self._roots: list[tuple[str, weakref.ref[nn.Module]]] = []
        self._undo = ExitStack()
        self._undo.callback(self.recorder.calls.close)

    def add(self, module: nn.Module, root: Labelled) -> None:
        """Follow a root whose call is active."""
        if self.is_over:
            return
        begun = perf_counter()
        own = None if self._roots else line_with(RAW)
        if own is not None:
            self.is_over = True
            say(
                f"saved tensors are not listed: {own.file}:{own.line} uses {RAW}..., and if "
                "the program registers hooks on one of them, PyTorch would refuse them beside "
                "Kedge's"
            )
            return
        self._roots.append((root.label(""), weakref.ref(module)))
        self._see_owned()
        self.recorder.calls.add(module, root.types, root.label)
        self.recorder.calls.begin(module, root.label(""))
        self._activate(module)
        self.seconds += perf_counter() - begun

    def _activate(self, module: nn.Module) -> None:
        if self._thread == threading.get_ident():
            return  # active already, between the modules too
        keeper = QuietKeeper(module, self, lambda _: True, outside=True, compiled=False)
        self._undo.callback(keeper.end)
        if top_hooks(True) is None:
            self._thread = threading.get_ident()
            keeper.begin()
        else:  # the end of the program's open block removes the top pair, whichever it is
            keeper.here().enter(keeper.spots[""], module)

    def pack(self, value: Tensor, place: SavingPlace) -> RecordedReference | None:
        """Record a saved tensor; it stays in place."""
        if self.is_over:
            self.stop()
            return None
        begun = perf_counter()
        held = self._packing(self.recorder.pack, value, place)
        self.seconds += perf_counter() - begun
        return held

    def _give_up(self) -> None:
        self.is_over = True

    def see(self, value: Tensor, place: SavingPlace) -> None:
        """Record a tensor that a checkpoint recomputes."""
        if not self.is_over:
            begun = perf_counter()
            self._packing(self.recorder.see, value, place)
            self.seconds += perf_counter() - begun

    def beside(self, owner: Any, place: SavingPlace) -> None:
        """Record values that a checkpoint holds without saving them."""
        if not self.is_over:
            self.recorder.beside(owner, place)

    def unpack(self, held: RecordedReference) -> Tensor:
        """Return the saved tensor."""
        return held.read() if self.is_over else self.recorder.unpack(held)

    def close(self, step: int) -> SavedEvent | None:
        """Return the list, if anything was saved so far; else the next step may have one."""
        if self.is_over or not self.recorder.drafts:
            return None
        begun = perf_counter()
        self._see_owned()
        self.stop()
        saved = self.recorder.tensors(roots=[path for path, _ in self._roots])
        account = saved.account()
        self.seconds += perf_counter() - begun
        return SavedEvent.of(account, step=step, seconds=round(self.seconds, 6))

    def stop(self) -> None:
        """Remove every hook, if no backward runs; see Note [A step that ends in a backward]."""
        self.is_over = True
        if graph_task() == -1:
            self._undo.close()

    def _see_owned(self) -> None:
        """Add the parameters and buffers of the models; a forward may have replaced or made some."""
        for _, known in self._roots:
            module = known()
            if module is not None:
                self.recorder.own(parameters_in(module).values(), buffers_in(module).values())
