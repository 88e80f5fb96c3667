"""What a program computes, differentiates and hooks before it calls its first module.

# Note [A program of tensors]
A dispatch mode sees the operations of the thread that imports PyTorch. Where an operation has made
a node of autograd's graph, its result, its line and what it took without a gradient are noted under
the node's number. When a backward pass begins, the graph behind it is read, and named after the
program's variables. Graphs of passes that are alike are recorded once.

It is over when a module is called, and after so many operations or seconds that a program of
numbers is not slowed. Nothing of the program is held: tensors are referred to weakly, and nodes
only while their pass runs.

# Note [Programs left alone]
Each of these was tried under a mode that only passes operations on. PyTorch does not swap a tensor
that is referred to weakly, its profiler records the mode, `torch.jit.trace` fails (what is scripted
or loaded computes the same bits), and an operator of `torch.library` that changes its arguments
counts one version less of them. Nothing tells that such a call is about to begin, so that the mode
could go before it: programs whose own files have these words are not looked at. If the profiler
begins elsewhere, this ends with the first operation there.

# Note [Taking a mode off]
PyTorch takes a mode off its stack while the mode passes an operation on, and puts it back after
that. So the mode cannot end itself: Python is asked to call a function a moment later, when the
operation has ended, and once more if it has not. Under a tracer or a profiler, Python 3.11 would
then call nothing else but the function that asks for itself, so it is not asked there. A mode also
stays where a caller puts the dispatch keys back, see Note [Keys put back] in
`kedge.torch_internals.modes`; it passes everything on, and each operation asks again. Where Python
cannot be asked, that lasts until a module is called.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from time import perf_counter
from types import CodeType, FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.by_identity import ByIdentity
from kedge.frames import SourceLine
from kedge.hooks.placing.leaf_hooks import next_hook
from kedge.inspection.autograd_graph import node_tables
from kedge.inspection.forward_graph import ForwardGraph
from kedge.inspection.function_operations import line_outside
from kedge.sites import leaves
from kedge.store.events import RunEvent, TensorProgramEvent, TensorValue
from kedge.torch_internals import device_graphs, modes
from kedge.torch_internals.autograd_nodes import (
    is_number,
    operation_number,
    sequence_number,
)
from kedge.torch_internals.graph_task import backward_call, graph_task
from kedge.torch_internals.hook_tables import after_accumulation, on_tensor
from kedge.torch_internals.own_work import leave_off, own_work
from kedge.torch_internals.source_lines import TORCH, line_with, source_of
from kedge.watch.alone.hooks_seen import PassClock, SeenHook, SeenTable
from kedge.watch.alone.passes import (
    MOST_NODES,
    DraftNode,
    GradientPass,
    GraphBehind,
    NotedConstant,
    NotedOperation,
    TensorGraph,
    drafted,
    key_of,
    leaf_key,
    maker_of,
)
from kedge.watch.alone.values import value_of
from kedge.watch.models.backward_start import BackwardStart, began, taken_for
from kedge.watch.models.variables import tensors_in, tensors_in_frames

MOST_OPERATIONS = 4_000
"""So many operations of a program are seen."""
MOST_SECONDS = 1.0
"""So long may that take."""
_MOST_GRAPHS = 16
_MOST_FORWARD = 200
"""Most operations of the graph of a program without a backward pass."""
_LEFT_ALONE = (
    "swap_tensors",
    "swap_module_params",
    "profiler",
    "jit.trace",
    "torch.jit import",
    "mutates_args",
)
"""Programs with such a text are left alone, see Note [Programs left alone]."""
_BUILDING = (f"{TORCH}nn{os.sep}init.py", f"{TORCH}nn{os.sep}modules{os.sep}")
"""Where parameters of modules are made, before any module is called."""

_called_by_python: list[Any] = []
"""What Python was asked to call. It stays: to be called after it has gone would end the process."""

Until = Literal["end", "module", "limit", "profiler"]


class TensorProgram:
    """Sees what a program does before it calls a module; see Note [A program of tensors].

    Args:
        attempt: Runs a part of the work, and reports its failure.
        found: Receives the leaves behind a pass that is alike to one before, as in a loop that trains.

    Attributes:
        saved: Whether to record what the operations keep for backward.
        left_alone: The line for which the program is left alone; None if it is not.
        seconds: The seconds that this has taken.
    """

    def __init__(
        self, attempt: Callable[..., Any], found: Callable[[Sequence[Tensor]], None]
    ) -> None:
        self.attempt = attempt
        self.found = found
        self.saved = False
        self.left_alone: SourceLine | None = None
        self.seconds = 0.0
        self._mode: Any = None
        self._is_on = False
        self._has_ended = True
        self._thread = 0
        self._pid = 0
        self._has_begun = False
        self._pending: Any = None
        self._is_asked = False
        self._operations = 0
        self._until: Until = "end"
        self._clock = PassClock()
        self._seen: dict[int, NotedOperation] = {}
        self._tensors: ByIdentity[Tensor, SourceLine | None] = ByIdentity()
        self._tables: dict[int, SeenTable] = {}
        self._retained: dict[Hashable, SeenHook] = {}
        self._graphs: dict[Hashable, TensorGraph] = {}
        self._not_recorded = 0
        self._pass: GradientPass | None = None
        self._unrecorded: list[int] | None = None
        self._task = -1
        self._number = 0
        self._hooks = 0
        self._forward: ForwardGraph | None = ForwardGraph()
        self._forward_values: dict[int, tuple[TensorValue, SourceLine | None]] = {}
        self._forward_results: dict[int, weakref.ref[Tensor]] = {}
        self._variables: dict[str, Any] = {}
        self._lines: dict[tuple[CodeType, int], SourceLine] = {}

    # -- on and off -------------------------------------------------------------------

    def begin(self) -> None:
        """Begin to see the operations of this thread."""
        if self._is_left_alone():
            return
        self._mode = modes.operation_mode(self._operation)
        if self._mode is None:
            return
        self._thread = threading.get_ident()
        self._pid = os.getpid()
        self._number = operation_number()
        self._hooks = next_hook()
        modes.put_on_operations(self._mode)
        self._is_on = True
        self._has_ended = False

    def _is_left_alone(self) -> bool:
        """Whether the program's files have a word of what a mode would change."""
        found = (line_with(text) for text in _LEFT_ALONE)
        self.left_alone = next((line for line in found if line is not None), None)
        return self.left_alone is not None

    @property
    def is_on(self) -> bool:
        """Whether operations are seen."""
        return self._is_on

    def end(self, until: Until) -> list[RunEvent]:
        """Take the mode and all hooks off; returns the events of what was seen, the first time."""
        self._take_off()
        if self._has_ended:
            return []
        self._has_ended = True
        if self._is_on:
            self._until = until
        self._is_on = False
        self._close_pass(failed=self._pass is not None)
        self._look_for_hooks()
        for table in self._tables.values():
            table.take_out()
        events = self._events()
        self._release()
        return events

    def _stop_soon(self, until: Until) -> None:
        """End this from inside an operation; see Note [Taking a mode off]."""
        self._until = until
        self._is_on = False
        self._close_pass(failed=False)
        for table in self._tables.values():
            table.take_out()
        self._take_off_soon()

    def _stop_in_child(self) -> None:
        """End this in a forked process, whose tensors nobody records."""
        self._is_on = False
        for table in self._tables.values():
            table.take_out()
        self._take_off_soon()

    def _take_off(self) -> None:
        """Take the mode off if that is possible here; see Note [Taking a mode off]."""
        is_here = threading.get_ident() == self._thread
        if self._mode is None or not is_here or modes.keys_are_put_back():
            return
        modes.take_off_operations(self._mode)
        leave_off(self._mode)
        self._mode = None

    def _take_off_soon(self) -> None:
        add = getattr(ctypes.pythonapi, "Py_AddPendingCall", None)
        if add is None or self._is_asked or sys.gettrace() or sys.getprofile():
            return

        def take_off(_: Any) -> int:
            self._is_asked = False
            if self._mode is None or threading.get_ident() != self._thread:
                return 0
            if modes.is_on_operations(self._mode):
                self._take_off()
            else:  # the operation has not ended yet
                self._take_off_soon()
            return 0

        if self._pending is None:
            self._pending = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(take_off)
            _called_by_python.append(self._pending)
        self._is_asked = True
        add(self._pending, None)

    def _release(self) -> None:
        self._seen.clear()
        self._tensors.clear()
        self._tables.clear()
        self._graphs.clear()
        self._forward = None
        self._forward_results.clear()
        self._variables = {}
        self._lines.clear()

    # -- operations -------------------------------------------------------------------

    def _operation(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Called after each operation."""
        if not self._is_on:
            self._take_off_soon()
            return
        if torch.compiler.is_compiling():
            return
        if os.getpid() != self._pid:
            self._stop_in_child()
            return
        is_first = not self._has_begun
        self._has_begun = True
        # PyTorch may have been imported before the program's own file.
        if modes.is_profiled() or modes.is_under_jit() or (is_first and self._is_left_alone()):
            self._stop_soon("profiler")
            return
        if modes.is_transforming() or modes.is_captured() or modes.is_faking():
            return
        if device_graphs.leaves_alone():
            return
        started = perf_counter()
        with own_work(), modes.without_subclasses():
            if self.attempt("its tensors", self._look, name, args, kwargs, result) is None:
                self._stop_soon("end")  # it has failed, which is told
        self.seconds += perf_counter() - started
        is_over = self._operations >= MOST_OPERATIONS or self.seconds > MOST_SECONDS
        if self._is_on and is_over:
            self._stop_soon("limit")

    def _look(self, name: str, args: Any, kwargs: Any, result: Any) -> bool:
        """Note an operation; returns True."""
        if threading.get_ident() != self._thread:
            return True
        task = graph_task()
        if task != -1:
            if self._pass is None and task != self._task and self._unrecorded is None:
                self._backward_began(began(), is_inside=True)
            self._unrecorded = None
            self._task = task
            self._number = operation_number()
            return True
        frame = sys._getframe(4)
        if frame.f_globals.get("__name__") == "torch.autograd":
            # It makes the gradients with which a pass begins, one for each tensor.
            at = began()
            under_way = self._pass
            tensors = [id(tensor) for tensor in at.tensors]
            if tensors == self._unrecorded:
                return True
            if under_way is None or under_way.has_begun or under_way.tensors != tensors:
                self._close_pass(failed=True)
                self._backward_began(at, is_inside=False)
            return True
        self._close_pass(failed=True)  # one that has ended well is closed already
        self._unrecorded = None
        if next_hook() != self._hooks:
            self._look_for_hooks()
        self._note(name, args, kwargs, result, frame)
        return True

    def _note(self, name: str, args: Any, kwargs: Any, result: Any, frame: FrameType) -> None:
        number = operation_number()
        has_node = number != self._number and torch.is_grad_enabled()
        self._number = number
        if frame.f_code.co_filename.startswith(_BUILDING):
            return
        line = line_outside(frame)
        made = [tensor for _, tensor in leaves.find(result)]
        if line is None or not made:
            return
        self._operations += 1
        self._variables = line.f_globals
        given = [tensor for _, tensor in leaves.find((args, kwargs or {}))]
        source = self._source(line)
        for tensor in given:
            if type(tensor) is Tensor:
                self._tensors.setdefault(tensor, None)
        for tensor in made:
            if type(tensor) is Tensor:
                self._tensors.setdefault(tensor, source)
        value = value_of(made[0])
        if has_node:
            constants = [
                NotedConstant(weakref.ref(tensor), value_of(tensor))
                for tensor in given
                if not tensor.requires_grad and not is_number(tensor)
            ]
            known = NotedOperation(source, value, weakref.ref(made[0]), tuple(constants))
            self._seen[number - 1] = known
        if self._forward is not None:
            self._note_forward(self._forward, name, given, made, value, source)

    def _note_forward(
        self,
        forward: ForwardGraph,
        name: str,
        given: list[Tensor],
        made: list[Tensor],
        value: TensorValue,
        source: SourceLine,
    ) -> None:
        if len(forward) >= _MOST_FORWARD or name in ("detach", "lift_fresh"):
            return
        taken = []
        for tensor in given:
            if is_number(tensor):
                continue
            number = forward.taken(tensor)
            taken.append(number)
            self._forward_results.setdefault(number, weakref.ref(tensor))
            self._forward_values.setdefault(number, (value_of(tensor), None))
        number = forward.made(name, taken, made, ())
        self._forward_results[number] = weakref.ref(made[0])
        self._forward_values[number] = value, source

    def _source(self, frame: FrameType) -> SourceLine:
        place = frame.f_code, frame.f_lineno
        if place not in self._lines:
            self._lines[place] = source_of(frame)
        return self._lines[place]

    # -- hooks ------------------------------------------------------------------------

    def _look_for_hooks(self) -> None:
        """Find hooks that are new; see Note [A new hook] in `kedge.watch.alone.hooks_seen`."""
        for tensor in list(self._tensors):
            self._see_hooks_on(tensor)
        for table in self._tables.values():
            table.renew()
        self._hooks = next_hook()

    def _see_hooks_on(self, tensor: Tensor) -> None:
        if not tensor.requires_grad:
            return
        maker = maker_of(tensor)
        on: Hashable = leaf_key(tensor)
        if maker is not None:
            on = sequence_number(maker)
        self._see_table(on_tensor(tensor), "tensor", on)
        if maker is None:
            self._see_table(after_accumulation(tensor), "post-accumulate", on)
        elif tensor.retains_grad and on not in self._retained:
            self._retained[on] = SeenHook("retain-grad", on, "retain_grad", "built in")

    def _see_table(self, table: Any, kind: str, on: Hashable) -> None:
        if not table:
            return
        known = self._tables.get(id(table))
        if known is not None and known.table is table:
            return
        self._tables[id(table)] = SeenTable(table, kind, on, self._clock, self.attempt)

    def _look_at_nodes(self, nodes: list[Node], keys: list[Hashable]) -> None:
        for node, on in zip(nodes, keys, strict=True):
            before, after = node_tables(node)
            self._see_table(before, "node-pre", on)
            self._see_table(after, "node-post", on)

    # -- backward passes --------------------------------------------------------------

    def _backward_began(self, at: BackwardStart, *, is_inside: bool) -> None:
        if not at.tensors or self._pass is not None or any(map(modes.is_wrapped, at.tensors)):
            return
        self._forward = None
        behind = GraphBehind(at.tensors)
        if len(behind.nodes) > MOST_NODES:
            self._leave_out(at, is_inside=is_inside)
            return
        asked = taken_for()
        names = list(tensors_in_frames())
        for _, tensor in names:
            if type(tensor) is Tensor:
                self._tensors.setdefault(tensor, None)
        self._look_for_hooks()

        shape = at.where, behind.shape
        graph = self._graphs.get(shape)
        again = graph is not None
        if graph is None:
            if len(self._graphs) >= _MOST_GRAPHS:
                self._leave_out(at, is_inside=is_inside)
                return
            graph = TensorGraph("grad" if asked else "backward", self._clock.passes)
            if at.frame is not None:
                graph.source = source_of(at.frame)
            drafted(behind, graph, self._seen, names, self._tensors, saved=self.saved)
            self._graphs[shape] = graph
        keys = [key_of(node) for node in behind.nodes]
        self._look_at_nodes(behind.nodes, keys)
        for table in self._tables.values():
            table.renew()
        self._pass = GradientPass(
            graph,
            behind,
            self._seen,
            again=again,
            asked=asked,
            ended=self._pass_ended,
            attempt=self.attempt,
        )
        self._hooks = next_hook()
        self._clock.calls = 0
        self._clock.graph = graph.first
        if is_inside:
            call = backward_call()
            if call is not None and not call.nested:
                self._pass.starts_with(call.grads)
            self._pass.await_end()
        if graph.passes == 1 and not asked:
            self.found(behind.leaves)

    def _leave_out(self, at: BackwardStart, *, is_inside: bool) -> None:
        """Count a pass that is not recorded."""
        self._not_recorded += 1
        self._clock.passes += 1
        if not is_inside:
            self._unrecorded = [id(tensor) for tensor in at.tensors]

    def _pass_ended(self) -> None:
        with own_work(), modes.without_subclasses():
            self.attempt("its backward pass", self._close_pass, failed=False)

    def _close_pass(self, *, failed: bool) -> None:
        under_way = self._pass
        if under_way is None:
            return
        self._pass = None
        under_way.close(failed=failed)
        for table in self._tables.values():
            table.pass_ended(failed=failed)
        self._clock.passes += 1
        self._number = operation_number()
        self._hooks = next_hook()

    # -- the events -------------------------------------------------------------------

    def _events(self) -> list[RunEvent]:
        hooks: list[SeenHook] = list(self._retained.values())
        for table in self._tables.values():
            hooks += table.hooks.values()
        graphs: list[RunEvent] = [graph.finished(hooks) for graph in self._graphs.values()]
        if not graphs and self._until != "module":
            forward = self._forward_graph()
            if forward is not None:
                graphs.append(forward.finished(()))
        if not graphs and (self._until == "module" or not self._operations):
            return []
        summary = TensorProgramEvent(
            operations=self._operations,
            passes=self._clock.passes,
            until=self._until,
            graphs=self._not_recorded,
        )
        return [summary, *graphs]

    def _forward_graph(self) -> TensorGraph | None:
        """Return the graph of a program without a backward pass."""
        if self._forward is None or not len(self._forward):
            return None
        by_id: dict[int, str] = {}
        for name, tensor in tensors_in(dict(self._variables)):
            by_id.setdefault(id(tensor), name)
        graph = TensorGraph("forward")
        order = self._forward.in_order()
        places = {node.number: place for place, node in enumerate(order)}
        for node in order:
            kind: Literal["operation", "constant"] = "constant"
            if node.kind == "operation":
                kind = "operation"
            name = node.name
            if kind == "constant":
                name = "constant"
            draft = DraftNode(kind, name, [places[each] for each in node.takes])
            held = self._forward_results.get(node.number)
            result = None if held is None else held()
            if result is not None:
                draft.variable = by_id.get(id(result), "")
            draft.value, draft.source = self._forward_values.get(node.number, (None, None))
            graph.nodes.append(draft)
        graph.left_out = max(self._operations - len(graph.nodes), 0)
        return graph
