"""Operations outside of modules: in the calls of one function, or in the program's own code.

# Note [Outside of a module]
The mode of these operations is on this thread's stack as long as their hooks are there. It is below
the modes of the program, so that those end in the program's order; only that of
`torch.set_default_device` is lower. In the calls of modules it is off, unless a function is hooked,
which modules may call: a mode costs time there, and keeps attention from its fused path, whose
results differ in their last bits. So it is always off in modules with such a path in eval mode.

An operation belongs to a function if no call of a module lies between it and the innermost call of
that function; it belongs to the program's code if none lies around it at all, nor an optimizer's
step or a backward pass.

# Note [Passes of a program's code]
A pass of a function is its outermost call. The program's own code has no calls: a pass there ends
when an optimizer has stepped on this thread; where there is no optimizer, with a backward pass. In
each, operations of a name count from 0.

# Note [Modes in a backward pass]
When a backward pass has called back, PyTorch puts a thread's modes back as they were. So where a
pause begins or ends inside of one, the mode stays as it is, and only passes operations on or not.

# Note [Calls of a function]
Nothing tells when a function returns, so the frames tell which of its calls is running. A frame
that has returned would keep its variables as long as it is held: it is dropped at the next
operation of the thread, whichever that is.
"""

from __future__ import annotations

import functools
import gc
import os
import sys
import threading
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

from kedge.errors import NoSuchKind
from kedge.flow import Preserving
from kedge.hooks.firing.cause import Cause
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Spec, Tap
from kedge.hooks.operations.gates import ForwardUnderWay, ModuleOperations, OperationGate, gate_for
from kedge.hooks.operations.mode import AGAIN, ENDS, ONWARD, operate, past_operate
from kedge.hooks.operations.names import name_of
from kedge.hooks.operations.unfired import explain_made
from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.forward_calls import AROUND
from kedge.hooks.placing.installed import InstalledHook
from kedge.hooks.placing.module_calls import OpenCalls, around_every_call, running
from kedge.hooks.placing.own_warnings import IgnoredOfGlobalHooks
from kedge.hooks.placing.strict_export import spare_export
from kedge.sites.select import Selector
from kedge.sites.site import VARIABLE
from kedge.torch_internals import modes
from kedge.torch_internals.assigned_names import code_of
from kedge.torch_internals.checkpoint import reentrant_around
from kedge.torch_internals.dynamo import has_code, untraced
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.own_functions import own_function
from kedge.torch_internals.own_work import programs_work
from kedge.torch_internals.source_lines import TORCH, is_running

OPTIMIZERS = f"{TORCH}optim{os.sep}"
"""What the names of the files begin with in which optimizers work."""

_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class OutsideGate(OperationGate):
    """The taps of one session on operations outside of modules."""

    operations: OutsideOperations

    def why(self, tap: Tap) -> Cause | None:
        """Return the cause of a tap never firing; None if there was such an operation."""
        if self.called:
            return None
        operations = self.operations
        if operations.captured:
            return Cause(
                "it is inside compiled code, which does not call operations one by one",
                "call the function uncompiled",
            )
        if operations.called:
            return explain_made(tap)
        if operations.code is not None:
            return Cause(
                f"{operations.runs} has called no operation on this thread",
                "call it in the block, on the thread that opens the block",
            )
        return Cause(
            "no operation ran outside of modules on this thread",
            'hook the operations of a model, as in hook(model, "/relu", ...)',
        )


