"""The ``:saved`` site without a model: the tensors that autograd saves on one thread while a session is open.

# Note [Passes of a block]
Without a model there is no forward pass to count by. A pass of a block begins with the first save,
and with the first save after a backward pass has read a tensor of the pass before, or after
autograd has released all of them. So in a training loop each step is a pass, and each save has the
same number in each step.

# Note [Names of saves]
When autograd saves a tensor, it does not tell which operation needs it. A tensor with a graph knows
the operation that made it. So a save has the name of that operation, or ``leaf``, counted within
the pass, and its own number: ``/exp#0:saved[2]``.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from kedge.errors import NoSuchKind
from kedge.flow import Event
from kedge.hooks.firing.cause import Cause
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Spec, Tap
from kedge.hooks.gates.saved import SavedGate
from kedge.hooks.saved.keeper import SavingPlace, keep
from kedge.hooks.saved.pairs import JointPacked
from kedge.hooks.saved.reference import KeptByReference
from kedge.sites.language import Term
from kedge.sites.select import Selector
from kedge.sites.site import Site
from kedge.torch_internals.autograd_nodes import operation_of
from kedge.torch_internals.graph_task import in_backward

_MADE = ("*", None)


class ReadOfPass:
    """Notified when a backward pass reads a tensor of one pass; see Note [Passes of a block].

    Attributes:
        read: Whether one was read.
    """

    __slots__ = ("__weakref__", "read")

    def __init__(self) -> None:
        self.read = False

    def unpacked(self) -> None:
        """Note that autograd reads a tensor."""
        self.read = True


class BlockGate(SavedGate):
    """The taps of one session on all tensors that autograd saves on its thread."""

    def __init__(self, owner: Owner, passes: PassCounter) -> None:
        super().__init__(owner, passes, "", _unchanged)
        self._pass: weakref.ref[ReadOfPass] | None = None
        #: Of a pass with tensors whose release cannot be noticed.
        self._taken: ReadOfPass | None = None
        self._made: dict[str, int] = {}

    def event(self, place: SavingPlace, value: Tensor) -> Event:
        """Return the event of the pass's next save; see Note [Names of saves]."""
        name = operation_of(value.grad_fn)
        number = self._made[name] = self._made.get(name, -1) + 1
        site = Site("", "saved", str(place.saves), op=(name, number))
        place.saves += 1
        self.called += 1
        return self.passes.event(site, 0, recompute=False)

    def take(self, value: Tensor, place: SavingPlace) -> Any:
        """Run the taps.

        Returns the packed replacement of the tensor, or a reference that notices its release.
        """
        reader = self._of_pass(place)
        packed = super().take(value, place) if self.live else None
        if isinstance(packed, JointPacked):
            return packed._replace(readers=(*packed.readers, reader))
        return KeptByReference(value, reader)

    def see(self, value: Tensor, place: SavingPlace) -> None:
        """Show the taps a tensor that another has taken."""
        self._taken = self._of_pass(place)
        if self.live:
            super().see(value, place)

    def _of_pass(self, place: SavingPlace) -> ReadOfPass:
        """Return the notes on the current pass; begins a pass where one is over."""
        known = self._pass() if self._pass is not None else None
        if known is not None and (not known.read or in_backward()):
            return known
        self.passes.begin(inside=False)
        self._made.clear()
        place.saves = 0
        new = ReadOfPass()
        self._pass = weakref.ref(new)
        self._taken = None
        return new

    def why(self, tap: Tap) -> Cause:
        """Return the cause of a tap never firing."""
        if not self.called:
            return Cause(
                "no tensor that autograd saved on this thread came here",
                "compute in the block, with grad, on a tensor that requires grad; a "
                "pair of hooks that opens inside the block, such as save_on_cpu, "
                "takes the tensors alone, so hook inside it; torch.func and "
                "disabled hooks show none",
            )
        why = "it was off at each of the saves"
        if tap.site.leaf is not None:
            why = f"no pass of the block saved a tensor [{tap.site.leaf}]"
        return Cause(why, "saves are counted from 0; s.timeline() lists them")


def _unchanged() -> None:
    """Do nothing where a gate is retimed: its schedule is followed from pass to pass."""


class BlockSaves:
    """The keeper of a session on the thread that opened it.

    Attributes:
        gate: Its taps.
    """

    watches = True

    def __init__(self, owner: Owner) -> None:
        owner.installed.on_failure(setattr, owner.clock, "leader", owner.clock.leader)
        self.gate = BlockGate(owner, owner.clock.follow_code())
        self._kept = keep(owner.installed.cleanup, nn.Module(), self, ambient=True)
        owner.installed.install(self)

    def pack(self, value: Tensor, place: SavingPlace) -> Any:
        """Run the taps.

        Returns the packed replacement of the tensor, or a reference to it.
        """
        return self.gate.take(value, place)

    def see(self, value: Tensor, place: SavingPlace) -> None:
        """Show the taps a tensor that another has taken."""
        self.gate.see(value, place)

    def unpack(self, packed: JointPacked) -> Tensor:
        """Return a saved tensor."""
        return packed.read()

    def place(self, selector: Selector, spec: Spec) -> None:
        """Attach taps to all saves, or to those of one number in each pass."""
        for term in selector.terms:
            for tap in self.gate.attach(spec, Site("", "saved", term.leaf, op=_MADE)):
                tap.site = Site("", "saved", term.leaf)

    def out(self) -> None:
        """Stop asking on this thread until `back`."""
        self._kept.out()

    def back(self) -> None:
        """Ask on this thread again."""
        self._kept.begin()

    def remove(self) -> None:
        """Stop asking for good."""
        self._kept.end()


class ThisBlock:
    """The target of hooks on what autograd saves without a model."""


this_block = ThisBlock()


def is_of_block(target: str | list[str] | Selector) -> bool:
    """Whether a selector in the target's place is of saved tensors, so that there is no model.

    Raises:
        NoSuchKind: If it names other kinds of sites, too, or an operation.
    """
    selector = target if isinstance(target, Selector) else Selector(target)
    for term in selector.terms:
        if term.op and term.kind == "saved" and not (term.path or term.types):
            raise NoSuchKind(
                f'"{term}": saved tensors cannot be hooked by operation; hook '
                f'":saved", and read one as acts["{term}"]'
            )
    own = [_is_of_all_saves(term) for term in selector.terms]
    if any(own) and not all(own):
        raise NoSuchKind(
            f'"{selector}": ":saved" without a model selects all that autograd '
            "saves, and no other sites; hook those separately"
        )
    return any(own)


def _is_of_all_saves(term: Term) -> bool:
    if term.path or term.types or term.op or term.excluded:
        return False
    return term.call is None and term.kind == "saved"
