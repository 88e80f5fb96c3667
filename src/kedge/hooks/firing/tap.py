"""A tap: one action at one site."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, FrameType
from typing import Any, Literal, NamedTuple
from weakref import WeakValueDictionary

from torch import Tensor

from kedge.flow import Act, Action, Bindable, Event, Schedule, as_act
from kedge.hooks.firing.contract import Measure
from kedge.hooks.firing.owner import Owner, known
from kedge.hooks.firing.present_call import PresentCall
from kedge.sites.site import Site


@dataclass(slots=True)
class InGraph:
    """A tap's representation in compiled code.

    Attributes:
        key: The number under which an operator finds the tap in `numbered`.
        edit: The identity whose backward applies the action's edit, if the action edits a gradient.
    """

    key: int
    edit: Any = None


class Counts(NamedTuple):
    """What has passed a gate so far.

    Attributes:
        step: The current step.
        calls: How often its module was called.
        passes: How many forward passes of its model have begun.
        backwards: How many backward passes have reached a hook of its session.
        during: What is under way on this thread: a "forward" of the model, a "backward", or
            neither.
        raised: How many of the passes have ended with an error.
    """

    step: int
    calls: int
    passes: int
    backwards: int
    during: Literal["", "forward", "backward"] = ""
    raised: int = 0


class Tap:
    """One action at one site, for as long as its session lasts."""

    __slots__ = (
        "__weakref__",
        "act",
        "action",
        "broad",
        "edited",
        "failed",
        "fired",
        "gate",
        "graph",
        "measure",
        "on",
        "own",
        "since",
        "site",
        "until",
        "when",
    )

    def __init__(self, site: Site, action: Action, when: Schedule | None, step: int) -> None:
        self.site = site
        self.action = action
        self.when = when
        # A `Bindable` and a `Measuring`; isinstance would make attaching slower.
        bind: Callable[[Site], Act] | None = getattr(action, "bind", None)
        bind_value: Callable[[Site], Measure | None] | None = getattr(action, "bind_value", None)
        self.act: Act
        self.broad = site.leaf is None and site.call is None
        #: Called with the value and the step instead of `act` if no event is needed; see Note
        #: [Values alone].
        self.measure: Measure | None = None
        if self.broad and bind_value is not None:
            self.measure = bind_value(site)
        self.act = as_act(action) if bind is None else bind(site)
        #: Whether it is an observer of Kedge's, which runs as its own work; see Note [Own work].
        self.own = self.observes and type(action).__module__.startswith("kedge.")
        self.edited = False
        #: Whether the action has raised an error, or one that switched it off.
        self.failed: Literal["", "raised", "off"] = ""
        self.fired = 0
        self.gate: Any = None
        #: The counts of its gate when it was attached, and when it was removed before its session
        #: ended.
        self.since = Counts(step, 0, 0, 0)
        self.until: Counts | None = None
        self.graph = InGraph(next(_numbers))
        self.on = when is None or when(step)
        numbered[self.graph.key] = self

    @property
    def owner(self) -> Owner:
        """The session."""
        owner: Owner = self.gate.owner
        return owner

    @property
    def is_attached(self) -> bool:
        """Whether its gate still has it."""
        taps = self.gate.taps
        return self in (taps[self.site.kind] if isinstance(taps, dict) else taps)

    def note(self, event: Event) -> None:
        """Add a firing of the action to the timeline."""
        latest = self.gate.owner.fired
        if latest is not None:
            latest.append((self, known, (event,)))

    def call(self, value: Tensor, event: Event, frame: FrameType) -> PresentCall:
        """Return the module call of an event whose action is running in a frame."""
        return PresentCall(self.gate, value, event, frame)

    def means(self, event: Event) -> bool:
        """Whether an event has the leaf and the call that the tap's site names."""
        site = self.site
        leaf = site.leaf is None or site.leaf == event.site.leaf
        return leaf and (site.call is None or site.call == event.call)

    def repeats(self) -> bool:
        """Whether the action runs in the current recompute, by the schedule for the step of the repeated forward."""
        segment = self.gate.passes.here.segment
        on = self.on
        if self.when is not None and segment is not None and not self.gate.owner.ended:
            on = self.when(segment.step)
        return on and (self.edited or getattr(self.action, "recomputes", False))

    @property
    def is_awaited(self) -> bool:
        """Whether the action has edited a value in a checkpoint's forward that no backward has recomputed yet."""
        return (
            self.edited
            and self.site.kind in ("in", "out", "param")
            and self.gate.passes.segments.awaits(self.gate.counted)
        )

    @property
    def takes_event(self) -> bool:
        """Whether the action receives the event, too."""
        return self.act is self.action

    @property
    def whole(self) -> bool:
        """Whether the action answers with a whole value, so that it runs when all leaves have passed those before."""
        # A `Whole`: isinstance would make attaching slower.
        return hasattr(type(self.action), "one_call")

    @property
    def observes(self) -> bool:
        """Whether the action promises never to return a value."""
        return observes(self.action)

    @property
    def label(self) -> str:
        """The action's name in messages."""
        action = self.action
        name = getattr(action, "__name__", None)
        if not isinstance(action, BuiltinFunctionType):
            name = getattr(action, "__qualname__", "") or name
        if not name or isinstance(action, Bindable):
            return repr(action)
        return str(name)


def observes(action: Any) -> bool:
    """Whether an action promises never to return a value."""
    return bool(getattr(action, "observes", False))


def skips(action: Any) -> bool:
    """Whether an action gives the output of a module in place of its forward."""
    return getattr(action, "skips", False) is True


_numbers = itertools.count(1)
numbered: WeakValueDictionary[int, Tap] = WeakValueDictionary()
"""Every tap by its number, which compiled code holds in its place."""


class Spec(NamedTuple):
    """The actions to attach, and their taps.

    Attributes:
        actions: The actions, in order.
        when: Their schedule; None for always.
        step: The current step.
        taps: All taps made so far.
    """

    actions: tuple[Action, ...]
    when: Schedule | None
    step: int
    taps: list[Tap]

    def make(self, site: Site) -> list[Tap]:
        """Return a new tap for each action, in order."""
        made = [Tap(site, action, self.when, self.step) for action in self.actions]
        self.taps.extend(made)
        return made
