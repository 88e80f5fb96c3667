"""Variables of a forward, by their names: the results that its lines assign to them.

# Note [Variables]
A variable's site is the result of the call whose result the line assigns to it: of an operation, or
of a module that the forward calls; see Note [Assigned to a variable] in
`torch_internals.assigned_names`. So a replaced value goes on into the rest of the forward. The
assignments of a name are numbered in the order in which they run, those of other values apart: a
constant, another variable, or what a function of Python's own returns that works on after its last
operation. They are not seen, and an error says so before the model runs if a variable has no
others.

The value of a module's output is what the module's last hook has left. Hooks that come later move
this one behind them, in the module's next call.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from kedge.hooks.firing.owner import Owner
from kedge.hooks.operations.gates import ForwardUnderWay, ModuleOperations, OperationGate
from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.installed import ConcealedHook
from kedge.sites import leaves
from kedge.sites.site import VARIABLE
from kedge.torch_internals.assigned_names import assigned, kept_between
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.hook_tables import after_forward, last_hook
from kedge.torch_internals.module_calls import calls_around
from kedge.torch_internals.module_tables import modules_in


def assign(
    entry: ForwardUnderWay,
    gates: Sequence[OperationGate],
    value: Any,
    frame: FrameType | None,
) -> Any:
    """Pass the result of a call through the gates of the variables that it is assigned to.

    Args:
        entry: The call of the module, or function, that has the variables.
        gates: Its gates of variables.
        value: The result.
        frame: The frame of the call.

    Returns:
        The result for the program.
    """
    __tracebackhide__ = True
    found = assigned(frame, entry.operations.forward)
    if not found:
        _note_kept(entry.operations, frame)
    for name, part, place in found:
        entry.operations.assigned.add(place)
        value = _assign_one(entry, gates, value, f"{name}{VARIABLE}", part)
    return value


def _note_kept(operations: ModuleOperations, frame: FrameType | None) -> None:
    """Note a function that has kept the result of a call, where its own result is assigned to a variable."""
    kept, line = kept_between(frame, operations.forward)
    for name, _, place in kept:
        if line is not None and place not in operations.assigned:
            operations.kept[f"{name}{VARIABLE}"] = line


def _assign_one(
    entry: ForwardUnderWay,
    gates: Sequence[OperationGate],
    value: Any,
    name: str,
    part: int | None,
) -> Any:
    __tracebackhide__ = True
    found = value if part is None else _part_of(value, part)
    if not leaves.find(found):
        return value
    number = entry.counts.get(name, 0)
    entry.counts[name] = number + 1
    made = entry.operations.made
    made[name] = max(made.get(name, 0), number + 1)
    new = found
    for gate in gates:
        if gate.pattern.may_mean(name) and gate.pattern.means((name, number)):
            new = gate.after(entry, (name, number), new)
    if new is found:
        return value
    if part is None:
        return new
    inside = leaves.find(new, str(part))
    return leaves.put(value, dict(inside))


def _part_of(value: Any, part: int) -> Any:
    """Return what a variable gets of several values; None of what cannot be taken apart without changing it."""
    if isinstance(value, (tuple, list)) and part < len(value):
        return value[part]
    return None  # the rows of a tensor are made by an operation of their own


class OutputAssigned(KedgeHook):
    """Forward hook of a module inside another, whose forward may assign the output to a variable.

    Args:
        owner: The session.
        here: The modes of all threads.
        operations: The operations of the module around.
        module: The module inside.
    """

    def __init__(
        self, owner: Owner, here: Any, operations: ModuleOperations, module: nn.Module
    ) -> None:
        self.owner = owner
        self.here = here
        self.operations = operations
        self._last = self._put(module)
        owner.installed.put_around(module, OutputLast(self))

    def _put(self, module: nn.Module) -> ConcealedHook:
        hook = ConcealedHook(module.register_forward_hook(self))
        self.owner.installed.install(hook)
        return hook

    def be_last(self, module: nn.Module) -> None:
        """Move behind hooks that were added later; see Note [Variables]."""
        if last_hook(after_forward(module)) is not self and self._last.hook is self:
            self._last.remove()
            self._last = self._put(module)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        """The forward hook."""
        __tracebackhide__ = True
        entry = self.here.mode.now
        if is_compiling() or entry is None or entry.operations is not self.operations:
            return None
        gates = [gate for gate in self.operations.gates if gate.live and gate.variable]
        call = next(calls_around(sys._getframe(1)), None)
        if not gates or call is None:
            return None
        new = assign(entry, gates, output, call.f_back)
        return None if new is output else new


class OutputLast(KedgeHook):
    """Forward-pre hook that keeps an `OutputAssigned` the last hook."""

    def __init__(self, behind: OutputAssigned) -> None:
        self.behind = behind

    def __call__(self, module: nn.Module, args: Any) -> None:
        """The forward-pre hook."""
        if not is_compiling() and self.behind.operations.live:
            self.behind.be_last(module)


def modules_assigned(module: nn.Module) -> Iterable[nn.Module]:
    """Return the modules inside another, whose outputs its forward may assign."""
    return [each for each in modules_in(module).values() if each is not module]


untraced(OutputAssigned.__call__, OutputLast.__call__)