class OutsideOperations(ModuleOperations):
    """The operations of a function's calls, or of the program's own code.

    Args:
        function: The function or method; None for the program's code.

    Attributes:
        code: The function's code; None for the program's.
        whose: The object of a method; None of any other function.
        runs: What runs them, in messages.
        listing: How to find others, in messages.
    """

    def __init__(self, function: Any) -> None:
        super().__init__("")
        self.code: CodeType | None = None
        self.whose: Any = getattr(function, "__self__", None)
        self.runs = "the code outside of modules"
        self.listing = 'those in models need one: hook(kedge.everywhere, "/relu", ...)'
        if function is not None:
            plain = getattr(function, "__func__", function)
            self.code = plain.__code__
            self.runs = f"{plain.__qualname__}()"
            self.listing = f"list its operations with kedge.operations({plain.__name__}, ...)"
            self.captured = has_code(function)

    def is_call(self, frame: FrameType) -> bool:
        """Whether a frame is a call of the function: of a method, on its object."""
        if frame.f_code is not self.code:
            return False
        if self.whose is None or not self.code.co_argcount:
            return True
        return frame.f_locals.get(self.code.co_varnames[0], self.whose) is self.whose


class OutsideMode(TorchFunctionMode):
    """The mode that sees the operations outside of modules on one thread; see Note [Outside of a module].

    Attributes:
        passes: Counts the passes.
        mode: The mode itself, for what asks for the one of a thread.
        operations: The operations.
        running: The calls of the function that are in progress, the outermost first; for the
            program's code its pass.
        again: The parts that a checkpoint is running again.
        over: Whether the pass has ended.
        passed: How many calls of PyTorch it has passed on while it saw operations.
        by_steps: Whether optimizers end the passes; None as long as that is unknown.
    """

    def __init__(self, passes: PassCounter, operations: OutsideOperations) -> None:
        super().__init__()
        self.passes = passes
        self.operations = operations
        self.mode = self
        self.here = self
        self.running: list[ForwardUnderWay] = []
        self.again: list[ForwardUnderWay] = []
        self.over = True
        self.passed = 0
        self.by_steps: bool | None = None
        self.thread = threading.get_ident()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass an operation through its gates, or run it unchanged."""
        __tracebackhide__ = True
        if kwargs is None:
            kwargs = {}
        operations = self.operations
        if is_compiling() or operations.away or not operations.live:
            return func(*args, **kwargs)
        self.passed += 1
        if self.running and operations.code is not None:
            self._forget_returned(sys._getframe(1))
        name = name_of(func)
        gates = operations.matched.get(name)
        if gates is None:
            gates = operations.match(name)
        if name and (gates or name not in operations.made):
            entry = self._entry(sys._getframe(1))
            if entry is not None:
                try:
                    return operate(self, entry, name, gates, func, args, kwargs)
                except BaseException:
                    operations.raised.add(name)
                    raise
        if func is torch.autograd.grad or getattr(func, "__name__", "") == "backward":
            self._differentiate()
        return func(*args, **kwargs)

    def _differentiate(self) -> None:
        """End the pass of the program's code, unless an optimizer is going to; see Note [Passes of a program's code]."""
        if self.by_steps is None:
            self.by_steps = any(issubclass(type(each), Optimizer) for each in gc.get_objects())
        self.over = self.over or not self.by_steps

    def optimized(self, *_: Any) -> None:
        """End the pass of the program's code: a hook that is called after an optimizer's step."""
        if threading.get_ident() == self.thread:
            self.by_steps = self.over = True

    def end_pass(self) -> None:
        """End the pass of the program's code: its operations count from 0 again."""
        self.over = True

    def _forget_returned(self, frame: FrameType) -> None:
        """Drop the calls that are over; see Note [Calls of a function]."""
        while self.running and not is_running(self.running[-1].frame, frame):
            self.running.pop()

    def _entry(self, frame: FrameType) -> ForwardUnderWay | None:
        """Return the call that an operation belongs to; None if it belongs to none."""
        found, function = self._call_around(frame)
        if found is None:
            return None
        entry = self._entry_of(found)
        entry.function = function
        return entry

    def _entry_of(self, found: FrameType) -> ForwardUnderWay:
        if self.again and found is self.again[-1].frame:
            return self.again[-1]
        operations = self.operations
        if operations.code is None:
            if self.over:
                self._begin_pass()
                self.running = [ForwardUnderWay(operations, None, seen=True)]
            return self.running[-1]
        if self.running and self.running[-1].frame is found:
            return self.running[-1]
        if not self.running and not self.again:
            self._begin_pass()
        operations.called += 1
        entry = ForwardUnderWay(operations, found, seen=True)
        entry.call = len(self.running)
        entry.recompute = bool(self.again)
        self.running.append(entry)
        return entry

    def _begin_pass(self) -> None:
        graded = torch.is_grad_enabled() or reentrant_around() is not None
        self.passes.begin(inside=False, graded=graded)
        self.over = False
        self.operations.called += 1

    def _call_around(self, frame: FrameType | None) -> tuple[FrameType | None, str]:
        """Return the frame of the call around an operation, and the name of a `torch.autograd.Function` between.

        None if it belongs to no call. The outermost frame stands for the program's code.
        """
        operations = self.operations
        again = self.again[-1].frame if self.again else None
        graded = torch.is_grad_enabled()
        function = ""
        outermost = None
        while frame is not None:
            if frame is again or operations.is_call(frame):
                return frame, function
            code = id(frame.f_code)
            if code in ENDS:
                if code == ONWARD:
                    frame = past_operate(frame)
                elif code in (AROUND, AGAIN):
                    frame = frame.f_back
                else:
                    return None, ""
                continue
            if frame.f_code.co_filename.startswith(OPTIMIZERS):
                return None, ""
            if not graded and not function:
                function = own_function(frame.f_code)
            outermost, frame = frame, frame.f_back
        if operations.code is not None or in_backward():
            return None, ""
        return outermost, function

    def enter(self, entry: ForwardUnderWay) -> None:
        """Called when a checkpoint begins to run a part again: the backward around it has the mode off."""
        self.again.append(entry)
        modes.push_function_mode(self)

    def leave(self, operations: ModuleOperations) -> None:
        """Called when that part has run."""
        modes.take_off(self)
        self.again.pop()


