"""The mode that sees operations inside a module's own forward and passes them to the gates of their taps.

# Note [Whose operation]
A `TorchFunctionMode` sees all calls of PyTorch on a thread, from any caller. The forward-pre hook
of a hooked module pushes it and the module's forward hook pops it, so that it is active in a
checkpoint's recompute too, and costs other modules nothing. The frames show which module an
operation belongs to: no other module's frame lies between the call and the frame that runs the
module's forward. So a module that a forward calls, however it holds it, keeps its own operations;
the hooks on children only keep their operations from passing the mode. Computations of an action
belong to no module, and neither do those in another hook of the same module.

# Note [The frames that count]
Kedge's own frames lie between the modes of two sessions. The second must see an operation that the
first passes on, but not the first one's own computations. So `operate` and `fire` end the search,
and `_onward` leads past `operate`.

# Note [Inside a function of one's own]
The mode sees operations in the forward of a `torch.autograd.Function`, and actions may observe
them. But that forward runs without grad, and the backward written for it does not take an edit into
account: the output would change, the gradient would not. So an edit there is an error, and there
are no gradients to listen to. If that forward turns grad on again, it builds a graph of its own, in
which an edit counts. A reentrant checkpoint is such a function too; its backward runs the forward
again.

# Note [Interrupted calls]
PyTorch calls no forward hook when a `KeyboardInterrupt`, or another exception that is no
`Exception`, passes through a module. If the forward around it catches that, the calls inside are
over, and their entries are not. The frames on the stack show which calls run: they are looked at
when a module is called, and when an operation is not of the innermost call but may be of one around
it. In an unhooked child the mode is off, so if the interrupt passes through that, the operations up
to the next call of a module are not seen; the ledger says so.

# Note [Ended inside an operation]
PyTorch takes a mode off its stack for the operation that it passes to the mode, and puts it back
afterwards. So an action at an operation cannot take the mode off when it ends or pauses its own
session: the end of the module's forward does.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode

from kedge.errors import EditError
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.operations.attention import ATTENTION, INSIDE
from kedge.hooks.operations.gates import (
    ForwardUnderWay,
    ModuleOperations,
    OperationGate,
    PassedOver,
    refuse_inside,
)
from kedge.hooks.operations.names import WRITING, name_of, overwrites, written_into
from kedge.hooks.operations.variables import assign
from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.forward_calls import AROUND
from kedge.hooks.placing.installed import ConcealedHook
from kedge.hooks.placing.module_calls import OpenCalls
from kedge.sites import leaves
from kedge.torch_internals import modes
from kedge.torch_internals.checkpoint import owners_around
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.hook_tables import after_forward, last_hook
from kedge.torch_internals.module_calls import CALLS, SLOW, inside
from kedge.torch_internals.own_functions import own_function
from kedge.torch_internals.own_work import own_work
from kedge.torch_internals.source_lines import is_dropped, is_running


class ModeHere(Protocol):
    """The mode of the current thread, and what counts its passes."""

    @property
    def passes(self) -> PassCounter:
        """The counter."""

    @property
    def mode(self) -> Any:
        """The mode."""


class SeeingMode(Protocol):
    """A mode that passes operations to `operate`."""

    @property
    def here(self) -> ModeHere:
        """The modes of all threads, including this one."""

    def __enter__(self) -> Any:
        """Put it onto this thread's stack once more."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
        /,
    ) -> Any:
        """Take it off again."""


class OperationCalls(OpenCalls[ForwardUnderWay | PassedOver]):
    """The active calls of hooked modules on one thread, and of the other children that run in one, by their operations."""

    def cut(self, at: int) -> bool:
        """Remove all calls from an index on.

        Those around them have missed operations.
        """
        there_were = super().cut(at)
        if there_were:
            for entry in self.notes:
                entry.operations.interrupted = True
        return there_were

    def forget_interrupted_around(self, frame: FrameType | None) -> bool:
        """Remove calls that an interrupt has ended, which no frame around this one has.

        Returns whether there were any.
        """
        alive = len(self.notes)
        while alive and not is_running(self.notes[alive - 1].frame, frame):
            alive -= 1
        return self.cut(alive)


