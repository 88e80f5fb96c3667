"""Until when: the block that attaches all or nothing and always removes what it attached."""

from __future__ import annotations

import itertools
from collections import deque
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal, Self

from kedge.errors import ActionDisabled, NeverFired, NeverFiredWarning, SessionEnded, warn
from kedge.flow import Event, Schedule
from kedge.hooks import attach
from kedge.hooks.firing.schedule import Clock, Passes, rank
from kedge.hooks.firing.tap import Tap
from kedge.hooks.gates import compiled
from kedge.hooks.handle import Hooked
from kedge.hooks.ledger import Ledger, Timeline
from kedge.hooks.placing.installed import Mounts, Standing


class Session:
    """Hooks for the length of a ``with`` block: all attached or none, and always removed.

    Args:
        strict: Raise `NeverFired` at the end if a site did not fire, instead of warning.
        on_error: What an action's failure does: "raise" it, or "warn" and disable the action.
    """

    def __init__(self, *, strict: bool = False, on_error: Literal["raise", "warn"] = "raise") -> None:
        if on_error not in ("raise", "warn"):
            raise ValueError(f'on_error={on_error!r}: it is "raise" or "warn"')
        self.strict, self.on_error = strict, on_error
        self.clock = Clock(rank())
        self.taps: list[Tap] = []
        self.fired: deque[tuple[Tap, Event]] = deque(maxlen=2_000)
        self.cleanup = ExitStack()
        self.targets: dict[int, attach.Target] = {}
        self.main_passes: Passes | None = None
        self.numbers = itertools.count()
        self.ended = False
        self.mounts = Mounts()
        self.clock.on_step.append(self._retime)

    def hook(self, target: Any, *what: Any, when: Schedule | None = None) -> Hooked:
        """Attach actions to the sites that a selector stands for.

        Args:
            target: A module with a selector; or a tensor, a dict of named tensors, or an autograd node.
            what: The selector (text or `Selector`; tensors and nodes may do without), then the actions in order.
            when: The schedule; None for always.

        Returns:
            The handle: it removes the hook, and reads what its actions recorded.

        Raises:
            NoSiteMatched: If the selector stands for nothing.
            NoSuchKind: If the target has no such kind of site.
            ActionArity: If an action cannot be called with (value) or (value, event).
            SessionEnded: If the session is over.
        """
        self._check_open()
        selector, actions = attach.split(what)
        taps: list[Tap] = []
        with self.mounts.standing(), attach.all_or_nothing(self, taps):
            attach.hook(self, target, selector, attach.Spec(actions, when, taps))
        return Hooked(self, taps, actions)

    def _check_open(self) -> None:
        if self.ended:
            raise SessionEnded("this session has ended and its hooks are gone; open a new one")

    def mount(self, what: Standing) -> None:
        """Take over what stands somewhere until the session ends."""
        self.cleanup.callback(self.mounts.add(what))

    def pause(self) -> None:
        """Take every hook out of PyTorch's tables, those of gradients under way too; records and counts stay."""
        self.mounts.out()

    def resume(self, *, eager: bool = False) -> None:
        """Put every hook back in its place, unless the session is over.

        Args:
            eager: Whether the models are going to be called uncompiled, so that code compiled meanwhile can stay.
        """
        self._check_open()
        if self.mounts.back() and not eager:
            self.refresh()

    def refresh(self) -> None:
        """Have code that was compiled without the hooks compile again."""
        compiled.refresh()

    def complain(self, warning: ActionDisabled) -> None:
        """Say that an action was switched off."""
        warn(warning)

    def ledger(self) -> Ledger:
        """Say of each site how often it fired, or why not."""
        return Ledger.of(self.taps)

    def timeline(self) -> Timeline:
        """Return the last 2,000 firings in the order in which they happened."""
        return Timeline(tuple((event, tap.label) for tap, event in self.fired))

    def end(self, *, quiet: bool = False) -> None:
        """Remove every hook, then report the sites that never fired. A second call does nothing.

        Args:
            quiet: Report nothing, as when an exception is on its way.

        Raises:
            NeverFired: In a strict session, if a site did not fire.
        """
        if self.ended:
            return
        try:
            ledger = self.ledger()
        finally:
            self._remove()
        if quiet or not (silent := ledger.silent()):
            return
        if self.strict:
            raise NeverFired(silent)
        warn(NeverFiredWarning(silent))

    def _remove(self) -> None:
        self.ended = True
        for tap in self.taps:
            tap.on = False
        self.mounts.clear()
        self.cleanup.close()
        for target in self.targets.values():
            target.release()

    def _drop(self, taps: list[Tap]) -> None:
        for tap in taps:
            tap.on, tap.when = False, None
            if tap.gate is not None:
                tap.gate.drop(tap)
            if tap in self.taps:
                self.taps.remove(tap)

    def _retime(self, ended: int) -> None:
        """Switch taps on and off for the next step; most schedules do not change from one to the next."""
        scheduled = [(tap, tap.when) for tap in self.taps if tap.when is not None]
        due = {when: when(self.clock.step) for when in {when for _, when in scheduled}}
        changed = [tap for tap, when in scheduled if tap.on is not due[when]]
        for tap in changed:
            tap.on = not tap.on
        for gate in {id(tap.gate): tap.gate for tap in changed}.values():
            gate.retime()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.end(quiet=kind is not None)
