"""The hooks on the module of a root, which is deleted before or replaced by another in some programs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Tap
from kedge.hooks.session import Session
from kedge.hooks.target import HookedModel
from kedge.hooks.unfired import explain
from kedge.torch_internals.module_tables import named_modules


class RootHooks:
    """The hooks on a root's present module, and the memory of its earlier ones.

    Attributes:
        target: The hooked model; None if there is no module, or no longer.
        follows: Whether the module continues an earlier one.
        silent: An entry for each site of a deleted module that never fired.
    """

    def __init__(self) -> None:
        self.target: HookedModel | None = None
        self.follows = False
        self.silent: list[dict[str, Any]] = []
        self._fired: set[str] = set()
        self._past: PassCounter | None = None
        self._undo = ExitStack()

    @property
    def passes(self) -> PassCounter | None:
        """The counter of the forward passes."""
        return None if self.target is None else self.target.passes

    @property
    def is_running(self) -> bool:
        """Whether a forward is active in this thread; known only while the hooks are installed."""
        return self.target is not None and self.target.passes.here.inside

    @property
    def are_orphaned(self) -> bool:
        """Whether the hooked module no longer exists."""
        return self.target is not None and self.target.model() is None

    def module(self) -> nn.Module | None:
        """Return the module, if it still exists."""
        return None if self.target is None else self.target.model()

    def release(self, session: Session, taps: Sequence[Tap], label: Callable[[str], str]) -> None:
        """Release everything kept for a module that no longer exists.

        Args:
            session: Holds the hooks.
            taps: The root's own.
            label: Returns the recorded path of a site.
        """
        self._fired.update(str(tap.site) for tap in taps if tap.fired)
        self.silent += [
            silent_entry(tap, label(tap.site.path), session) for tap in taps if self.is_silent(tap)
        ]
        self._past = self.passes
        self.abandon(session, taps)

    def abandon(self, session: Session, taps: Sequence[Tap]) -> None:
        """Remove the hooks and the taps from a module."""
        gone, mine = self.target, {id(tap) for tap in taps}
        session.taps = [tap for tap in session.taps if id(tap) not in mine]
        session.targets = {
            key: target for key, target in session.targets.items() if target is not gone
        }
        self.target = None
        self._undo.close()

    @contextmanager
    def attaching(self, session: Session, module: nn.Module) -> Iterator[HookedModel]:
        """Hook a module inside a ``with`` block, in place of the one before it."""
        outer, self.follows = session.installed.cleanup, self._past is not None
        if not self.follows:
            outer.callback(self._undo.close)
        self.silent = []
        session.installed.cleanup = self._undo
        try:
            self.target = session.targets[id(module)] = HookedModel(session, module)
            self.target.kinds = {
                name: weakref.ref(type(m)) for name, m in named_modules(module).items()
            }
            if self.follows and session.clock.leader is self._past:
                session.clock.leader = self.target.passes
            yield self.target
        finally:
            session.installed.cleanup = outer

    def ungraded(self, path: str) -> str:
        """Return what ruled out gradients in the first calls of a module; empty if several things did, or none."""
        after = () if self.target is None else self.target.modules.after.values()
        noted = {
            what
            for gate in after
            if gate.path == path and not gate.seen.listened
            for what in gate.seen.ungraded
        }
        return noted.pop() if len(noted) == 1 else ""

    def is_silent(self, tap: Tap) -> bool:
        """Whether an output of the root never fired, for the present module or an earlier one."""
        return tap.site.kind == "out" and not tap.fired and str(tap.site) not in self._fired


def silent_entry(tap: Tap, path: str, session: Session) -> dict[str, Any]:
    """Return the entry of a site that never fired, under its recorded path, with the cause and the remedy."""
    cause = explain(tap, session)
    return {
        "site": str(replace(tap.site, path=path)),
        "fired": 0,
        "cause": cause.why,
        "remedy": cause.remedy,
    }
