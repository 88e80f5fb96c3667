"""The hooks on the module of a root, which is deleted before or replaced by another in some programs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import nn

from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Tap
from kedge.hooks.roots import HookedRoot
from kedge.hooks.session import Session
from kedge.hooks.unfired import explain, explaining_many
from kedge.store.events import LedgerLine
from kedge.torch_internals.module_tables import named_modules


class RootHooks:
    """The hooks on a root's present module, and the memory of its earlier ones.

    Attributes:
        hooked: The hooks; None if there is no module, or no longer.
        follows: Whether the module continues an earlier one.
        silent: An entry for each site of a deleted module that never fired.
    """

    def __init__(self) -> None:
        self.hooked: HookedRoot | None = None
        self.follows = False
        self.silent: list[LedgerLine] = []
        self._fired: set[str] = set()
        self._past: PassCounter | None = None

    @property
    def passes(self) -> PassCounter | None:
        """The counter of the forward passes."""
        if self.hooked is None:
            return None
        return self.hooked.target.passes

    @property
    def is_running(self) -> bool:
        """Whether a forward is active in this thread; known only while the hooks are installed."""
        passes = self.passes
        return passes is not None and passes.here.inside

    @property
    def are_orphaned(self) -> bool:
        """Whether the hooked module no longer exists."""
        return self.hooked is not None and self.hooked.module() is None

    def module(self) -> nn.Module | None:
        """Return the module, if it still exists."""
        if self.hooked is None:
            return None
        return self.hooked.module()

    def taps(self, session: Session) -> list[Tap]:
        """Return the taps on the module."""
        passes = self.passes
        return [tap for tap in session.taps if getattr(tap.gate, "passes", None) is passes]

    def release(self, session: Session) -> None:
        """Release everything kept for a module that no longer exists."""
        taps = self.taps(session)
        self._fired.update(str(tap.site) for tap in taps if tap.fired)
        self.silent += [silent_entry(tap, session) for tap in taps if self.is_silent(tap)]
        self._past = self.passes
        self.abandon(session)

    def abandon(self, session: Session) -> None:
        """Remove the hooks and the taps from a module."""
        if self.hooked is None:
            return
        gone = self.hooked.target
        mine = {id(tap) for tap in self.taps(session)}
        session.taps = [tap for tap in session.taps if id(tap) not in mine]
        targets = session.targets.items()
        session.targets = {key: target for key, target in targets if target is not gone}
        self._remove()

    def _remove(self) -> None:
        if self.hooked is not None:
            self.hooked.release()
            self.hooked = None

    @contextmanager
    def attaching(self, session: Session, module: nn.Module, prefix: str) -> Iterator[None]:
        """Hook a module inside a ``with`` block, in place of the one before it.

        Its sites have a prefix.
        """
        self.follows = self._past is not None
        if not self.follows:
            installed = session.installed
            installed.cleanup.callback(self._remove)
        self.silent = []
        self.hooked = HookedRoot(session, module, prefix)
        target = session.targets[id(module)] = self.hooked.target
        target.kinds = {name: weakref.ref(type(m)) for name, m in named_modules(module).items()}
        if self.follows and session.clock.leader is self._past:
            session.clock.leader = target.passes
        with self.hooked.attaching():
            yield

    def ungraded(self, path: str) -> str:
        """Return what ruled out gradients in the first calls of a module.

        Empty if several things did, or none.
        """
        if self.hooked is None:
            return ""
        modules = self.hooked.target.modules
        noted: set[str] = set()
        for gate in modules.after.values():
            if gate.path == path and not gate.seen.listened:
                noted.update(gate.seen.ungraded)
        if len(noted) != 1:
            return ""
        return noted.pop()

    def is_silent(self, tap: Tap) -> bool:
        """Whether an output of the root never fired, for the present module or an earlier one."""
        if tap.site.kind != "out" or tap.fired:
            return False
        return str(tap.site) not in self._fired


def silent_entry(tap: Tap, session: Session) -> LedgerLine:
    """Return the entry of a site that never fired, with the cause and the remedy."""
    cause = explain(tap, session)
    return LedgerLine(site=str(tap.site), fired=0, cause=cause.why, remedy=cause.remedy)


def silent_sites(roots: Iterable[RootHooks], session: Session) -> list[LedgerLine]:
    """Return an entry with the cause for each site that never fired.

    Sites of deleted modules are included.
    """
    roots = list(roots)
    by_passes = {id(root.passes): root for root in roots if root.passes is not None}
    silent = [entry for root in roots for entry in root.silent]
    with explaining_many(session):
        for tap in session.taps:
            root = by_passes.get(id(getattr(tap.gate, "passes", None)))
            if root is not None and root.is_silent(tap):
                silent.append(silent_entry(tap, session))
    return silent
