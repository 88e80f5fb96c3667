"""Following the calls of modules: which are under way on a thread, what each was given, and when it ended.

# Note [Calls under way]
Each module has a hook before it and one behind it. The one behind is called when the call raises, too - which is how a
checkpoint's recompute stops early - and takes the call off its thread's list, together with those inside that never ended:
PyTorch had not come to their hooks. No hook is called where a `KeyboardInterrupt` or the end of the program passes
through: what that leaves is found by the frames of the thread, when the outermost module is called next.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from kedge.hooks.placing.concealed import KedgeHook, conceal
from kedge.sites import leaves
from kedge.stderr import Shield
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_calls import CALL
from kedge.torch_internals.module_tables import is_replica

T = TypeVar("T")
S = TypeVar("S")

Span = tuple[str | None, int]
OUTSIDE: Span = (None, 0)


def given_to(module: nn.Module) -> Any:
    """Return what the call of a module that is under way was given; nothing if there is no such call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CALL and frame.f_locals["self"] is module:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
        frame = frame.f_back
    return ()


def running() -> list[nn.Module]:
    """The modules that are being called on this thread, the outermost first."""
    found: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is CALL:
            found.append(frame.f_locals["self"])
        frame = frame.f_back
    return found[::-1]


def is_repeated(module: nn.Module) -> bool:
    """Whether a call repeats another one: in the recompute of a checkpoint, or of a replica."""
    return in_backward() or is_replica(module)


class OpenCalls(Generic[T]):
    """The calls under way on one thread, the outermost first; see Note [Calls under way].

    Attributes:
        modules: The modules that are called.
        notes: What was noted of each call.
        counts: How often something was called within the outermost call, for whoever counts it.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.notes: list[T] = []
        self.counts: dict[Any, int] = {}

    def count(self, what: Any) -> int:
        """Return the number of a call, from 0, and count it."""
        number = self.counts.get(what, 0)
        self.counts[what] = number + 1
        return number

    def add(self, module: nn.Module, note: T) -> None:
        """Take in a call that begins."""
        self.modules.append(module)
        self.notes.append(note)

    def end(self, module: nn.Module) -> T | None:
        """Take a call out, with those inside that never ended; returns what was noted of it, None if it was not followed."""
        modules = self.modules
        for at in range(len(modules) - 1, -1, -1):
            if modules[at] is module:
                note = self.notes[at]
                self.cut(at)
                return note
        return None

    def cut(self, at: int) -> None:
        """Take out all calls from one on."""
        del self.modules[at:]
        del self.notes[at:]

    def forget_interrupted(self) -> None:
        """Take out what an interrupt has ended, when a module is called: it is no longer among the calls that run."""
        around = iter(running()[:-1])  # the last is the very call that begins
        alive = 0
        while alive < len(self.modules) and any(module is self.modules[alive] for module in around):
            alive += 1
        self.cut(alive)


class _Thread(threading.local):
    """The calls under way on each thread."""

    def __init__(self) -> None:
        self.open: OpenCalls[Any] = OpenCalls()


class CallTracker(Generic[S, T]):
    """Follows calls of modules, on every thread; see Note [Calls under way].

    Args:
        begin: Called when a call begins, with the calls around it, the subject, the module, and what it was given
            (arguments by position, and by name). Returns what is to be noted of it; None if it is not to be followed.
        end: Called when it has ended, with the calls that are still under way, what was noted, and what it returned: None
            if it raised. Without it no call is followed to its end, and `begin` returns None.
        skip: Whether calls of a module are left out now; it has to say the same when a call begins and when it ends.
        shield: Runs the functions above.
    """

    def __init__(
        self,
        begin: Callable[[OpenCalls[T], S, nn.Module, Any], T | None],
        end: Callable[[OpenCalls[T], T, Any], None] | None = None,
        *,
        skip: Callable[[nn.Module], bool] | None = None,
        shield: Shield | None = None,
    ) -> None:
        self._on_begin, self._on_end, self._skip = begin, end, skip
        shielded: Any = shield  # a `Shield` of these very functions
        self.begin: Callable[..., Any] = self._begin if shield is None else partial(shielded, self._begin)
        self.end: Callable[..., Any] = self._end if shield is None else partial(shielded, self._end)
        self._thread = _Thread()
        self._undos: list[Callable[[], None]] = []

    @property
    def open(self) -> OpenCalls[T]:
        """The calls under way on this thread."""
        return self._thread.open

    def follow(self, module: nn.Module, subject: S, *, outermost: bool = False, first: bool = False) -> None:
        """Follow the calls of a module from the next one on.

        Args:
            module: The module.
            subject: Goes to what is called at the beginning.
            outermost: Whether it is called from outside, as a rule: then what an interrupt has left is looked for.
            first: Whether the call begins before other hooks have run.
        """
        before = CallBegins(self.begin, subject, outermost=outermost)
        self._undos.append(module.register_forward_pre_hook(before, prepend=first, with_kwargs=True).remove)
        if self._on_end is not None:
            self._undos.append(module.register_forward_hook(CallEnds(self.end), always_call=True).remove)
        self._undos.append(conceal(module))

    def follow_all(self, subject: S) -> None:
        """Follow the calls of every module, by hooks that stand on none; what they were given by name is not known."""
        before = CallBegins(self.begin, subject, outermost=False)
        self._undos.append(register_module_forward_pre_hook(before).remove)
        self._undos.append(register_module_forward_hook(CallEnds(self.end), always_call=True).remove)

    def join(self, module: nn.Module, subject: S) -> None:
        """Follow the call of a module that is under way already, of which PyTorch has gone through the hooks before it."""
        self.begin(subject, True, module, given_to(module))

    def close(self) -> None:
        """Take all hooks down."""
        while self._undos:
            self._undos.pop()()

    def _begin(self, subject: S, outermost: bool, module: nn.Module, given: Any) -> None:
        if self._skip is not None and self._skip(module):
            return
        calls = self._thread.open
        if outermost and calls.modules:
            calls.forget_interrupted()
        if not calls.modules:
            calls.counts.clear()
        note = self._on_begin(calls, subject, module, given)
        if note is not None:
            calls.add(module, note)

    def _end(self, module: nn.Module, output: Any) -> None:
        calls = self._thread.open
        modules = calls.modules
        if not modules or (self._skip is not None and self._skip(module)):
            return
        if modules[-1] is module:  # nearly always
            modules.pop()
            note: T | None = calls.notes.pop()
        else:
            note = calls.end(module)
        if note is not None and self._on_end is not None:
            self._on_end(calls, note, output)


class CallBegins(KedgeHook):
    """The hook before a module."""

    def __init__(self, begin: Callable[..., Any], subject: Any, *, outermost: bool) -> None:
        self.begin, self.subject, self.outermost = begin, subject, outermost

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begin a call, unless it is captured by a compiler."""
        if not is_compiling():
            self.begin(self.subject, self.outermost, module, (args, kwargs))


