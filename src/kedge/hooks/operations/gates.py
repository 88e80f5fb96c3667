"""The gates of operations: what one selector asked of the operations of one module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kedge.errors import EditError
from kedge.hooks.firing.find_tensors import look_through
from kedge.hooks.firing.fire import fire
from kedge.hooks.gates.modules import Gate
from kedge.sites import leaves
from kedge.sites.language import means_op, op_pattern
from kedge.sites.site import OP_KINDS, Site

if TYPE_CHECKING:
    from kedge.hooks.firing.schedule import Passes
    from kedge.hooks.operations.mode import Entry
    from kedge.hooks.operations.switch import Door
    from kedge.hooks.session import Session
    from kedge.sites.select import SitePlace

Op = tuple[str, int | None]


class OpGate(Gate):
    """The taps of one session on the operations that one pattern stands for, in one module."""

    kinds = OP_KINDS

    def __init__(self, session: Session, passes: Passes, door: Door, op: Op, place: SitePlace) -> None:
        super().__init__(session, passes, door.path)
        self.door, self.op, self.without, self.many = door, op, place.without, place.many
        self.early = self.late = self.backward = False
        self.ungraded = 0
        self.plain = op[1] is None and not place.without
        self._each: dict[tuple[str, int], OneOp] = {}

    def retime(self) -> None:
        """Find out whether anything here is on schedule, and on which side of an operation."""
        super().retime()
        self.early = any(self.wakes(tap) for kind in ("in", "in.grad") for tap in self.taps[kind])
        self.backward = any(tap.on for tap in self.taps["out.grad"])
        self.late = self.backward or any(self.wakes(tap) for tap in self.taps["out"])
        self.door.retime()

    def may_mean(self, name: str) -> bool:
        """Whether the pattern stands for an operation of this name, if not for each."""
        return op_pattern(self.op[0]).fullmatch(name) is not None

    def means(self, op: tuple[str, int]) -> bool:
        """Whether the pattern stands for this very operation, whose name it may mean."""
        return self.plain or (self.op[1] in (None, op[1]) and not any(means_op(other, op) for other in self.without))

    def _one(self, op: tuple[str, int]) -> OneOp:
        found = self._each.get(op)
        if found is None:
            found = self._each[op] = OneOp(self, op)
        return found

    def before(
        self, entry: Entry, op: tuple[str, int], args: Any, kwargs: Any, fixed: tuple[str, ...] = ()
    ) -> tuple[Any, Any]:
        """Take what an operation is given through the taps; returns what it is to be given.

        Args:
            entry: The call of the module.
            op: The operation.
            args: What it is given by position.
            kwargs: And by keyword.
            fixed: Names of what it is about to change in place, which cannot be replaced.
        """
        __tracebackhide__ = True
        one, call, recompute = self._one(op), entry.call, entry.recompute
        found = look_through(self, _arguments, args, kwargs)
        new: dict[str, Tensor] = {}
        if self.taps["in"]:
            new = one.through("in", found, call, recompute)
            found = [(leaf, new.get(leaf, tensor)) for leaf, tensor in found] if new else found
        if lost := [leaf for leaf in fixed if leaf in new]:
            raise EditError(
                f"a value was returned at {one.site('in', lost[0])}, but {op[0]} changes that very tensor in place, "
                "and the program goes on with it; edit the value where it is made, or what the operation returns"
            )
        if new:
            refuse_inside(entry, str(one.site("in", next(iter(new)))))
        if self.taps["in.grad"] and not entry.function:
            one.listen("in.grad", found, call, recompute)
            self.listened = max(self.listened, one.listened)
        if not new:
            return args, kwargs
        changed = tuple(leaves.put(value, new, str(i)) for i, value in enumerate(args))
        return changed, {name: leaves.put(value, new, name) for name, value in kwargs.items()}

    def after(self, entry: Entry, op: tuple[str, int], value: Any) -> Any:
        """Take what an operation has made through the taps; returns what the program is to get."""
        __tracebackhide__ = True
        self.called += 1
        self.recalled += entry.recompute
        self.ungraded += bool(entry.function)
        if not self.late:
            return value
        one, call, recompute = self._one(op), entry.call, entry.recompute
        final = op[0] == "setitem"
        if isinstance(value, Tensor) and not (self.backward or final):  # the common case
            return fire(self.taps["out"], value, self.passes.event(one.site("out", ""), call, recompute))
        found = look_through(self, leaves.find, value)
        new: dict[str, Tensor] = {}
        if self.taps["out"]:
            new = one.through("out", found, call, recompute)
            found = [(leaf, new.get(leaf, tensor)) for leaf, tensor in found] if new else found
        if new and final:
            raise EditError(
                f"a value was returned at {one.site('out', '')}, but {op[0]} returns nothing, so it has nowhere to go; "
                "edit what is assigned, at :in[2]"
            )
        if self.backward and not entry.function:
            one.listen("out.grad", found, call, recompute)
            self.listened = max(self.listened, one.listened)
        return leaves.put(value, new) if new else value


class OneOp(Gate):
    """One operation at a gate: its sites. The taps, and what was seen, are those of the gate."""

    kinds = OP_KINDS

    def __init__(self, gate: OpGate, op: tuple[str, int]) -> None:
        super().__init__(gate.session, gate.passes, gate.path)
        self.taps, self.leaves, self.pulses = gate.taps, gate.leaves, gate.pulses
        self.op = op

    def site(self, kind: str, leaf: str) -> Site:
        """The site of one leaf, made once."""
        site = self.sites.get((kind, leaf))
        if site is None:
            site = self.sites[kind, leaf] = Site(self.path, kind, leaf or None, op=self.op)
            self.leaves[leaf] = None
        return site


def refuse_inside(entry: Entry, site: str) -> None:
    """Refuse an edit where no gradient would know of it; see Note [Inside a function of one's own].

    Raises:
        EditError: If the operation is in the forward of a `torch.autograd.Function`.
    """
    if entry.function:
        raise EditError(
            f"a value was returned at {site}, but this is in the forward of {entry.function}, a torch.autograd.Function, whose "
            "backward does not know of it, so the gradient would be wrong; edit what it is given, or what is made of its result"
        )


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Every tensor among the arguments, by position or keyword."""
    found = []
    for i, value in enumerate(args):
        found += leaves.find(value, str(i))
    for name, value in kwargs.items():
        found += leaves.find(value, name)
    return found