class OperationMode(TorchFunctionMode):
    """The mode that sees the operations of one thread while the innermost module is hooked.

    Attributes:
        here: The modes of all threads, including this one.
        calls: The active calls.
        now: The innermost call, if its module is hooked.
        up: Whether this mode is on PyTorch's stack.
    """

    def __init__(self, here: ThreadMode) -> None:
        super().__init__()
        self.here = here
        self.calls = OperationCalls()
        self.now: ForwardUnderWay | None = None
        self.up = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass an operation through its gates, or run it unchanged."""
        __tracebackhide__ = True
        if kwargs is None:
            kwargs = {}
        if is_compiling() or self.now is None:
            return func(*args, **kwargs)
        entry = self.now
        name = name_of(func)
        gates = entry.operations.matched.get(name)
        if gates is None:
            gates = entry.operations.match(name)
        if (gates or name not in entry.operations.made) and name and _owns(entry, sys._getframe(1)):
            try:
                return operate(self, entry, name, gates, func, args, kwargs)
            except BaseException:
                entry.operations.raised.add(name)
                raise
        if name and len(self.calls.notes) > 1 and self._is_of_another(name, sys._getframe(1)):
            return self.__torch_function__(
                func, types, args, kwargs
            )  # now at the call that is running
        return func(*args, **kwargs)

    def enter(self, entry: ForwardUnderWay) -> None:
        """Called when a module's forward begins."""
        self._forget_interrupted(entry.frame)
        self.calls.begin(entry.operations, entry)
        self.settle()

    def pass_over(self, operations: ModuleOperations, frame: FrameType) -> None:
        """Called when the forward of an unhooked child begins, from the frame that calls its hooks."""
        self._forget_interrupted(frame)
        if self.now is not None:
            self.calls.begin(operations, PassedOver(operations, frame))
            self.settle()

    def leave(self, operations: ModuleOperations) -> None:
        """Called when a module's forward has ended."""
        self.calls.end(operations)
        self.settle()

    def _forget_interrupted(self, frame: FrameType | None) -> bool:
        """Remove calls that ended without their hook; returns whether there were any.

        See Note [Interrupted calls].
        """
        forgot = self.calls.forget_interrupted_around(frame)
        if forgot:
            self.settle()
        return forgot

    def _is_of_another(self, name: str, frame: FrameType) -> bool:
        """Whether an operation may belong to a call around the innermost one, which has ended without its hook."""
        around = (entry.operations for entry in self.calls.notes[:-1])
        return any(
            each.matched.get(name) or each.match(name) for each in around
        ) and self._forget_interrupted(frame)

    def clear(self) -> None:
        """Remove all entries, and the mode from this thread.

        See Note [Ended inside an operation].
        """
        current = self.now
        self.calls = OperationCalls()
        self.settle()
        if self.up and current is not None and current.module is not None:
            ModesOffLater.on(current.module).add(self)

    def settle(self) -> None:
        """Push or pop the mode so that it is active exactly while the innermost module is hooked."""
        top = self.calls.notes[-1] if self.calls.notes else None
        self.now = top if isinstance(top, ForwardUnderWay) and top.seen else None
        if self.now is not None:
            if not self.up:
                modes.push_function_mode(self)
                self.up = True
        elif self.up:
            # Not below a mode of the program, unless no call is left.
            past = None if top is None else OperationMode
            self.up = not modes.take_off(self, past)