class OutsideSwitch:
    """Keeps the mode of a session's operations outside of modules on the thread that hooked them."""

    def __init__(self, owner: Owner, function: Any) -> None:
        owner.installed.on_failure(setattr, owner.clock, "leader", owner.clock.leader)
        self.owner = owner
        self.function = function
        self.operations = OutsideOperations(function)
        self.mode = OutsideMode(owner.clock.follow_code(), self.operations)
        self._up = self._paused = False
        self._calls: OpenCalls[None] = OpenCalls()
        self._hooks = around_every_call(ModuleBegins(self), ModuleEnds(self))
        owner.installed.install(IgnoredOfGlobalHooks())
        owner.installed.install(self._hooks)
        owner.installed.cleanup.callback(spare_export(self._hooks))
        if function is None and owner.clock.by_models:
            stepped = register_optimizer_step_post_hook(self.mode.optimized)
            owner.installed.install(InstalledHook(stepped))
        elif function is None:
            self.mode.by_steps = True  # and a watch ends the passes
        owner.installed.install(self)
        self.back()

    def place(self, selector: Selector, spec: Spec) -> None:
        """Attach taps to the operations that a selector names.

        Raises:
            NoSuchKind: If it names anything else.
        """
        for term in selector.terms:
            if term.op is None or term.types or term.literal:
                raise NoSuchKind(
                    f'"{term}": {self.operations.runs} has operations, such as "/relu:out", and no '
                    "modules or other sites"
                )
            if term.op[0].endswith(VARIABLE) and self.operations.code is None:
                raise NoSuchKind(
                    f'"{term}": variables are those of a forward or a function; hook the '
                    'operation, such as "/cross_entropy", or hook(function, ...)'
                )
        stands: Any = _NoModel()
        if self.function is not None:
            stands.forward = self.function
        for place in selector.on(stands).places:
            if place.site.op is not None and place.site.op[0].endswith(VARIABLE):
                self.operations.forward = code_of(self.function)
            gate_for(self.owner, self.mode.passes, self.operations, place, OutsideGate).attach(
                spec, place.site
            )
        keeping: list[Any] = [one for one in spec.actions if isinstance(one, Preserving)]
        self.operations.watch_overwrites(keeping)
        for action in keeping:
            action.watch_overwrites()

    def begins(self, module: nn.Module) -> None:
        """Take the mode off for the call of a module that it must not see."""
        if threading.get_ident() != self.mode.thread:
            return
        if self._calls.called and not self._calls.forget_interrupted():
            return
        if self._paused or (self.operations.code is not None and not _may_fuse(module)):
            return
        if self._up:
            self._up = not modes.take_off(self.mode)
        if not self._up:
            self._calls.begin(module, None)

    def ends(self, module: nn.Module) -> None:
        """Put the mode back when that call has ended."""
        if threading.get_ident() != self.mode.thread:
            return
        if not any(called is module for called in self._calls.called):
            return
        self._calls.end(module)
        if not (self._up or self._paused):
            modes.put_low(self.mode)
            self._up = True

    def out(self) -> None:
        """Take the mode off this thread until `back`, and the hooks of modules with it.

        See Note [Modes in a backward pass].
        """
        self.operations.away = True
        if in_backward():
            return
        self._paused = True
        self._hooks.out()
        self._calls = OpenCalls()
        if self._up and threading.get_ident() == self.mode.thread:
            with programs_work():
                self._up = not modes.take_off(self.mode)

    def back(self) -> None:
        """Put the mode on this thread again, in the call of a module when that has ended."""
        self.operations.away = False
        if in_backward():
            return
        self._paused = False
        self._hooks.back()
        if self._up or threading.get_ident() != self.mode.thread or self._calls.called:
            return
        calls = running()
        if calls and self.operations.code is None:
            self._calls.begin(calls[0], None)
        else:
            with programs_work():
                modes.put_low(self.mode)
            self._up = True

    def remove(self) -> None:
        """Take the mode off for good; on another thread it stays and sees nothing."""
        self.out()
        self.operations.close()
        self.mode.running.clear()