class CallEnds(KedgeHook):
    """The hook behind a module."""

    def __init__(self, end: Callable[..., Any]) -> None:
        self.end = end

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a call."""
        if not is_compiling():
            self.end(module, output)


class ModuleCalls:
    """Follows the calls of models' modules by their paths, and what they were given.

    Args:
        number: Gives the storages of a tensor numbers that none else has.
        skip: Whether calls of a module are left out now.
        shield: Runs what the hooks do; a watch has it do no harm.

    Attributes:
        given: What the calls of a module were given, over all calls: the numbers by the module's path.
        entered: What was given to the outermost modules and is no result of an earlier one.
    """

    def __init__(
        self,
        number: Callable[[Tensor], Iterable[int]],
        *,
        skip: Callable[[nn.Module], bool] | None = None,
        shield: Shield | None = None,
    ) -> None:
        self.number = number
        self.calls: CallTracker[str, Span] = CallTracker(self._begin, self._end, skip=skip, shield=shield)
        self.given: dict[str, set[int]] = {}
        self.entered: set[int] = set()

    @property
    def innermost(self) -> Span:
        """The path and the call of the module that runs; the call is counted within one call of the outermost."""
        spans = self.calls.open.notes
        return spans[-1] if spans else OUTSIDE

    @property
    def around(self) -> Span:
        """The path and the call of the module that has called the innermost."""
        spans = self.calls.open.notes
        return spans[-2] if len(spans) > 1 else OUTSIDE

    @property
    def under_way(self) -> tuple[Span, ...]:
        """The calls that are under way in this thread, the outermost first."""
        return tuple(self.calls.open.notes)

    def add(self, model: nn.Module, paths: Iterable[str], label: Callable[[str], str]) -> None:
        """Follow some modules of a model from their next call on.

        Args:
            model: The model.
            paths: Which of its modules.
            label: Makes what a module is called of its path.
        """
        for path in paths:
            self.calls.follow(model.get_submodule(path), label(path), outermost=not path, first=True)

    def begin(self, module: nn.Module, path: str) -> None:
        """Begin a call that is under way already."""
        self.calls.join(module, path)

    def close(self) -> None:
        """Take the hooks down."""
        self.calls.close()

    def _begin(self, calls: OpenCalls[Span], path: str, module: nn.Module, given: Any) -> Span:
        tensors = [tensor for _, tensor in leaves.find(given)]
        self.given.setdefault(path, set()).update(n for tensor in tensors for n in self.number(tensor))
        if not calls.modules and not in_backward():  # a checkpoint's recompute is nobody's beginning
            self.entered.update(n for tensor in tensors if tensor.grad_fn is None for n in self.number(tensor))
        return path, calls.count(path)

    def _end(self, calls: OpenCalls[Span], span: Span, output: Any) -> None:
        return None


untraced(CallBegins.__call__, CallEnds.__call__)
