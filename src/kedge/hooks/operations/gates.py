"""The gates of operations: each holds the taps of one selector's pattern in one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch import Tensor, nn

from kedge.errors import EditError
from kedge.flow import Preserving
from kedge.frames import SourceLine
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.gate import Gate
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.gates.gradients import listen_each
from kedge.sites import leaves
from kedge.sites.language import means_op, op_pattern
from kedge.sites.select import SitePlace
from kedge.sites.site import OP_KINDS, VARIABLE, Site
from kedge.torch_internals.assigned_names import unseen_assignments
from kedge.torch_internals.own_work import OwnWork, is_watched

Op = tuple[str, int | None]


@dataclass
class OpPattern:
    """The operations of a module that a site matches.

    Attributes:
        op: The pattern of their names, and the number among those of one name; None for each.
        without: Excluded operations.
    """

    op: Op
    without: tuple[Op, ...]
    _each: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Compute whether it matches every operation with a fitting name."""
        self._each = self.op[1] is None and not self.without

    def may_mean(self, name: str) -> bool:
        """Whether it matches at least some operations of this name."""
        return op_pattern(self.op[0]).fullmatch(name) is not None

    def means(self, op: tuple[str, int]) -> bool:
        """Whether it matches an operation, given that the name fits."""
        return self._each or (
            self.op[1] in (None, op[1]) and not any(means_op(other, op) for other in self.without)
        )


class ModuleOperations:
    """The operations of one module: their gates, and counts of the module's operations.

    Attributes:
        gates: The gates, in the order of their creation.
        matched: The gates that may match an operation, by its name.
        preserving: Actions to notify before an operation overwrites values that they keep.
        live: Whether any gate is on schedule.
        away: Whether the session is paused.
        captured: Whether a compiler captured a call.
        called: How many calls there were.
        fused: How many of them took a fused path, where operations cannot be seen.
        made: The largest number of operations of each name in one call.
        raised: The names of operations that raised, or whose actions did.
        interrupted: Whether a call inside one of them ended without PyTorch calling its hooks.
        unready: The names of operations that returned before they had a result.
        runs: What runs them, in messages.
        listing: How to find others, in messages.
        forward: The code whose variables are hooked; None if none are.
        assigned: The places in that code that were seen to assign results.
        kept: The lines of functions that kept or changed the result of an operation, by the
            variable that got what they returned.
    """

    runs = "its own forward"
    listing = "list its operations with kedge.operations(model, ...)"

    def __init__(self, path: str) -> None:
        self.path = path
        self.gates: tuple[OperationGate, ...] = ()
        self.preserving: tuple[Preserving, ...] = ()
        self.live = self.away = self.captured = self.interrupted = False
        self.forward: CodeType | None = None
        self.assigned: set[int] = set()
        self.kept: dict[str, SourceLine] = {}
        self.raised: set[str] = set()
        self.unready: set[str] = set()
        self.called = self.fused = 0
        self.made: dict[str, int] = {}
        self.matched: dict[str, tuple[OperationGate, ...]] = {}

    def retime(self) -> None:
        """Update whether any gate is on schedule."""
        self.live = any(gate.live for gate in self.gates)

    def close(self) -> None:
        """Remove every gate."""
        self.gates = ()
        self.live = False
        self.matched = {}

    def match(self, name: str) -> tuple[OperationGate, ...]:
        """Return the gates that may match an operation of this name."""
        found = self.matched[name] = tuple(
            gate for gate in self.gates if name and (gate.variable or gate.pattern.may_mean(name))
        )
        return found

    def add(self, gate: OperationGate) -> None:
        """Add a gate behind the others."""
        self.gates += (gate,)
        self.matched = {}
        self.retime()

    def watch_overwrites(self, actions: Sequence[Preserving]) -> None:
        """Notify these actions, which keep values without a copy, before an operation changes them in place."""
        self.preserving += tuple(action for action in actions if action not in self.preserving)


def gate_for(
    owner: Owner,
    passes: PassCounter,
    operations: ModuleOperations,
    place: SitePlace,
    kind: type[OperationGate],
) -> OperationGate:
    """Return the gate for new taps at a place: the last one, if its pattern is the same."""
    gate = operations.gates[-1] if operations.gates else None
    pattern = OpPattern(place.site.op or ("*", None), place.without)
    if gate is not None and gate.pattern == pattern:
        gate.many = gate.many and place.many
        return gate
    gate = kind(owner, passes, operations, place)
    operations.add(gate)
    return gate