class ModesOffLater(KedgeHook):
    """Forward hook that takes modes off at the end of a call.

    See Note [Ended inside an operation].
    """

    def __init__(self, module: nn.Module) -> None:
        self._modes: list[tuple[int, OperationMode]] = []  # each with its thread
        self._hook = ConcealedHook(module.register_forward_hook(self, always_call=True))

    @classmethod
    def on(cls, module: nn.Module) -> Self:
        """Return the hook of a module.

        A new one, unless the module's last hook is one.
        """
        last = last_hook(after_forward(module))
        return last if isinstance(last, cls) else cls(module)

    def add(self, mode: OperationMode) -> None:
        """Take a mode off this thread at the end of the current call."""
        self._modes.append((threading.get_ident(), mode))

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook, which removes itself.

        While PyTorch iterates over the table, only its last hook may.
        """
        here = threading.get_ident()
        due = [mode for thread, mode in self._modes if thread == here]
        self._modes = [each for each in self._modes if each[0] != here]
        if not self._modes and last_hook(after_forward(module)) is self:
            self._hook.remove()
        for mode in due:
            mode.settle()


class ThreadMode(threading.local):
    """The mode of each thread, for one hooked model."""

    def __init__(self, passes: PassCounter) -> None:
        self.passes = passes
        self.mode = OperationMode(self)


def _onward(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation of the program; see Note [The frames that count]."""
    __tracebackhide__ = True
    return func(*args, **kwargs)


def operate(
    mode: SeeingMode,
    entry: ForwardUnderWay,
    name: str,
    gates: Sequence[OperationGate],
    func: Any,
    args: Any,
    kwargs: Any,
) -> Any:
    """Run an operation, with its inputs and outputs passed through its gates."""
    __tracebackhide__ = True
    operations = entry.operations
    op = (name, entry.counts.get(name, 0))
    variables: Sequence[OperationGate] = ()
    if gates:
        _run_again(mode.here, entry)
        if operations.forward is not None:
            variables = [gate for gate in gates if gate.live and gate.variable]
            gates = [gate for gate in gates if not gate.variable]
        gates = [gate for gate in gates if gate.live and gate.pattern.means(op)]
    if kwargs or name[-1] == "_" or name in WRITING:
        args, kwargs = _overwriting(entry, op, gates, func, args, kwargs)
    else:
        for gate in gates:
            if gate.early:
                args, kwargs = gate.before(entry, op, args, kwargs)
    result = _run(mode, func, args, kwargs)
    made = result
    if result is None and name in WRITING:
        _, made = written_into(func, name, args, kwargs)
    if not (isinstance(made, Tensor) or leaves.find(made)):
        operations.made.setdefault(name, 0)
        if made is not None and name in WRITING:
            operations.unready.add(name)
            entry.counts[name] = op[1] + 1
        return result
    entry.counts[name] = count = op[1] + 1
    operations.made[name] = max(operations.made.get(name, 0), count)
    value = made
    for gate in gates:
        value = gate.after(entry, op, value, final=made is not result)
    if variables and made is result:
        value = assign(entry, variables, value, _past_others(sys._getframe(2)))
    if value is not made:
        refuse_inside(entry, f"{operations.path}/{name}#{op[1]}:out")
    if value is not made and overwrites(name, args, kwargs) and is_dropped(sys._getframe(2)):
        raise EditError(
            f"an action returned a value at {operations.path}/{name}#{op[1]}:out, "
            "but this call works in place and the program ignores its result, so "
            "the edit would be lost; edit the operation that uses the tensor next"
        )
    if made is not result:
        return result
    return value


