"""The hooks of `--dump` on gradients; a failure in them never ends the program."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.nn.parameter import is_lazy

from kedge.hooks.placing.installed import InstalledHooks
from kedge.repro.calls import RecordedCall, WatchedModule, held
from kedge.repro.finiteness import PendingChecks
from kedge.stderr import Shield
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.hook_tables import hook_gradient
from kedge.torch_internals.modes import is_batched
from kedge.torch_internals.module_tables import own_parameters
from kedge.torch_internals.own_work import own_work


class GradientCheck:
    """A hook on the gradient of a tensor."""

    __torch_unserializable__ = True  # a tensor is sent or saved without it, and without a warning

    def __init__(self, shield: Shield, work: Callable[[Tensor], None]) -> None:
        self.shield, self.work = shield, work

    def __call__(self, gradient: Tensor | None) -> None:
        """Called with the gradient; with None for an unused output, if other outputs of its node were used."""
        with own_work():
            if gradient is not None and not is_batched(gradient):
                self.shield(self.work, gradient)


class InputEdgeCheck:
    """A hook on one operation's share in the gradient of a call's input; see Note [Shares of a gradient]."""

    def __init__(
        self, shield: Shield, checks: PendingChecks, call: RecordedCall, place: int
    ) -> None:
        self.shield, self.checks, self.call, self.place = shield, checks, call, place

    def __call__(
        self, shares: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Called as the hook of an autograd node; checks the share."""
        share = shares[self.place]
        with own_work():
            if share is not None and not is_batched(share):
                self.shield(self.checks.add, "in.grad", (self.call,), share)


class GradientHooks:
    """Hooks on the gradients of calls: they are checked, and a call through which the backward has passed is released.

    Args:
        checks: Receives the gradients.
        shield: Runs the bodies of the hooks.
    """

    def __init__(self, checks: PendingChecks, shield: Shield) -> None:
        self._checks, self._shield = checks, shield
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
        """Check the gradient of a call's output, if it will have one; the hook keeps the call alive."""
        if tensor.requires_grad and torch.is_grad_enabled():
            self._hook(tensor, partial(self._of_output, call, name))

    def follow_edges(self, call: RecordedCall, takers: Iterable[tuple[Node, int]]) -> None:
        """Check the call's own shares in the gradients of its inputs.

        Args:
            call: The call.
            takers: Its nodes that took inputs, each with the position of the input.
        """
        for node, place in takers:
            self._installed.keep(
                node.register_hook(InputEdgeCheck(self._shield, self._checks, call, place))
            )

    def close(self) -> None:
        """Remove the hooks."""
        self._installed.clear()

    def _hook(self, tensor: Tensor, work: Callable[[Tensor], None]) -> None:
        self._installed.keep(hook_gradient(tensor, GradientCheck(self._shield, work)))

    def _of_output(self, call: RecordedCall, name: str, gradient: Tensor) -> None:
        call.gradients.arrived[name] = held(gradient)
        self._checks.add("out.grad", (call,), gradient)

    def _of_input(self, ref: weakref.ref[RecordedCall], name: str, gradient: Tensor) -> None:
        call = ref()
        if call is not None:
            if not call.gradients.by_edge:
                self._checks.add("in.grad", (call,), gradient)
            self._arrived(call, name)
            if call.gathers:
                self._checks.read()

    def _of_parameter(self, watched: WatchedModule, name: str, gradient: Tensor) -> None:
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
