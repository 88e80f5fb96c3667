"""The modules that `kedge.offload` recomputes: hooks that begin and end a checkpoint around each call.

# Note [Order of the hooks]
The pre-hook goes before all others of the module: the second run calls the module with the inputs
that the pre-hook saw, and runs the others again. The forward hook goes before all others, too, and
the second run ends there, so others do not run a second time.

# Note [Modules inside]
A named module may call another one, or itself. The inner call has a checkpoint of its own, in the
second run of the outer call as in its first, or PyTorch counts other tensors. So a second run puts
the hooks in force for its length, if the block of the offload is over.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from kedge.hooks.placing.call_brackets import bracket
from kedge.hooks.placing.module_calls import OpenCalls
from kedge.hooks.saved.keeper import KeeperCalls, KeeperInForce
from kedge.offload.engine.policy import PlannedCall
from kedge.offload.held.steps import is_compared
from kedge.offload.outcomes import OffloadAccount
from kedge.offload.recompute.call import RecomputedCall
from kedge.offload.recompute.inputs import CallInputs
from kedge.offload.recompute.state import EarlierCalls
from kedge.torch_internals.checkpoint import BegunCheckpoint, Stopped, is_in_checkpoint
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.modes import has_data, is_transforming, is_under_jit
from kedge.torch_internals.module_calls import has_raised, module_frame, raised_from
from kedge.torch_internals.own_work import own_work
from kedge.torch_internals.random_state import RandomState
from kedge.torch_internals.saved_hooks import disabled


class _Frames(threading.local):
    """The calls on each thread that have a checkpoint, or are second runs, by the ids of their frames.

    A module that two offloads name has the checkpoint of one.
    """

    def __init__(self) -> None:
        self.taken: set[int] = set()


_frames = _Frames()


class _Run(NamedTuple):
    """A run of a call of a named module.

    Attributes:
        frame: The id of the frame of the module's call.
        call: The call that is to be run again, or runs again; None for another one.
        checkpoint: The checkpoint; None for a second run.
        planned: What was planned for it; None: it is run again in any case.
        asleep: The keepers that it lets sleep: what is saved inside is the checkpoint's.
    """

    frame: int
    call: RecomputedCall | None = None
    checkpoint: BegunCheckpoint | None = None
    planned: PlannedCall | None = None
    asleep: tuple[KeeperCalls, ...] = ()

    @property
    def is_followed(self) -> bool:
        """Whether its end is of interest."""
        return self.call is not None or self.planned is not None

    def wake(self) -> None:
        """Let the keepers follow calls again."""
        for live in self.asleep:
            live.asleep_in = None


class _Calls(OpenCalls[_Run]):
    """The calls of named modules on one thread."""

    def is_begun(self, module: nn.Module) -> bool:
        """Whether the call of a module that has raised the error at hand is among these.

        It is not if a hook before that of this offload has raised it.
        """
        for called, note in zip(reversed(self.called), reversed(self.notes), strict=True):
            if called is module:
                return raised_from(note.frame)
        return False

    def cut(self, at: int) -> bool:
        """Remove all calls from an index on, and end their checkpoints; returns whether there were any."""
        for note in reversed(self.notes[at:]):
            note.wake()
            if note.call is not None:
                _frames.taken.discard(note.frame)
            if note.checkpoint is not None:
                note.checkpoint.abandon()
            if note.planned is not None:
                note.planned.end()
        return super().cut(at)


class _Thread(threading.local):
    """What goes on on each thread.

    Attributes:
        open: The calls of named modules.
        next: The call whose second run calls its module next; None if there is none.
        random: The states of Python's and NumPy's generators when the last call began; None before
            the first.
        spent: The seconds of second runs inside the current one.
    """

    def __init__(self) -> None:
        self.open = _Calls()
        self.next: RecomputedCall | None = None
        self.random: RandomState | None = None
        self.spent = 0.0


class RecomputedModules:
    """The named modules of one offload.

    Args:
        modules: The modules, by their paths.
        account: Counts their calls.
        plan: Returns what is planned for a call of the module with a path that begins; None: all
            calls are run again.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        account: OffloadAccount,
        plan: Callable[[str], PlannedCall] | None,
    ) -> None:
        self._account = account
        self._plan = plan
        self._thread = _Thread()
        self._keepers: list[KeeperInForce] = []
        self._named = {path: NamedModule(path, module, self) for path, module in modules.items()}
        self._forwards = 0

    def begin_forward(self) -> None:
        """Called when the model is called."""
        calls = self._thread.open
        if calls.called:
            # The pair of an interrupted call would take what modules save that are not named.
            calls.forget_interrupted(begun=True)
        if torch.is_grad_enabled() and not in_backward():
            self._forwards += 1

    def put_in_force(self, stack: ExitStack, kept: KeeperInForce) -> None:
        """Recompute calls of the modules until the stack closes; calls of before can be recomputed later, too.

        Args:
            stack: Ends it.
            kept: The keeper of the saved tensors outside of these calls.
        """
        stack.callback(self._forget)
        self._keepers.append(kept)
        stack.callback(self._keepers.remove, kept)
        for named in self._named.values():
            stack.enter_context(named.hooked())

    def _forget(self) -> None:
        """End what an interrupt has left on this thread."""
        self._thread.open.cut(0)

    def begin(self, named: NamedModule, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Begin a call of a module."""
        thread = self._thread
        calls = thread.open
        around = module_frame(sys._getframe(1))
        again = thread.next
        if again is not None and again.module is module:
            thread.next = None
            calls.begin(module, _Run(id(around), again, asleep=self._put_to_sleep(module)))
            _frames.taken.add(id(around))
            return
        if calls.called:
            calls.forget_interrupted()
        # Already here: PyTorch ends this call also if a second run around it stops below.
        calls.begin(module, _Run(id(around)))
        if not self._applies() or id(around) in _frames.taken:
            return
        inputs = CallInputs(args, kwargs)
        if not all(map(has_data, inputs.tensors)):
            return

        planned = self._planned(named.path)
        if planned is not None and not planned.again:
            planned.begin()
            calls.notes[-1] = _Run(id(around), planned=planned)
            return
        with own_work():
            thread.random = RandomState(thread.random)
            call = RecomputedCall(
                module,
                named.path,
                inputs,
                named.earlier,
                thread.random,
                self._account.row(named.path),
                self._as_second_run,
                planned,
                proven=self._is_proven(named),
            )
            tensors = inputs.take()
            tensors += call.devices_beside(tensors)
        checkpoint = BegunCheckpoint(
            call.run,
            tensors,
            around,
            whole=call.proven,
            see=call.see,
            explained=call.explained,
            written=call.written,
        )
        asleep = self._put_to_sleep(module)
        calls.notes[-1] = _Run(id(around), call, checkpoint, planned, asleep)
        _frames.taken.add(id(around))
        if planned is not None:
            planned.begin()

    def _put_to_sleep(self, module: nn.Module) -> tuple[KeeperCalls, ...]:
        """Let the keepers on this thread follow no calls inside a call of a module; returns them."""
        asleep = []
        for kept in self._keepers:
            live = kept.here()
            if live.asleep_in is None:
                live.asleep_in = module
                asleep.append(live)
        return tuple(asleep)

    def _planned(self, path: str) -> PlannedCall | None:
        """Return what is planned for a call that begins.

        Only the outermost of the named modules' calls are planned, and none in a checkpoint of the
        program: a second run of it has to find inside what the first one did.
        """
        around = self._thread.open.notes
        if self._plan is None or is_in_checkpoint() or any(run.is_followed for run in around):
            return None
        return self._plan(path)

    def end(self, module: nn.Module, output: Any) -> None:
        """End a call of a module."""
        calls = self._thread.open
        raised = has_raised(module)
        if raised and not calls.is_begun(module):
            return
        note = calls.end(module)
        if note is None:
            return
        note.wake()
        if note.call is None:
            if note.planned is not None:
                note.planned.end()
            return
        _frames.taken.discard(note.frame)
        if note.checkpoint is not None:
            note.checkpoint.end()
            with own_work():
                note.call.end(output, raised=raised)
        elif not raised:
            with own_work():
                note.call.compare(output)
            raise Stopped

    @staticmethod
    def _applies() -> bool:
        """Whether autograd saves anything now, and for a backward of this program."""
        if not torch.is_grad_enabled() or is_under_jit():
            return False
        return disabled() is None and not is_transforming()

    def _is_proven(self, named: NamedModule) -> bool:
        """Whether a call's output is compared with that of its second run."""
        named.calls += 1
        forwards = self._forwards or named.calls  # a program may call parts of the model only
        return is_compared(forwards)

    @contextmanager
    def _as_second_run(self, call: RecomputedCall) -> Iterator[None]:
        """Context in which the next call of a module is the second run of a given one."""
        thread = self._thread
        begun = time.perf_counter()
        spent_before = thread.spent
        thread.spent = 0.0
        before = thread.next
        depth = len(thread.open.called)
        with ExitStack() as stack:
            for named in self._named.values():
                if named.path == call.path or call.is_around(named.module):
                    stack.enter_context(named.hooked())
            thread.next = call
            try:
                yield
            finally:
                thread.next = before
                thread.open.cut(depth)
                seconds = time.perf_counter() - begun
                call.row.repeated(seconds - thread.spent)
                thread.spent = spent_before + seconds


class NamedModule:
    """One named module.

    Attributes:
        path: Its path.
        module: The module.
        earlier: What its earlier calls tell of the next one.
        calls: The number of its calls.
    """

    def __init__(self, path: str, module: nn.Module, modules: RecomputedModules) -> None:
        self.path = path
        self.module = module
        self.earlier = EarlierCalls()
        self.calls = 0
        self._modules = modules
        self._lock = threading.RLock()
        self._users = 0
        self._installed = ExitStack()

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Context in which the module has its hooks."""
        with self._lock:
            self._users += 1
            if self._users == 1:
                begin = partial(self._modules.begin, self)
                bracket(self._installed, self.module, begin, self._modules.end)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._installed.close()
