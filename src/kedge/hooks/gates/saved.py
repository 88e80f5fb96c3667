"""The ``:saved`` sites of a session: the tensors that autograd saves while a module is the innermost.

# Note [What is a save]
Autograd saves a tensor when an operation needs it for its backward. Each save is an event of the
innermost module with an active call; the leaf is the number of the save within that call, from 0. A
tensor that two operations need is saved twice. Parameters, buffers and inputs are saved like all
others.

# Note [Taken away]
After the program's own pair of hooks, or a `kedge.offload` further inside, has replaced a tensor by
something else, actions can observe the tensor, but not replace it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from kedge.errors import EditError
from kedge.flow import Event
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.gate import Gate
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Spec
from kedge.hooks.gates.gradients import is_rebuilt
from kedge.hooks.saved.keeper import KeeperCalls, ModuleUnderKeeper, SavingPlace, keep
from kedge.hooks.saved.pairs import JointPacked, is_checkpoint
from kedge.hooks.saved.reference import KeptByReference
from kedge.sites.leaves import describe
from kedge.sites.select import SitePlace as Placed
from kedge.torch_internals.saved_hooks import disabled, top_hooks


@runtime_checkable
class Packing(Protocol):
    """An action that replaces the tensors that autograd saves by packed objects."""

    def taken(self) -> list[Any]:
        """Return the object packed by the last call on this thread, and forget it.

        An empty list if no call ran.
        """

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor of a packed object."""


class SavedGate(Gate):
    """The taps of one session on the tensors saved in one module.

    Attributes:
        ungraded: How many of its calls ran without grad.
        checkpointed: How many ran in a checkpointed function.
        forbidden: How many ran in a transform of `torch.func`.
        compiled: Whether the model, or a module of it, is compiled.
    """

    kinds = ("saved",)

    def __init__(
        self, owner: Owner, passes: PassCounter, path: str, changed: Callable[[], None]
    ) -> None:
        super().__init__(owner, passes, path)
        self.changed = changed
        self.ungraded = self.checkpointed = self.forbidden = 0
        self.compiled = self.packing = False

    def retime(self) -> None:
        """Update whether any tap is on schedule, or packs, and notify the keeper."""
        super().retime()
        self.packing = any(isinstance(tap.action, Packing) for tap in self.taps["saved"])
        self.changed()

    def count(self) -> tuple[int, bool]:
        """Count a call of the module.

        Returns its number, and whether it is a recompute.
        """
        call, recompute = self.passes.count(self)
        self.called += 1
        self.seen.again += recompute
        if not recompute:
            self.ungraded += not torch.is_grad_enabled()
            self.forbidden += disabled() is not None
            top = top_hooks(True)
            self.checkpointed += (top is not None and is_checkpoint(top)) or is_rebuilt(self)
        return call, recompute

    def event(self, place: SavingPlace, value: Tensor) -> Event:
        """Return the event of a call's next save."""
        leaf = str(place.saves)
        place.saves += 1
        return self.passes.event(self.site("saved", leaf), place.call, place.recompute)

    def take(self, value: Tensor, place: SavingPlace) -> Any:
        """Run the taps; returns the packed replacement of the tensor, or None."""
        event = self.event(place, value)
        shown = value.detach()
        if self.packing:
            return self._pack(shown, event)
        new = fire(self.taps["saved"], shown, event)
        if new is shown:
            return None
        return JointPacked(KeptByReference(new), (KeptByReference.read,))

    def _pack(self, first: Tensor, event: Event) -> Any:
        """Run taps some of which pack.

        Each receives the result of the one before, as long as that is a tensor.
        """
        packed: Any = first
        shown: Tensor = first
        back: list[Callable[[Any], Tensor]] = []
        for tap in self.taps["saved"]:
            action: Any = tap.action
            whole = isinstance(packed, Tensor)
            if not isinstance(action, Packing):
                new = fire((tap,), shown, event)
                if new is not shown and not whole:
                    self._refuse(event)
                if new is not shown:
                    packed = new
                    shown = new
            elif whole:
                fire((tap,), shown, event)
                for packed in action.taken():
                    back.insert(0, _checked(action, shown, event))
                    if isinstance(packed, Tensor):
                        shown = packed.detach()
        if packed is first and not back:
            return None
        if isinstance(packed, Tensor):
            return JointPacked(KeptByReference(packed), (KeptByReference.read, *back))
        return JointPacked(packed, tuple(back))

    def see(self, value: Tensor, place: SavingPlace) -> None:
        """Show the taps a tensor that another has taken; see Note [Taken away]."""
        event = self.event(place, value)
        shown = value.detach()
        taps = self.taps["saved"]
        looking = tuple(tap for tap in taps if not isinstance(tap.action, Packing))
        if fire(looking, shown, event) is not shown:
            self._refuse(event)

    def _refuse(self, event: Event) -> NoReturn:
        raise EditError(
            f"an action returned a value at {event.site}, but another saved-tensor "
            "hook has already packed this tensor, so it cannot be replaced; attach "
            "the action inside that hook's context, or return None"
        )


