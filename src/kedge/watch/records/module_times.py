"""The time of each module in measured steps, forward and backward.

# Note [Time without hooks]
In a measured step hooks read the values, which takes longer than many a module. So four moments of
a call are marked: before its pre-hooks and after them, before its forward hooks and after them.
What lies between the first two and the last two is the hooks' and is taken off the times of all
modules around. On a device the marks are events on the stream that the program computes on, so it
is the time of the kernels.

# Note [Time of backward]
The numbers of the graph's nodes show which of them a call made, see Note [Whose node] in
`kedge.watch.records.saved_by_module`. When the outermost call has ended, each node behind its output
gets two hooks that mark when it runs; those on its gradients run before the first mark. The time of
a module is that of its nodes, whatever runs between them. The second run of a checkpoint is a part
of the node that asks for it. Each thread numbers its nodes itself.

# Note [Calls on other threads]
Another thread may call a module while this one ends the step. So each open call is held by the
thread that makes it, and what it marks after the end of its step is dropped.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from kedge.hooks.placing.call_brackets import bracket, bracket_hooks
from kedge.hooks.placing.module_calls import OpenCalls, is_repeated
from kedge.offload.plan.timing import HostClock, TimingClock, clock_of
from kedge.sites import leaves
from kedge.sites.select import ModelLayout, runs
from kedge.store.events import ModuleTimesEvent
from kedge.torch_internals import dynamo
from kedge.torch_internals.autograd_nodes import behind, operation_number, sequence_number
from kedge.torch_internals.module_tables import parameters_in
from kedge.torch_internals.torchscript import takes_hooks
from kedge.watch.models.roots import RootModule
from kedge.watch.step import Step

NodeNumber = tuple[int, int]
RunOfNode = tuple[NodeNumber, Any, Any]

_ALL = 64
"""The measured steps of which each is timed; then one in 2, 3 and so on, so that a recording stays small."""


class TimedCall:
    """A call of a module.

    Attributes:
        path: The module's recorded path.
        around: The call around it; None for an outermost one.
        thread: The thread that makes it.
        marks: When its pre-hooks began and ended, and when its forward hooks did; fewer if it
            raised.
        first: The number of the first operation that it may have added to the graph.
        last: The number behind that of the last one.
    """

    __slots__ = ("around", "first", "last", "marks", "path", "thread")

    def __init__(self, path: str, around: TimedCall | None, mark: Any) -> None:
        self.path = path
        self.around = around
        self.thread = threading.get_ident()
        self.marks = [mark]
        self.first = operation_number()
        self.last = self.first


class NodeRun:
    """The hooks of one node, which note each time that it runs.

    Args:
        number: The thread that made the node, and its number there.
        clock: Marks moments.
        runs: Receives the number, and when the node began and ended.
    """

    __slots__ = ("_begun", "_clock", "_number", "_runs")

    def __init__(self, number: NodeNumber, clock: TimingClock, runs: list[RunOfNode]) -> None:
        self._number = number
        self._clock = clock
        self._runs = runs
        self._begun: Any = None

    def begins(self, _grads: Any) -> None:
        """The node's pre-hook."""
        self._begun = self._clock.mark()

    def ends(self, _grads: Any, _given: Any) -> None:
        """The node's hook."""
        if self._begun is not None:
            self._runs.append((self._number, self._begun, self._clock.mark()))
            self._begun = None


class _Thread(threading.local):
    """The calls under way on each thread; see Note [Calls on other threads]."""

    def __init__(self) -> None:
        self.open: OpenCalls[TimedCall] = OpenCalls()


