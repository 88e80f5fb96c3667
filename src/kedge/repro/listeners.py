"""The hooks of `FirstBadCall` on gradients; a failure in them never ends the program."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kedge.repro.calls import RecordedCall
from kedge.repro.finiteness import PendingChecks
from kedge.stderr import Shield
from kedge.torch_internals.dynamo import untraced


class GradientCheck:
    """A hook on the gradient of a tensor."""

    __torch_unserializable__ = True  # a tensor is sent or saved without it, and without a warning

    def __init__(self, shield: Shield, work: Callable[[Tensor], None]) -> None:
        self.shield, self.work = shield, work

    def __call__(self, gradient: Tensor) -> None:
        """Called with the gradient."""
        self.shield(self.work, gradient)


class InputEdgeListener:
    """A hook on one operation's share in the gradient of a call's input; see Note [Shares of a gradient]."""

    def __init__(self, shield: Shield, looks: PendingChecks, call: RecordedCall, place: int) -> None:
        self.shield, self.looks, self.call, self.place = shield, looks, call, place

    def __call__(self, shares: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """Called as the hook of an autograd node; checks the share."""
        share = shares[self.place]
        if share is not None:
            self.shield(self.looks.look, "in.grad", (self.call,), share)


untraced(GradientCheck.__call__)
