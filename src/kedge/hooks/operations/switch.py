"""Doors: the module hooks that put the mode of operations on before a module's own forward, and off behind it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kedge.flow import Preserving
from kedge.hooks.gates import modules
from kedge.hooks.operations.attention import is_fused
from kedge.hooks.operations.gates import OpGate
from kedge.hooks.operations.mode import Entry, Here, module_frame
from kedge.hooks.placing.concealed import Own
from kedge.sites.select import runs
from kedge.torch_internals.checkpoint import owner_around
from kedge.torch_internals.dynamo import untraced

if TYPE_CHECKING:
    from kedge.hooks.firing.schedule import Passes
    from kedge.hooks.session import Session
    from kedge.sites.select import SitePlace


class Door(Own):
    """The forward-pre hook of a module whose operations are asked for, or of a child of one, whose are not."""

    early = True

    def __init__(self, ops: Doors, path: str) -> None:
        self.ops, self.path = ops, path
        self.gates: tuple[OpGate, ...] = ()
        self.preserving: tuple[Preserving, ...] = ()
        self.live = self.captured = False
        self.called = self.fused = 0
        self.made: dict[str, int] = {}
        self.matched: dict[str, tuple[OpGate, ...]] = {}

    def retime(self) -> None:
        """Find out whether anything here is on schedule."""
        self.live = any(gate.live for gate in self.gates)

    def close(self) -> None:
        """See nothing any more."""
        self.gates, self.live, self.matched = (), False, {}

    def match(self, name: str) -> tuple[OpGate, ...]:
        """Find the gates that may stand for an operation of this name."""
        found = self.matched[name] = tuple(gate for gate in self.gates if name and gate.may_mean(name))
        return found

    def add(self, gate: OpGate) -> None:
        """Take a gate in, behind those that stand here."""
        self.gates += (gate,)
        self.matched = {}
        self.retime()

    def watch_overwrites(self, actions: list[Preserving]) -> None:
        """Have actions that keep values without a copy told before an operation works on them in place."""
        self.preserving += tuple(action for action in actions if action not in self.preserving)

    def __call__(self, module: nn.Module, args: Any, kwargs: Any = None) -> None:
        """Be the forward-pre hook."""
        if torch.compiler.is_compiling():
            self.captured = True
            return
        mode = self.ops.here.mode
        if not self.live:
            if mode.now is not None:
                mode.pass_over(self)
            return
        self.called += 1
        frame = module_frame(sys._getframe(1))
        entry = Entry(self, frame, seen=not is_fused(module, args, kwargs or {}))
        self.fused += not entry.seen
        entry.code = _code_of(module.forward)
        entry.call, entry.recompute = self.ops.passes.count(self)
        entry.checkpoint = owner_around(self.ops.passes.here)[0]
        mode.enter(entry)


class Shut(Own):
    """The forward hook behind a `Door`."""

    def __init__(self, door: Door) -> None:
        self.door = door

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Be the forward hook."""
        if not torch.compiler.is_compiling():
            self.door.ops.here.mode.leave(self.door)


class Doors:
    """The doors of one hooked model."""

    def __init__(self, session: Session, passes: Passes, model: nn.Module) -> None:
        self.session, self.passes = session, passes
        self.here, self.away = Here(), False
        self.doors: dict[int, Door] = {}
        self.names = {id(m): name for name, m in model.named_modules()}
        session.mount(self)

    def gate(self, place: SitePlace) -> OpGate:
        """Return the gate for a place, behind all that was attached at its module."""
        module, site = place.module, place.site
        door = self._door(module, site.path)
        if not door.gates:
            for child in _children(module):
                self._door(child, self.names.get(id(child), ""))
        op = site.op or ("*", None)
        last = door.gates[-1] if door.gates else None
        if last is not None and (last.op, last.without) == (op, place.without):
            last.many = last.many and place.many
            return last
        gate = OpGate(self.session, self.passes, door, op, place)
        door.add(gate)
        return gate

    def _door(self, module: nn.Module, path: str) -> Door:
        door = self.doors.get(id(module))
        if door is None:
            door = self.doors[id(module)] = Door(self, path)
            if not isinstance(module, torch.jit.ScriptModule):  # which takes no hooks, and shows no operations
                modules.attach(self.session, module, door)
                modules.attach(self.session, module, Shut(door))
        return door

    def out(self) -> None:
        """Take the mode off this thread's stack, should it be there; others have none on, or are in a forward."""
        self.away = True
        self.here.mode.clear()

    def back(self) -> None:
        """Be ready again; nothing stands outside of a forward."""
        self.away = False

    def remove(self) -> None:
        """Take the mode off for good; where a thread still has it on, it sees nothing any more."""
        for door in self.doors.values():
            door.close()
        self.here.mode.clear()


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that a forward is likely to call: children, and those in its lists and dicts of modules."""
    for child in module.children():
        if runs(child):
            yield child
        else:
            yield from _children(child)


def _code_of(forward: Any) -> CodeType | None:
    """The code of the frame in which a forward begins; None if it cannot be told."""
    while isinstance(forward, functools.partial):
        forward = forward.func
    return getattr(getattr(forward, "__func__", forward), "__code__", None)


untraced(Door.__call__, Shut.__call__)