def _run(mode: SeeingMode, func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation.

    Attention runs so that the operations inside pass the mode, too.
    """
    __tracebackhide__ = True
    if func is not ATTENTION:
        return _onward(func, args, kwargs)
    with mode:
        return _onward(INSIDE, args, kwargs)


def _overwriting(
    entry: ForwardUnderWay,
    op: tuple[str, int],
    gates: Sequence[OperationGate],
    func: Any,
    args: Any,
    kwargs: Any,
) -> tuple[Any, Any]:
    """Pass an operation's arguments through its gates.

    Make actions copy kept values that it may change in place.
    """
    __tracebackhide__ = True
    fixed = overwrites(op[0], args, kwargs)
    if op[0] in WRITING and not fixed:
        argument, written = written_into(func, op[0], args, kwargs)
        fixed = leaves.find(written, argument)
    for gate in gates:
        if gate.early:
            args, kwargs = gate.before(entry, op, args, kwargs, tuple(leaf for leaf, _ in fixed))
    if fixed and entry.operations.preserving:
        with own_work():
            overwritten = [leaves.storage_of(tensor) for _, tensor in fixed]
            for action in entry.operations.preserving:
                action.preserve(overwritten)
    return args, kwargs


def _run_again(here: ModeHere, entry: ForwardUnderWay) -> None:
    """Wrap the recompute of a checkpoint that the forward has begun, so that its operations pass the mode.

    # Note [Checkpoints inside a forward]
    The recompute of a whole module calls its hooks. The recompute of a part of its forward calls a
    function, and no hook: so the function that the checkpoint keeps pushes the mode first. An edit
    must be applied again.
    """
    passes = here.passes
    for owner, reentrant, _ in owners_around(passes.here):
        if owner is entry.checkpoint or owner in entry.again:
            return
        if in_backward():
            passes.recomputes()
        else:
            passes.segments.forward(passes.here)
        entry.again.append(owner)
        name = "run_function" if reentrant else "recompute_fn"
        _wrap(here, entry, owner, name)


def _wrap(here: ModeHere, entry: ForwardUnderWay, owner: Any, name: str) -> None:
    """Wrap the function that a checkpoint keeps for its recompute."""
    passes = here.passes
    operations = entry.operations
    run = getattr(owner, name)
    counts = dict(entry.counts)
    call = entry.call

    def again(*args: Any) -> Any:
        mode = here.mode
        if not operations.live or operations.away:
            return run(*args)
        repeated = ForwardUnderWay(operations, sys._getframe(), seen=True)
        repeated.call = call
        repeated.recompute = True
        repeated.counts = dict(counts)
        passes.recomputes()
        mode.enter(repeated)
        try:
            return run(*args)
        finally:
            mode.leave(operations)

    setattr(owner, name, again)


def past_operate(frame: FrameType | None) -> FrameType | None:
    """Return the frame around the next `operate` outwards; None without one."""
    while frame is not None and id(frame.f_code) != OPERATE:
        frame = frame.f_back
    return None if frame is None else frame.f_back


def _past_others(frame: FrameType | None) -> FrameType | None:
    """Return the frame of an operation that modes of other sessions have passed on."""
    while frame is not None and id(frame.f_code) == ONWARD:
        frame = past_operate(frame)
    return frame


def _owns(entry: ForwardUnderWay, frame: FrameType | None) -> bool:
    """Whether a call from a frame belongs to a module's own forward.

    See Note [Whose operation].
    """
    below = frame
    function = ""
    graded = torch.is_grad_enabled()
    while frame is not None:
        code = id(frame.f_code)
        if code in ENDS:
            if code == ONWARD:
                frame = past_operate(frame)
                continue
            if code == AROUND or (code == AGAIN and frame is not entry.frame):
                frame = frame.f_back  # the forward is further out, or it is of another session
                continue
            entry.function = function
            begun = None if below is None else below.f_code
            return frame is entry.frame and (
                entry.code is None or begun is entry.code or begun is SLOW
            )
        if not graded and not function:
            function = own_function(frame.f_code)
        below, frame = frame, frame.f_back
    return False


OPERATE = id(operate.__code__)
ONWARD = id(_onward.__code__)
AGAIN = next(inside(_wrap.__code__, "again"))
ENDS = CALLS | {AROUND, OPERATE, ONWARD, AGAIN, id(fire.__code__)}

untraced(_run_again, OperationMode.__torch_function__, OperationMode.enter, OperationMode.leave)