def _may_fuse(module: nn.Module) -> bool:
    """Whether a call of a module may take a path that it would not take under a mode."""
    return not module.training and isinstance(module, _FUSED)


class ModuleBegins(KedgeHook):
    """Global forward-pre hook that takes the mode off."""

    def __init__(self, switch: OutsideSwitch) -> None:
        self.switch = switch

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The hook."""
        if not is_compiling():
            self.switch.begins(module)


class ModuleEnds(KedgeHook):
    """The global forward hook that matches a `ModuleBegins`."""

    def __init__(self, switch: OutsideSwitch) -> None:
        self.switch = switch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The hook."""
        if not is_compiling():
            self.switch.ends(module)


class _NoModel(nn.Module):
    """Stands for what has operations and no modules, where a selector is resolved."""

    def forward(self) -> None:
        """Do nothing."""


def function_of(target: Any) -> Any:
    """Return the function or method behind a target, without `functools.partial`; None if it is neither."""
    while isinstance(target, functools.partial):
        target = target.func
    if isinstance(target, FunctionType):
        return target
    if isinstance(target, MethodType) and isinstance(target.__func__, FunctionType):
        return target
    return None


def is_outside(selector: Selector) -> bool:
    """Whether a selector without a model names operations outside of modules, as ``/relu`` does.

    Raises:
        NoSuchKind: If it names other sites, too.
    """
    outside = [term.is_outside for term in selector.terms if not term.excluded]
    if any(outside) and not all(outside):
        raise NoSuchKind(
            f'"{selector}": without a model, "/relu" is an operation outside of modules; hook that '
            'separately. The operations of models themselves: hook(kedge.everywhere, "/relu", ...)'
        )
    return any(outside)


untraced(
    OutsideMode.__torch_function__,
    OutsideMode.enter,
    OutsideMode.leave,
    ModuleBegins.__call__,
    ModuleEnds.__call__,
)