class PassedOver(NamedTuple):
    """One active call of an unhooked child, given by the frame that calls its hooks."""

    operations: ModuleOperations
    frame: FrameType


class ForwardUnderWay:
    """One active call of a module: its frame, and the operations it has called so far.

    Attributes:
        operations: The operations of the module.
        module: The module; None for a part of its forward that a checkpoint runs again.
        function: The name of the `torch.autograd.Function` whose forward runs the current
            operation; empty without one.
    """

    __slots__ = (
        "again",
        "call",
        "checkpoint",
        "code",
        "counts",
        "frame",
        "function",
        "module",
        "operations",
        "recompute",
        "seen",
    )

    def __init__(
        self,
        operations: ModuleOperations,
        frame: FrameType | None,
        module: nn.Module | None = None,
        *,
        seen: bool,
    ) -> None:
        self.operations = operations
        self.frame = frame
        self.module = module
        self.seen = seen
        self.checkpoint: Any = None
        self.again: list[Any] = []
        self.code: CodeType | None = None
        self.call = 0
        self.recompute = False
        self.function = ""
        self.counts: dict[str, int] = {}


class OperationGate(Gate):
    """The taps of one session on the operations that one pattern matches, in one module.

    Attributes:
        early: Whether any tap at an operation's inputs is on schedule.
        late: Whether any tap at its outputs is, or at their gradients.
        backward: Whether any tap at its outputs' gradients is.
        many: Whether the module is one of several that a pattern matches, so that it may well have
            no such operation.
        variable: Whether it is of variables: it may match any operation that is assigned to one.
        ungraded: How many operations ran in the forward of a `torch.autograd.Function`.
    """

    kinds = OP_KINDS

    def __init__(
        self, owner: Owner, passes: PassCounter, operations: ModuleOperations, place: SitePlace
    ) -> None:
        super().__init__(owner, passes, operations.path)
        self.operations = operations
        self.many = place.many
        self.pattern = OpPattern(place.site.op or ("*", None), place.without)
        self.variable = self.pattern.op[0].endswith(VARIABLE)
        self.early = self.late = False
        self.ungraded = 0
        self._each: dict[tuple[str, int], OperationEvents] = {}

    @property
    def counted(self) -> Any:
        """The operations of the module: its calls, not theirs, are counted."""
        return self.operations

    def retime(self) -> None:
        """Update which taps are on schedule, on each side of an operation."""
        super().retime()
        self.early = any(self.is_due(tap) for kind in ("in", "in.grad") for tap in self.taps[kind])
        self.backward = any(tap.on for tap in self.taps["out.grad"])
        self.late = self.backward or any(self.is_due(tap) for tap in self.taps["out"])
        self.operations.retime()

    def unseen(self) -> list[str]:
        """Return the lines that assign a variable something that was not seen; none of other sites."""
        code = self.operations.forward
        name = self.pattern.op[0].removesuffix(VARIABLE)
        if not self.variable or code is None:
            return []
        return unseen_assignments(code, name, self.operations.assigned)

    def _one(self, op: tuple[str, int]) -> OperationEvents:
        found = self._each.get(op)
        if found is None:
            found = self._each[op] = OperationEvents(self, op)
        return found

    def before(
        self,
        entry: ForwardUnderWay,
        op: tuple[str, int],
        args: Any,
        kwargs: Any,
        fixed: tuple[str, ...] = (),
    ) -> tuple[Any, Any]:
        """Pass an operation's arguments through the taps.

        Args:
            entry: The call of the module.
            op: The operation.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
            fixed: Names of the arguments that it changes in place, which cannot be replaced.

        Returns:
            The positional and the keyword arguments for the operation.

        Raises:
            EditError: If an action replaces one of `fixed`, or edits inside a
                `torch.autograd.Function`.
        """
        __tracebackhide__ = True
        if is_watched():
            with OwnWork():
                return self.before(entry, op, args, kwargs, fixed)
        one = self._one(op)
        call = entry.call
        recompute = entry.recompute
        found = self.look_through(_arguments, args, kwargs)
        if not found:
            self.seen.empty = self.seen.empty or "its arguments hold no tensor"
        new: dict[str, Tensor] = {}
        if self.taps["in"]:
            new = one.through("in", found, call, recompute)
            found = [(leaf, new.get(leaf, tensor)) for leaf, tensor in found] if new else found
        if lost := [leaf for leaf in fixed if leaf in new]:
            raise EditError(
                f"an action returned a value at {one.site('in', lost[0])}, but "
                f"{op[0]} changes the original tensor in place, and the program "
                "continues with that; edit the value where it is made, or the "
                "operation's result"
            )
        if new:
            refuse_inside(entry, str(one.site("in", next(iter(new)))))
        if self.taps["in.grad"] and not entry.function:
            self._listen(one, "in.grad", found, entry)
        if not new:
            return args, kwargs
        changed = tuple(leaves.put(value, new, str(i)) for i, value in enumerate(args))
        return changed, {name: leaves.put(value, new, name) for name, value in kwargs.items()}

    def after(
        self, entry: ForwardUnderWay, op: tuple[str, int], value: Any, *, final: bool = False
    ) -> Any:
        """Pass an operation's result through the taps.

        Args:
            entry: The call of the module.
            op: The operation.
            value: The result.
            final: Whether it was written into an argument, so that nothing can replace it.

        Returns:
            The result for the program.

        Raises:
            EditError: If an action replaces what is final.
        """
        __tracebackhide__ = True
        if is_watched():
            with OwnWork():
                return self.after(entry, op, value, final=final)
        self.called += 1
        if entry.recompute:
            self.seen.again += 1
        self.ungraded += bool(entry.function)
        if not self.late:
            return value
        one = self._one(op)
        call = entry.call
        recompute = entry.recompute
        if isinstance(value, Tensor) and not (self.backward or final):  # the common case
            return fire(
                self.taps["out"], value, self.passes.event(one.site("out", ""), call, recompute)
            )
        found = self.look_through(leaves.find, value)
        new: dict[str, Tensor] = {}
        if self.taps["out"]:
            new = one.through("out", found, call, recompute)
            found = [(leaf, new.get(leaf, tensor)) for leaf, tensor in found] if new else found
        if new and final:
            remedy = "edit what goes into it"
            if op[0] == "setitem":
                remedy = "edit the assigned value, at :in[2]"
            raise EditError(
                f"an action returned a value at {one.site('out', '')}, but {op[0]} "
                f"returns nothing that it could replace; {remedy}"
            )
        if self.backward and not entry.function:
            self._listen(one, "out.grad", found, entry)
        return leaves.put(value, new) if new else value

    def _listen(
        self,
        one: OperationEvents,
        kind: str,
        found: list[tuple[str, Tensor]],
        entry: ForwardUnderWay,
    ) -> None:
        listen_each(one, kind, found, entry.call, entry.recompute)
        self.seen.listened = max(self.seen.listened, one.seen.listened)


