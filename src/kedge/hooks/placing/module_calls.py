"""The calls of modules: those active on each thread, the inputs of each, and when it ended.

# Note [Calls under way]
Each module has a forward-pre hook and a forward hook. PyTorch calls the forward hook also when the
call raises - which is how a checkpoint's recompute stops early. The hook removes the call from its
thread's list, together with any inner calls that never ended: PyTorch did not reach their hooks. It
calls no hook when a `KeyboardInterrupt` or the end of the program passes through: when the
outermost module is called next, the frames of the thread show which calls that left.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any, Generic, TypeVar

from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.installed import ConcealedHook, HooksTogether, InstalledHook
from kedge.hooks.placing.strict_export import spare_export
from kedge.sites import leaves
from kedge.stderr import Shield
from kedge.torch_internals import dynamo
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_calls import calls_around
from kedge.torch_internals.module_tables import is_replica, named_modules
from kedge.torch_internals.own_work import own_work
from kedge.torch_internals.torchscript import takes_hooks

T = TypeVar("T")
S = TypeVar("S")

Span = tuple[str | None, int]
OUTSIDE: Span = (None, 0)


def given_to(module: nn.Module) -> Any:
    """Return the inputs of a module's active call on this thread: (args, kwargs).

    An empty tuple without one.
    """
    for frame in calls_around(sys._getframe(1)):
        if frame.f_locals["self"] is module:
            return frame.f_locals["args"], frame.f_locals["kwargs"]
    return ()


def running() -> list[nn.Module]:
    """The modules with active calls on this thread, the outermost first."""
    return [frame.f_locals["self"] for frame in calls_around(sys._getframe(1))][::-1]


def is_repeated(module: nn.Module) -> bool:
    """Whether a call repeats another one: in a checkpoint's recompute, or in a replica."""
    return in_backward() or is_replica(module)


class OpenCalls(Generic[T]):
    """The active calls on one thread, the outermost first; see Note [Calls under way].

    Attributes:
        called: What is called: the modules, unless a subclass says otherwise.
        notes: The note on each call.
        counts: Calls within the outermost call, by the key that `count` received.
    """

    def __init__(self) -> None:
        self.called: list[Any] = []
        self.notes: list[T] = []
        self.counts: dict[Any, int] = {}

    def count(self, what: Any) -> int:
        """Count a call; returns its number, from 0."""
        number = self.counts.get(what, 0)
        self.counts[what] = number + 1
        return number

    def begin(self, called: Any, note: T) -> None:
        """Add a call that begins."""
        self.called.append(called)
        self.notes.append(note)

    def end(self, called: Any) -> T | None:
        """Remove a call, with inner calls that never ended.

        Returns its note, None if it was not followed.
        """
        if self.called and self.called[-1] is called:  # nearly always
            self.called.pop()
            return self.notes.pop()
        for at in range(len(self.called) - 1, -1, -1):
            if self.called[at] is called:
                self.cut(at + 1)
                self.called.pop()
                return self.notes.pop()
        return None

    def cut(self, at: int) -> bool:
        """Remove all calls from an index on, whose ends were not seen.

        Returns whether there were any.
        """
        there_were = at < len(self.notes)
        del self.called[at:]
        del self.notes[at:]
        return there_were

    def forget_interrupted(self, *, begun: bool = False) -> bool:
        """Remove calls that an interrupt has ended, which no running frame has.

        For use when a module is called.

        Args:
            begun: Whether that call has been added, if it is followed.
        """
        frames = running()
        if not begun:
            del frames[-1]  # the call that begins
        around = iter(frames)
        alive = 0
        for called in self.called:
            if not any(one is called for one in around):
                break
            alive += 1
        return self.cut(alive)


class _Thread(threading.local):
    """The active calls on each thread."""

    def __init__(self) -> None:
        self.open: OpenCalls[Any] = OpenCalls()


def _not_followed(*_call: Any) -> None:
    """Begin no call."""


