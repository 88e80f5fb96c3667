"""The hooks of `--dump` on modules: each call is recorded, and its values and gradients are checked."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kedge.by_identity import ByIdentity
from kedge.hooks.placing.module_calls import CallTracker, OpenCalls, given_to, is_repeated
from kedge.repro.calls import RecordedCall, WatchedModule
from kedge.repro.finiteness import PendingChecks
from kedge.repro.gradient_hooks import CallEdges, GradientHooks
from kedge.sites import leaves
from kedge.sites.spread import gathers
from kedge.stderr import Shield
from kedge.torch_internals import device_graphs, modes
from kedge.torch_internals.accelerators import generator_states
from kedge.torch_internals.autograd_nodes import numbers_operations
from kedge.torch_internals.module_tables import modules_in, own_parameters


class ActiveCall(NamedTuple):
    """An active call.

    `edges` is None if it had begun before it was hooked, so that its place in the graph is unknown.
    """

    watched: WatchedModule
    call: RecordedCall
    edges: CallEdges | None


class CallHooks:
    """Hooks on modules, which record each call, and check its values and gradients.

    Args:
        checks: Receives the values and gradients.
        shield: Runs the bodies of the hooks.
        late: Called with a call that had begun before it was hooked, once it has ended and its
            inputs are known.
    """

    def __init__(
        self,
        checks: PendingChecks,
        shield: Shield,
        late: Callable[[RecordedCall], None],
    ) -> None:
        self._checks = checks
        self._late = late
        self._gradients = GradientHooks(checks, shield)
        self._known: ByIdentity[nn.Module, WatchedModule] = ByIdentity()
        self._recorded: weakref.WeakSet[RecordedCall] = weakref.WeakSet()
        self._tracker = CallTracker(self._entered, self._left, skip=_is_left_out, shield=shield)

    def add(self, root: nn.Module, label: Callable[[str], str]) -> None:
        """Hook a root and all modules in it.

        Args:
            root: The root.
            label: Returns the path in the recording for a path in the root.
        """
        for path, module in modules_in(root).items():
            if module in self._known or isinstance(module, torch.jit.ScriptModule):
                continue
            watched = WatchedModule(label(path))
            self._known[module] = watched
            self._tracker.follow(module, watched, outermost=module is root, inside=gathers(module))
            self._gradients.follow_parameters(watched, module)

    def join(self, root: nn.Module, label: str) -> None:
        """Record the active call of a root, for which PyTorch does not run the new hooks."""
        call = RecordedCall(root, label, None)
        call.began = True
        call.state.random = generator_states()
        self._tracker.open.begin(root, ActiveCall(self._known[root], call, None))

    def release_differentiated(self) -> None:
        """Release the calls that a backward has reached."""
        for call in list(self._recorded):
            if call.gradients.arrived:
                call.release()

    def close(self) -> None:
        """Remove the hooks, and release all calls."""
        self._tracker.close()
        self._gradients.close()
        for call in list(self._recorded):
            call.release()

    def _entered(
        self,
        calls: OpenCalls[ActiveCall],
        watched: WatchedModule,
        module: nn.Module,
        given: Any,
    ) -> ActiveCall:
        outer = None
        if calls.notes:
            outer = calls.notes[-1].call
        call = RecordedCall(module, watched.label, outer)
        overwrites = watched.overwrites or getattr(module, "inplace", False) is True
        found = call.state.take(*given, copy=overwrites)
        edges = CallEdges(tensor for _, tensor in found)
        self._begin(watched, call, found)
        return ActiveCall(watched, call, edges)

    def _left(
        self,
        calls: OpenCalls[ActiveCall],
        ended: ActiveCall,
        output: Any,
    ) -> None:
        watched = ended.watched
        call = ended.call
        if call.began and call.state.args is None:
            args, kwargs = given_to(call.module) or ((), {})
            self._begin(watched, call, call.state.take(args, kwargs))
        returned = leaves.find(output)
        self._follow_edges(calls, ended, [tensor for _, tensor in returned])
        watched.overwrites = watched.overwrites or not call.state.inputs_intact
        for name, tensor in returned:
            self._checks.add("out", (call,), tensor)
            self._gradients.follow_output(call, name, tensor)
        if call.began:
            self._late(call)
        if not calls.called or call.gathers:
            self._checks.read()

    def _begin(
        self,
        watched: WatchedModule,
        call: RecordedCall,
        found: Iterable[tuple[str, Tensor]],
    ) -> None:
        self._recorded.add(call)
        watched.add(call)
        own = own_parameters(call.module)
        for name, param in own.items():
            if param is not None and param.requires_grad:
                call.gradients.awaited.add(name)
        for name, tensor in found:
            self._checks.add("in", (call,), tensor)
            self._gradients.follow_input(call, name, tensor)

    def _follow_edges(
        self, calls: OpenCalls[ActiveCall], ended: ActiveCall, returned: list[Tensor]
    ) -> None:
        """Check each share that a call adds to the gradients of its inputs."""
        if ended.edges is None:
            return
        if calls.notes:
            outer = calls.notes[-1].edges
            if outer is not None:
                outer.step_over(ended.edges, returned)
        ended.call.gradients.by_edge = numbers_operations()
        if ended.call.gradients.by_edge:
            self._gradients.follow_edges(ended.call, ended.edges.takers(returned))


def _is_left_out(module: nn.Module) -> bool:
    """Whether a call is skipped: it is repeated, or its values are not available.

    They are not in `torch.func`, while tracing, and in captured graphs.
    """
    unseen = modes.is_transforming() or modes.is_under_jit() or device_graphs.leaves_alone()
    return is_repeated(module) or unseen
