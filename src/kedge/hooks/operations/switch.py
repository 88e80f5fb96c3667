"""Module hooks that turn the operation mode on before a module's own forward, and off after it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from types import CodeType
from typing import Any

import torch
from torch import nn

from kedge.flow import Preserving
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Spec
from kedge.hooks.operations.attention import is_fused
from kedge.hooks.operations.gates import (
    ForwardUnderWay,
    ModuleOperations,
    OperationGate,
    gate_for,
)
from kedge.hooks.operations.mode import ThreadMode
from kedge.hooks.operations.variables import OutputAssigned, modules_assigned
from kedge.hooks.placing.concealed import KedgeHook
from kedge.sites.select import SitePlace, runs
from kedge.torch_internals.assigned_names import code_of
from kedge.torch_internals.checkpoint import owners_around
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.module_calls import module_frame
from kedge.torch_internals.module_tables import modules_in, own_children
from kedge.torch_internals.torchscript import takes_hooks


class ModeOn(KedgeHook):
    """Forward-pre hook that turns the mode on for a hooked module and off for its other children."""

    def __init__(self, here: ThreadMode, operations: ModuleOperations) -> None:
        self.here = here
        self.operations = operations

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward-pre hook."""
        operations = self.operations
        if torch.compiler.is_compiling():
            operations.captured = True
            return
        mode = self.here.mode
        passes = self.here.passes
        if not operations.live:
            if mode.calls.notes:
                mode.pass_over(operations, module_frame(sys._getframe(1)))
            return
        operations.called += 1
        frame = module_frame(sys._getframe(1))
        entry = ForwardUnderWay(operations, frame, module, seen=not is_fused(module, args, kwargs))
        operations.fused += not entry.seen
        entry.code = _code_of(module.forward)
        entry.call, entry.recompute = passes.count(operations)
        entry.checkpoint = next((around.owner for around in owners_around(passes.here)), None)
        mode.enter(entry)


class ModeOff(KedgeHook):
    """The forward hook that matches a `ModeOn`."""

    def __init__(self, switch: ModeOn) -> None:
        self.switch = switch

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """The forward hook."""
        if not torch.compiler.is_compiling():
            self.switch.here.mode.leave(self.switch.operations)


class ModeSwitches:
    """The `ModeOn` and `ModeOff` hooks of one hooked model."""

    def __init__(self, owner: Owner, passes: PassCounter, model: nn.Module) -> None:
        self.owner = owner
        self.passes = passes
        self.here = ThreadMode(passes)
        self.switches: dict[int, ModeOn] = {}
        self.names = {id(m): name for name, m in modules_in(model).items()}
        owner.installed.install(self)

    def place(self, place: SitePlace, spec: Spec) -> None:
        """Attach taps to the operations inside a module's own forward, after all taps attached there before."""
        module = place.module
        operations = self._operations(place.module, place.site.path)
        if not operations.gates:
            for child in _children(module):
                self._operations(child, self.names.get(id(child), ""))
        gate = gate_for(self.owner, self.passes, operations, place, OperationGate)
        if gate.variable:
            self._place_variables(module, operations)
        gate.attach(spec, place.site)

    def _place_variables(self, module: nn.Module, operations: ModuleOperations) -> None:
        """Prepare the sites of a forward's variables."""
        if operations.forward is not None:
            return
        operations.forward = code_of(module.forward)
        for inside in modules_assigned(module):
            if takes_hooks(inside):
                OutputAssigned(self.owner, self.here, operations, inside)

    def _operations(self, module: nn.Module, path: str) -> ModuleOperations:
        switch = self.switches.get(id(module))
        if switch is None:
            switch = ModeOn(self.here, ModuleOperations(path))
            self.owner.installed.enter(self.switches, id(module), switch)
            if not isinstance(module, torch.jit.ScriptModule):  # shows no operations
                self.owner.installed.put_around(module, switch, ModeOff(switch), with_kwargs=True)
        return switch.operations

    def knows(self, module: nn.Module) -> bool:
        """Whether a module is hooked."""
        return id(module) in self.switches

    def watch_overwrites(self, actions: Sequence[Preserving]) -> bool:
        """Notify actions before an operation overwrites values they keep.

        Returns whether any operation is hooked.
        """
        hooked = [switch.operations for switch in self.switches.values() if switch.operations.gates]
        for operations in hooked:
            operations.watch_overwrites(actions)
        return bool(hooked)

    def out(self) -> None:
        """Remove the mode from this thread's stack.

        Other threads do not have it, or are in a forward.
        """
        for switch in self.switches.values():
            switch.operations.away = True
        self.here.mode.clear()

    def back(self) -> None:
        """Allow the next forward to turn the mode on again."""
        for switch in self.switches.values():
            switch.operations.away = False

    def remove(self) -> None:
        """Remove the mode for good; on a thread that still has it, it sees nothing."""
        for switch in self.switches.values():
            switch.operations.close()
        self.here.mode.clear()


def _children(module: nn.Module, around: tuple[nn.Module, ...] = ()) -> Iterator[nn.Module]:
    """Yield the modules that a forward is likely to call: its children, and those in lists and dicts of modules."""
    for child in own_children(module).values():
        if child is None:
            continue
        if runs(child):
            yield child
        elif not any(child is each for each in around):  # a list may contain itself
            yield from _children(child, (*around, child))


def _code_of(forward: Any) -> CodeType | None:
    """Return the code of the frame in which a forward begins; None if unknown."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    return getattr(getattr(forward, "__func__", forward), "__code__", None)


untraced(ModeOn.__call__, ModeOff.__call__)