class OperationEvents(Gate):
    """The sites of one operation at a gate.

    The taps, and the leaves seen, are those of the gate.
    """

    kinds = OP_KINDS

    def __init__(self, gate: OperationGate, op: tuple[str, int]) -> None:
        super().__init__(gate.owner, gate.passes, gate.path)
        self.taps = gate.taps
        self.op = op
        self.seen.leaves = gate.seen.leaves
        self.seen.pulses = gate.seen.pulses

    def site(self, kind: str, leaf: str) -> Site:
        """The site of one leaf, cached."""
        site = self.sites.get((kind, leaf))
        if site is None:
            site = self.sites[kind, leaf] = Site(
                self.passes.label(self.path), kind, leaf or None, op=self.op
            )
            self.seen.leaves[leaf] = None
        return site


def refuse_inside(entry: ForwardUnderWay, site: str) -> None:
    """Refuse an edit that the gradient would miss; see Note [Inside a function of one's own].

    Raises:
        EditError: If the operation is in the forward of a `torch.autograd.Function`.
    """
    if entry.function:
        raise EditError(
            f"an action returned a value at {site}, but this is in the forward of "
            f"{entry.function}, a torch.autograd.Function, whose backward ignores "
            "the edit, so the gradient would be wrong; edit the function's inputs "
            "or outputs"
        )


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return every tensor among the arguments, by position or keyword."""
    found = []
    for i, value in enumerate(args):
        found += leaves.find(value, str(i))
    for name, value in kwargs.items():
        found += leaves.find(value, name)
    return found
