"""The base of all gates: holds the taps of one place, counts calls, and finds the tensors in values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from kedge.errors import ActionDisabled
from kedge.flow import Event
from kedge.hooks.firing.cause import Cause
from kedge.hooks.firing.fire import fire
from kedge.hooks.firing.owner import Owner
from kedge.hooks.firing.schedule import PassCounter
from kedge.hooks.firing.tap import Counts, Spec, Tap
from kedge.hooks.placing.concealed import KedgeHook
from kedge.signals import came_by_signal
from kedge.sites.site import Site
from kedge.torch_internals.aliases import MemoryVersion
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.hook_tables import last_hook
from kedge.torch_internals.source_lines import is_running

Found = list[tuple[str, Tensor]]


@dataclass
class PassedValues:
    """The values that have passed a gate so far, which explain why a site did not fire.

    Attributes:
        again: How many calls were a checkpoint's recompute.
        raised: How many calls raised an error, and so returned no value.
        leaves: The leaves of the values that passed.
        empty: A description of the value that passed instead of a tensor; None without one.
        listened: How many gradient hooks were set.
        pulses: By kind, the version of the memory that a hooked value is a view of, to detect
            changes in place.
        no_share: Why a share could not be followed.
        unused: The gradients that PyTorch passed as None, by kind and leaf: nothing used the leaf,
            but others of its node.
        rebuilt: Whether a reentrant checkpoint ran it without a graph, which its backward builds.
        ungraded: What ruled out gradients of the first few values that require none.
    """

    again: int = 0
    raised: int = 0
    leaves: dict[str, None] = field(default_factory=dict)
    empty: str | None = None
    listened: int = 0
    pulses: dict[str, MemoryVersion] = field(default_factory=dict)
    no_share: Cause | None = None
    unused: set[tuple[str, str]] = field(default_factory=set)
    rebuilt: bool = False
    ungraded: list[str] = field(default_factory=list)


class Gate(KedgeHook):
    """The taps of one session on one side of one module."""

    kinds: tuple[str, ...] = ()
    measured: tuple[str, ...] = ()
    """The kinds for which a value alone may be enough; see Note [Values alone]."""

    def __init__(self, owner: Owner, passes: PassCounter, path: str) -> None:
        self.owner = owner
        self.passes = passes
        self.path = path
        self.taps: dict[str, tuple[Tap, ...]] = dict.fromkeys(self.kinds, ())
        self.sites: dict[tuple[str, str], Site] = {}
        self.live = False
        self.backward = False
        self.measures = True
        self.called = 0
        self.overwrites = False  # whether the module was seen to overwrite an input
        self.seen = PassedValues()

    @property
    def whose(self) -> int:
        """An id that separates this model's sites from those of another with the same names; a prefix is of one model."""
        if self.passes.prefix:
            return id(self.passes.clock)
        return id(self.passes)

    @property
    def counted(self) -> Any:
        """What this gate's calls are counted under."""
        return self

    def is_last(self, table: Mapping[int, Any]) -> bool:
        """Whether this gate is the module's last hook.

        After others, a new gate is needed to keep the order.
        """
        return last_hook(table) is self

    def attach(self, spec: Spec, site: Site) -> list[Tap]:
        """Add a tap for each action at a site, after those of the site's kind.

        Returns the new taps.
        """
        made = spec.make(site.moved(self.passes.label(site.path)))
        now = self.counts()
        for tap in made:
            tap.gate = self
            tap.since = now
            self.taps[site.kind] += (tap,)
        self.retime()
        return made

    def counts(self) -> Counts:
        """Return what has passed so far."""
        clock = self.owner.clock
        here = self.passes.here
        during: Literal["", "forward", "backward"] = ""
        if in_backward():
            during = "backward"
        elif here.inside and is_running(
            here.frame, sys._getframe()
        ):  # an interrupt may have skipped its end
            during = "forward"
        begun = self.passes.begun
        return Counts(
            clock.step, self.called, begun.count, clock.backwards.count, during, begun.raised
        )

    def drop(self, tap: Tap) -> None:
        """Remove a tap; an event that is firing keeps the old tuple."""
        self.taps[tap.site.kind] = tuple(t for t in self.taps[tap.site.kind] if t is not tap)
        self.retime()

    def retime(self) -> None:
        """Update whether any tap is on schedule, whether any gradient tap is, and whether all taps only measure."""
        taps = [tap for taps in self.taps.values() for tap in taps]
        self.live = any(map(self.is_due, taps))
        self.backward = any(tap.on and tap.site.is_gradient for tap in taps)
        self.measures = all(
            tap.measure is not None and tap.site.kind in self.measured for tap in taps
        )

    def is_due(self, tap: Tap) -> bool:
        """Whether a tap is on schedule, or must repeat its edit when a checkpoint recomputes an earlier step."""
        return tap.on or (tap.when is not None and tap.edited and self.passes.segments.some)

    def site(self, kind: str, leaf: str) -> Site:
        """The site of one leaf, cached."""
        site = self.sites.get((kind, leaf))
        if site is None:
            site = self.sites[kind, leaf] = Site(self.passes.label(self.path), kind, leaf or None)
            self.seen.leaves[leaf] = None
            for tap in self.taps.get(kind, ()):
                # Of a `NotingLeaves`; isinstance would take longer than all else of a first value.
                note_leaf = getattr(tap.action, "note_leaf", None)
                if note_leaf is not None:
                    note_leaf(site)
        return site

    def through(self, kind: str, found: Found, call: int, recompute: bool) -> dict[str, Tensor]:
        """Run every leaf through the taps of a kind; returns the changed tensors by leaf.

        An action may call the model and so begin a pass; the leaves after it still belong to the
        pass of the first.
        """
        new: dict[str, Tensor] = {}
        taps = self.taps[kind]
        first = None
        for leaf, tensor in found:
            event = self.passes.event(self.site(kind, leaf), call, recompute)
            if first is None:
                first = event
            elif event.pass_ != first.pass_:
                event = replace(first, site=event.site)
            result = fire(taps, tensor, event)
            if result is not tensor:
                new[leaf] = result
        return new

    def event_at(
        self,
        leaf: str,
        kind: str,
        call: int,
        pass_: int,
        backward: int,
        step: int,
        micro_batch: int,
        replica: str,
    ) -> Event:
        """Return the event of a value of this session, also after the call."""
        site = self.site(kind, leaf)
        rank = self.owner.clock.rank
        return Event(site, call, pass_, backward, step, micro_batch, rank, replica, recompute=False)

    def look_through(self, find: Callable[..., Found], *what: Any) -> Found:
        """Return the tensors in a value; values of the user's classes may raise.

        Args:
            find: The function that searches the value.
            what: Its arguments.

        Raises:
            Exception: Any error of the value, if the session raises failures; else a warning
                reports it once, and the result is empty.
        """
        try:
            return find(*what)
        except Exception as error:
            if not self.passes_over("searched", error):
                raise
            return []

    def passes_over(self, done: str, error: Exception) -> bool:
        """Whether a value that fails is passed over, which a warning reports once, instead of raising the error."""
        if self.owner.on_error == "raise" or came_by_signal(error):
            return False
        if self.seen.empty is None:
            self.seen.empty = f"it cannot be {done}: {type(error).__name__}: {error}"
            self.owner.complain(
                ActionDisabled(f"{self.path}:{self.kinds[0]} is not observed: {self.seen.empty}")
            )
        return True