class ModuleTimes:
    """Times the modules of all roots in measured steps.

    A step is timed from its beginning on, so the one in which a root is first called is not. Compiled
    code is not timed: hooks that come and go would have it compiled again.

    Args:
        roots: The roots of the watch.

    Attributes:
        timed: How many steps were timed.
        seconds: Seconds that this has taken of the program's time.
    """

    def __init__(self, roots: Iterable[RootModule]) -> None:
        self.timed = 0
        self.seconds = 0.0
        self._roots = roots
        self._measured = 0
        self._placed = ExitStack()
        self._clock: TimingClock = HostClock()
        self._thread = _Thread()
        self._calls: list[TimedCall] = []
        self._runs: list[RunOfNode] = []

    def begin_step(self, step: Step) -> None:
        """Place the hooks if the step is one to be timed; remove those of the step before."""
        begun = perf_counter()
        self.close()
        if step.is_measured and not dynamo.has_compiled():
            if self._measured % (1 + self._measured // _ALL) == 0:
                for root in self._roots:
                    self._place(root)
            self._measured += 1
        self.seconds += perf_counter() - begun

    def take(self, step: int) -> Iterator[ModuleTimesEvent]:
        """Yield the event with the times of a step that ends; on a device this waits for its work."""
        begun = perf_counter()
        calls = [call for call in self._calls if len(call.marks) == 4]
        runs = self._runs
        self._calls = []
        self._runs = []
        if calls:
            forward = self._forward(calls)
            backward = self._backward(calls, runs)
            paths = tuple(forward)
            self.timed += 1
            yield ModuleTimesEvent(
                step=step,
                paths=paths,
                forward=tuple(_rounded(forward[path]) for path in paths),
                backward=tuple(_rounded(backward.get(path)) for path in paths),
            )
        self.seconds += perf_counter() - begun

    def why_none(self) -> str:
        """Return why no step was timed."""
        if dynamo.has_compiled():
            return "the program is compiled, and hooks for the time would have it compiled again"
        return "a step is timed if it is measured, is not the first, and builds a graph; none was"

    def close(self) -> None:
        """Remove the hooks of modules; those of nodes go with their graphs."""
        self._placed.close()
        self._thread = _Thread()
        self._calls = []
        self._runs = []

    # -- what the hooks do ------------------------------------------------------------

    def _place(self, root: RootModule) -> None:
        model = root.module()
        if model is None:
            return
        first = next(iter(parameters_in(model).values()), None)
        if first is not None:
            self._clock = clock_of(first.device)
        layout = ModelLayout(model)
        for path, module in layout.modules.items():
            if layout.first[id(module)] == path and runs(module) and takes_hooks(module):
                begins = partial(self._begins, root.label(path))
                bracket(self._placed, module, begins, self._ends)
                bracket_hooks(self._placed, module, self._begun, self._ended)

    def _begins(self, path: str, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        if is_repeated(module) or not torch.is_grad_enabled():
            return
        begun = perf_counter()
        calls = self._thread.open
        around = None
        if calls.notes:
            around = calls.notes[-1]
        call = TimedCall(path, around, self._clock.mark())
        calls.begin(module, call)
        self._calls.append(call)
        self.seconds += perf_counter() - begun

    def _begun(self, module: nn.Module, _args: Any, _kwargs: Any) -> None:
        call = _running(self._thread.open, module)
        if call is not None:
            call.marks.append(self._clock.mark())

    def _ends(self, module: nn.Module, output: Any) -> None:
        call = _running(self._thread.open, module)
        if call is None:
            return
        call.marks.append(self._clock.mark())
        call.last = operation_number()
        if call.around is None:
            begun = perf_counter()
            self._time_nodes(call, output)
            self.seconds += perf_counter() - begun

    def _ended(self, module: nn.Module, _output: Any) -> None:
        calls = self._thread.open
        call = _running(calls, module)
        if call is not None:
            calls.end(module)
            call.marks.append(self._clock.mark())

    def _time_nodes(self, call: TimedCall, output: Any) -> None:
        """Have the nodes behind the output of an outermost call timed."""
        made_by = (value.grad_fn for _, value in leaves.find(output) if isinstance(value, Tensor))
        for node in behind(made_by, call.first):
            number = sequence_number(node)
            if call.first <= number < call.last:
                run = NodeRun((call.thread, number), self._clock, self._runs)
                node.register_prehook(run.begins)
                node.register_hook(run.ends)

    # -- sums -------------------------------------------------------------------------

    def _forward(self, calls: Sequence[TimedCall]) -> dict[str, float]:
        """Return the seconds of each module's calls, without hooks; see Note [Time without hooks]."""
        between = self._clock.between
        taken_off: dict[TimedCall, float] = defaultdict(float)
        sums: dict[str, float] = defaultdict(float)
        for call in reversed(calls):  # one comes behind the one around it
            before, begun, ended, after = call.marks
            sums[call.path] += between(begun, ended) - taken_off[call]
            if call.around is not None:
                hooks = between(before, begun) + between(ended, after)
                taken_off[call.around] += hooks + taken_off[call]
        return dict(reversed(sums.items()))

    def _backward(
        self, calls: Iterable[TimedCall], of_nodes: Iterable[RunOfNode]
    ) -> dict[str, float]:
        """Return the seconds of the nodes of each module's calls; see Note [Time of backward]."""
        runs = sorted(of_nodes, key=lambda run: run[0])
        if not runs:
            return {}
        numbers = [number for number, _, _ in runs]
        times = (self._clock.between(begun, ended) for _, begun, ended in runs)
        until = [0.0, *accumulate(times)]
        sums: dict[str, float] = defaultdict(float)
        for call in calls:
            first = bisect_left(numbers, (call.thread, call.first))
            last = bisect_left(numbers, (call.thread, call.last))
            sums[call.path] += until[last] - until[first]
        return sums


def _running(calls: OpenCalls[TimedCall], module: nn.Module) -> TimedCall | None:
    """Return the innermost of a thread's open calls, if it is of this module.

    Calls inside it that an error has ended are forgotten.
    """
    if not any(one is module for one in calls.called) or is_repeated(module):
        return None
    while calls.called[-1] is not module:
        calls.cut(len(calls.called) - 1)
    return calls.notes[-1]


def _rounded(seconds: float | None) -> float | None:
    if seconds is None:
        return None
    return round(max(seconds, 0.0), 7)