class CallTracker(Generic[S, T]):
    """Follows calls of modules, on every thread; see Note [Calls under way].

    Args:
        begin: Called when a call begins, with the calls around it, the subject, the module, and its
            inputs (arguments by position, and by name). Returns the note on the call; None leaves
            the call unfollowed.
        end: Called when the call has ended, with the calls still active, the note, and the output:
            None if the call raised. Without `end` no call is followed to its end, and `begin`
            returns None.
        skip: Whether calls of a module are skipped now; it must return the same when a call begins
            and when it ends.
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
        self._on_begin = begin
        self._on_end = end
        self._skip = skip
        shielded: Any = shield  # a `Shield` of these very functions
        self.begin: Callable[..., Any] = self._begin
        self.end: Callable[..., Any] = self._end
        if shield is not None:
            self.begin = partial(shielded, self._begin)
            self.end = partial(shielded, self._end)
        self._thread = _Thread()
        self._undos: list[Callable[[], None]] = []

    @property
    def open(self) -> OpenCalls[T]:
        """The active calls on this thread."""
        return self._thread.open

    def follow(
        self,
        module: nn.Module,
        subject: S,
        *,
        outermost: bool = False,
        first: bool = False,
        inside: bool = False,
    ) -> None:
        """Follow the calls of a module from the next one on, unless it calls no hooks.

        Args:
            module: The module.
            subject: Passed to `begin`.
            outermost: Whether the program, as a rule, calls the module from outside of all others:
                its calls then first remove those that an interrupt has left.
            first: Whether the call begins before other hooks run.
            inside: Whether the call ends before other hooks run.
        """
        if not takes_hooks(module):
            return
        before = CallBegins(self.begin, subject, outermost=outermost)
        handles = [
            module.register_forward_pre_hook(before, prepend=first, with_kwargs=True),
        ]
        if self._on_end is not None:
            after = CallEnds(self.end)
            handles.append(module.register_forward_hook(after, prepend=inside, always_call=True))
        self._undos += [ConcealedHook(handle).remove for handle in handles]

    def follow_all(self, subject: S) -> None:
        """Follow the calls of every module, by PyTorch's global hooks.

        These do not receive keyword arguments.
        """
        hooks = around_every_call(
            CallBegins(self.begin, subject, outermost=False), CallEnds(self.end)
        )
        self._undos += [hooks.remove, spare_export(hooks)]

    def join(self, module: nn.Module, subject: S) -> None:
        """Follow a module's active call, whose forward-pre hooks PyTorch has already run."""
        self.begin(subject, True, module, given_to(module))

    def close(self) -> None:
        """Remove all hooks, and the active calls with them.

        PyTorch still runs hooks that it has collected for a call, so a call may begin after this;
        it is not followed.
        """
        self._on_begin, self._on_end = (
            _not_followed,
            None,
        )  # they may hold whatever was noted of the calls
        while self._undos:
            self._undos.pop()()
        self._thread = _Thread()

    def _begin(self, subject: S, outermost: bool, module: nn.Module, given: Any) -> None:
        if self._skip is not None and self._skip(module):
            return
        calls = self._thread.open
        if outermost and calls.called:
            calls.forget_interrupted()
        if not calls.called:
            calls.counts.clear()
        note = self._on_begin(calls, subject, module, given)
        if note is not None:
            calls.begin(module, note)

    def _end(self, module: nn.Module, output: Any) -> None:
        calls = self._thread.open
        if not calls.called or (self._skip is not None and self._skip(module)):
            return
        note = calls.end(module)
        if note is not None and self._on_end is not None:
            self._on_end(calls, note, output)


def around_every_call(before: Callable[..., Any], behind: Callable[..., Any]) -> HooksTogether:
    """Register a hook before each call of every module, and one behind it, also if it raises."""
    handles = (
        register_module_forward_pre_hook(before),
        register_module_forward_hook(behind, always_call=True),
    )
    return HooksTogether(
        (InstalledHook(handle), hook)
        for handle, hook in zip(handles, (before, behind), strict=True)
    )