def _checked(action: Packing, like: Tensor, event: Event) -> Callable[[Any], Tensor]:
    """Return an action's unpack with a check that its result has the shape, dtype and device of the packed tensor."""
    wanted = (like.shape, like.dtype, like.device)
    was = describe(like)

    def unpack(packed: Any) -> Tensor:
        value = action.unpack(packed)
        if not isinstance(value, Tensor) or (value.shape, value.dtype, value.device) != wanted:
            raise EditError(
                f"{action!r} at {event.site}: unpack returned {describe(value)}, but "
                f"the packed tensor was {was} on {wanted[2]}; it must return the "
                "same shape, dtype and device"
            )
        return value

    return unpack


class SavedSites:
    """The keeper of a session on one model: passes saved tensors to the gates of the modules."""

    watches = True

    def __init__(
        self, owner: Owner, passes: PassCounter, model: nn.Module, *, compiled: bool
    ) -> None:
        self.owner = owner
        self.passes = passes
        self.gates: dict[str, SavedGate] = {}
        self.kept = keep(
            owner.installed.cleanup, model, self, outside=False, ambient=False, compiled=compiled
        )
        self.kept.count = self._count
        self.kept.idle = True
        owner.installed.add(self.kept)

    def place(self, place: Placed, spec: Spec) -> None:
        """Attach taps to the tensors that autograd saves while a module is the innermost."""
        self._gate(place.site.path, place.module).attach(spec, place.site)

    def _gate(self, path: str, module: nn.Module) -> SavedGate:
        """Return the gate of a module, created on first use."""
        gate = self.gates.get(path)
        if gate is None:
            gate = self.gates[path] = SavedGate(self.owner, self.passes, path, self._retime)
            gate.compiled = self.kept.compiled
            self.kept.spot(path, module).gate = gate
        return gate

    def pack(self, value: Tensor, place: SavingPlace) -> Any:
        """Run the taps of the innermost module, if it has any.

        Returns the packed replacement, or None.
        """
        gate = place.spot.gate
        if gate is None or not gate.live:
            return None
        return gate.take(value, place)

    def see(self, value: Tensor, place: SavingPlace) -> None:
        """Show the innermost module's taps a tensor that another has taken."""
        gate = place.spot.gate
        if gate is not None and gate.live:
            gate.see(value, place)

    def unpack(self, packed: JointPacked) -> Tensor:
        """Return a saved tensor."""
        return packed.read()

    def _retime(self) -> None:
        self.kept.idle = not any(gate.live for gate in self.gates.values())

    def _count(self, live: KeeperCalls, spot: ModuleUnderKeeper, task: int) -> tuple[int, bool]:
        gate: SavedGate | None = spot.gate
        if gate is None:
            return 0, task != -1
        return gate.count()
