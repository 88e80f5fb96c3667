"""The hooks of `--dump` on gradients; a failure in them never ends the program.

# Note [Shares of a gradient]
The gradient of a tensor is the sum of the shares of all its uses, and a hook on the tensor sees the
sum. If a module and an operation beside it use the same tensor, the sum does not show which of the
two made it non-finite. But each share passes along an edge of its own, from the node of an
operation that took the tensor. When a call has ended, a search from its outputs backwards finds
those nodes; it steps over the calls inside, which have searched for theirs. A node made before the
call began does not belong to the call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from kedge.hooks.placing.installed import InstalledHooks
from kedge.repro.calls import RecordedCall, WatchedModule, held
from kedge.repro.finiteness import PendingChecks
from kedge.stderr import Shield
from kedge.torch_internals.autograd_nodes import edge_of, operation_number, sequence_number
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.hook_tables import hook_gradient
from kedge.torch_internals.modes import is_batched
from kedge.torch_internals.module_tables import own_parameters
from kedge.torch_internals.own_work import own_work


class GradientCheck:
    """A hook on the gradient of a tensor."""

    __torch_unserializable__ = True  # a tensor is sent or saved without it, and without a warning

    def __init__(self, shield: Shield, work: Callable[[Tensor], None]) -> None:
        self.shield = shield
        self.work = work

    def __call__(self, gradient: Tensor | None) -> None:
        """Called with the gradient; None for an unused output of a node of which others were used."""
        with own_work():
            if gradient is not None and not is_batched(gradient):
                self.shield(self.work, gradient)


class InputEdgeCheck:
    """A hook on one operation's share in the gradient of a call's input.

    See Note [Shares of a gradient].
    """

    def __init__(
        self, shield: Shield, checks: PendingChecks, call: RecordedCall, place: int
    ) -> None:
        self.shield = shield
        self.checks = checks
        self.call = call
        self.place = place

    def __call__(
        self,
        shares: tuple[Tensor | None, ...],
        gradients: tuple[Tensor | None, ...],
    ) -> None:
        """Called as the hook of an autograd node; checks the share."""
        share = shares[self.place]
        with own_work():
            if share is not None and not is_batched(share):
                self.shield(self.checks.add, "in.grad", (self.call,), share)


Edge = tuple[Node | None, int]


class CallEdges:
    """The place of an active call in autograd's graph; see Note [Shares of a gradient].

    Attributes:
        began: The number of the next operation when the call began.
        entries: The edges of its inputs.
        inner: For each node that made an output of a call inside, the edges of that call's inputs.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.began: int = operation_number()
        self.entries = {_edge(tensor) for tensor in given if tensor.requires_grad}
        self.inner: dict[Node, set[Edge]] = {}

    def takers(self, returned: Iterable[Tensor]) -> Iterator[tuple[Node, int]]:
        """Yield the call's own nodes that took its inputs.

        Each comes with the position of the input among the node's inputs.

        Args:
            returned: The outputs of the call.
        """
        made = [tensor for tensor in returned if tensor.grad_fn is not None]
        waiting: list[Any] = [each.grad_fn for each in made if _edge(each) not in self.entries]
        known = set(waiting)
        while waiting:
            node = waiting.pop()
            inner = self.inner.get(node)
            edges = node.next_functions if inner is None else inner
            for place, edge in enumerate(edges):
                before = edge[0]
                if edge in self.entries:
                    if inner is None:
                        yield node, place
                elif before is not None and before not in known and self._own(before):
                    known.add(before)
                    waiting.append(before)

    def step_over(self, call: CallEdges, returned: Iterable[Tensor]) -> None:
        """Take the edges of a call inside that has ended."""
        for tensor in returned:
            if tensor.grad_fn is not None and _edge(tensor) not in call.entries:
                self.inner[tensor.grad_fn] = call.entries

    def _own(self, node: Any) -> bool:
        return bool(sequence_number(node) >= self.began)


def _edge(tensor: Tensor) -> Edge:
    edge = edge_of(tensor)
    if edge is None:
        return None, 0
    return edge.node, edge.output_nr


class GradientHooks:
    """Hooks on the gradients of calls.

    The gradients are checked, and a call through which the backward has passed is released.

    Args:
        checks: Receives the gradients.
        shield: Runs the bodies of the hooks.
    """

    def __init__(self, checks: PendingChecks, shield: Shield) -> None:
        self._checks = checks
        self._shield = shield
        self._installed = InstalledHooks()

    def follow_parameters(self, watched: WatchedModule, module: nn.Module) -> None:
        """Check the gradients of a module's own parameters."""
        for name, param in own_parameters(module).items():
            if param is not None and param.requires_grad and not is_lazy(param):
                self._hook(param, partial(self._of_parameter, watched, name))

    def follow_input(self, call: RecordedCall, name: str, tensor: Tensor) -> None:
        """Check the gradient of a call's input, if it will have one."""
        if tensor.requires_grad and torch.is_grad_enabled():
            call.gradients.awaited.add(name)
            self._hook(tensor, partial(self._of_input, weakref.ref(call), name))

    def follow_output(self, call: RecordedCall, name: str, tensor: Tensor) -> None:
        """Check the gradient of a call's output, if it will have one; this keeps the call alive."""
        if tensor.requires_grad and torch.is_grad_enabled():
            self._hook(tensor, partial(self._of_output, call, name))

    def follow_edges(
        self,
        call: RecordedCall,
        takers: Iterable[tuple[Node, int]],
    ) -> None:
        """Check the call's own shares in the gradients of its inputs.

        Args:
            call: The call.
            takers: Its nodes that took inputs, each with the position of the input.
        """
        for node, place in takers:
            check = InputEdgeCheck(self._shield, self._checks, call, place)
            self._installed.keep(node.register_hook(check))

    def close(self) -> None:
        """Remove the hooks."""
        self._installed.clear()

    def _hook(self, tensor: Tensor, work: Callable[[Tensor], None]) -> None:
        self._installed.keep(hook_gradient(tensor, GradientCheck(self._shield, work)))

    def _of_output(self, call: RecordedCall, name: str, gradient: Tensor) -> None:
        call.gradients.arrived[name] = held(gradient)
        self._checks.add("out.grad", (call,), gradient)

    def _of_input(
        self,
        ref: weakref.ref[RecordedCall],
        name: str,
        gradient: Tensor,
    ) -> None:
        call = ref()
        if call is not None:
            if not call.gradients.by_edge:
                self._checks.add("in.grad", (call,), gradient)
            self._arrived(call, name)
            if call.gathers:
                self._checks.read()

    def _of_parameter(
        self,
        watched: WatchedModule,
        name: str,
        gradient: Tensor,
    ) -> None:
        calls = tuple(watched)
        self._checks.add("param.grad", calls, gradient)
        for call in calls:
            self._arrived(call, name)

    def _arrived(self, call: RecordedCall, name: str) -> None:
        """Release a call through which the backward has passed, once all sums are read."""
        call.gradients.awaited.discard(name)
        if call.gradients.complete:
            self._checks.when_read(call.release)


untraced(GradientCheck.__call__)