def hear(stack: ExitStack, model: nn.Module, tell: Callable[[Any], None]) -> None:
    """Call a function with the arguments of each call of a model, (args, kwargs), as it begins.

    Until `stack` closes.
    """
    calls: CallTracker[None, None] = CallTracker(
        lambda _calls, _subject, _module, given: tell(given)
    )
    calls.follow(dynamo.unwrap(model), None)
    stack.callback(calls.close)


class CallBegins(KedgeHook):
    """Forward-pre hook that begins a call."""

    def __init__(self, begin: Callable[..., Any], subject: Any, *, outermost: bool) -> None:
        self.begin = begin
        self.subject = subject
        self.outermost = outermost

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Begin a call, unless a compiler captures it."""
        if not is_compiling():
            with own_work():
                self.begin(self.subject, self.outermost, module, (args, kwargs))


class CallEnds(KedgeHook):
    """Forward hook that ends a call."""

    def __init__(self, end: Callable[..., Any]) -> None:
        self.end = end

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a call, unless a compiler captures it."""
        if not is_compiling():
            with own_work():
                self.end(module, output)


class ModuleCalls:
    """Follows the calls of models' modules by their paths, and their inputs.

    Args:
        number: Returns numbers that identify the storages of a tensor.
        skip: Whether calls of a module are skipped now.
        shield: Runs the bodies of the hooks; a watch uses it to keep errors from the program.

    Attributes:
        given: The numbers of a module's inputs over all its calls, by the module's path.
        entered: The numbers of the outermost modules' inputs that have no `grad_fn`.
    """

    def __init__(
        self,
        number: Callable[[Tensor], Iterable[int]],
        *,
        skip: Callable[[nn.Module], bool] | None = None,
        shield: Shield | None = None,
    ) -> None:
        self.number = number
        self.calls: CallTracker[str, Span] = CallTracker(
            self._begin, self._end, skip=skip, shield=shield
        )
        self.given: dict[str, set[int]] = {}
        self.entered: set[int] = set()

    @property
    def innermost(self) -> Span:
        """The path and the call of the module that runs, the call counted within one call of the outermost."""
        spans = self.calls.open.notes
        return spans[-1] if spans else OUTSIDE

    @property
    def around(self) -> Span:
        """The path and the call of the module that called the innermost."""
        spans = self.calls.open.notes
        return spans[-2] if len(spans) > 1 else OUTSIDE

    @property
    def under_way(self) -> tuple[Span, ...]:
        """The active calls on this thread, the outermost first."""
        return tuple(self.calls.open.notes)

    def add(self, model: nn.Module, paths: Iterable[str], label: Callable[[str], str]) -> None:
        """Follow some modules of a model from their next call on.

        Args:
            model: The model.
            paths: The paths of its modules to follow.
            label: Returns the name of a module, given its path.
        """
        modules = named_modules(model)
        for path in paths:
            self.calls.follow(modules[path], label(path), outermost=not path, first=True)

    def begin(self, module: nn.Module, path: str) -> None:
        """Begin a call that is already active."""
        self.calls.join(module, path)

    def close(self) -> None:
        """Remove the hooks."""
        self.calls.close()

    def _begin(self, calls: OpenCalls[Span], path: str, module: nn.Module, given: Any) -> Span:
        tensors = [tensor for _, tensor in leaves.find(given)]
        self.given.setdefault(path, set()).update(
            n for tensor in tensors for n in self.number(tensor)
        )
        if (
            not calls.called and not in_backward()
        ):  # a checkpoint's recompute is not an entry into the model
            self.entered.update(
                n for tensor in tensors if tensor.grad_fn is None for n in self.number(tensor)
            )
        return path, calls.count(path)

    def _end(self, calls: OpenCalls[Span], span: Span, output: Any) -> None:
        return None


untraced(CallBegins.__call__, CallEnds.__call__)
