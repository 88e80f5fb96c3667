"""A tap: one action at one site."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kedge.flow import Action, Bindable, Event, Schedule
from kedge.hooks.firing.contract import Measure, Measuring, as_act
from kedge.sites.site import Site

if TYPE_CHECKING:
    from kedge.hooks.session import Session


class Tap:
    """One action at one site, for as long as its session lasts."""

    __slots__ = (
        *(
            "__weakref__",
            "act",
            "action",
            "broad",
            "edit",
            "edited",
            "failed",
            "fired",
            "gate",
            "key",
            "latest",
            "measure",
            "on",
            "recomputes",
        ),
        *("session", "site", "takes_event", "when"),
    )

    def __init__(self, session: Session, site: Site, action: Action, when: Schedule | None) -> None:
        self.session, self.site, self.action, self.when = session, site, action, when
        self.act = action.bind(site) if isinstance(action, Bindable) else as_act(action)
        self.broad = site.leaf is None and site.call is None
        #: Called with the value and the step instead of `act`, where no event is needed; see Note [Values alone].
        self.measure: Measure | None = action.bind_value(site) if self.broad and isinstance(action, Measuring) else None
        #: Where the events of what is only measured are kept, if they are.
        self.latest = session.fired if session.fired.maxlen else None
        self.recomputes: bool = getattr(action, "recomputes", False)
        self.edited = self.failed = False
        self.fired = 0
        self.takes_event = self.act is action
        self.gate: Any = None
        self.edit: Any = None
        self.key = -1
        self.on = when is None or when(session.clock.step)

    def count(self, event: Event) -> None:
        """Note that the action ran."""
        self.fired += 1
        self.session.fired.append((self, event))

    def means(self, event: Event) -> bool:
        """Whether an event is of the leaf and the call that were asked for."""
        site = self.site
        leaf = site.leaf is None or site.leaf == event.site.leaf
        return leaf and (site.call is None or site.call == event.call)

    def repeats(self) -> bool:
        """Whether the action runs in the recompute under way: its schedule is that of the forward that is run again."""
        segment = self.gate.passes.here.segment
        on = self.on
        if self.when is not None and segment is not None and not self.session.ended:
            on = self.when(segment.step)
        return on and (self.edited or self.recomputes)

    @property
    def observes(self) -> bool:
        """Whether the action promises never to return a value."""
        return bool(getattr(self.action, "observes", False))

    @property
    def label(self) -> str:
        """The action's name in messages."""
        name = getattr(self.action, "__qualname__", None) or getattr(self.action, "__name__", None)
        return str(name) if name and not isinstance(self.action, Bindable) else repr(self.action)
