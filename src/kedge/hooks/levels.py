"""Which hooks are up at which level.

# Note [Levels]
A first step is measured in full. Then the pace decides what each step is: full again, light, or not looked at (see
Note [The budget] and Note [Looking]). The hooks that a level does not need are taken down until it comes again.
Those of modules that have not been called yet, and of parameters that got no gradient, stay: they cost nothing, and
what is used in other steps alone is not taken for unused.
Compiled code keeps them all, as it would be compiled again for each change; there the meter alone decides
what is done. Where no optimizer makes the steps, a root's own call does, in the midst of which the hooks of that
root cannot change: they stay too.
"""

from __future__ import annotations

import math
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from kedge.errors import ActionDisabled
from kedge.hooks.lookout import Lookout
from kedge.hooks.pace import Level
from kedge.hooks.roots import Gauge, Root
from kedge.hooks.session import Session
from kedge.hooks.shelf import Shelf
from kedge.hooks.tap import Tap
from kedge.sites.site import escape
from kedge.store.rows import FULL, LIGHT
from kedge.torch_internals import dynamo

OFF = 0
_DEPTH = {Level.OFF: OFF, Level.LOOK: LIGHT, Level.NORM: LIGHT, Level.FULL: FULL}


class Quiet(Session):
    """A session inside somebody's program: it complains on stderr, where ``-W error`` does not reach."""

    def __init__(self) -> None:
        super().__init__(on_error="warn")
        self.fired = deque(maxlen=0)  # nobody reads the timeline, and what is in it would be kept

    def complain(self, warning: ActionDisabled) -> None:
        """Say it without raising."""
        sys.stderr.write(f"[kedge] {warning}\n")

    def hook_each(self, module: nn.Module, paths: list[str], kind: str, action: Any) -> None:
        """Hook one kind of site at some paths, if there are any."""
        if paths:
            self.hook(module, ", ".join(f"{escape(p)}:{kind}" for p in paths), action)

    def refresh(self) -> None:
        """Nothing: a root gets its hooks before its first forward, so before it is compiled."""


class Levels:
    """Puts hooks up and takes them down; see Note [Levels].

    Args:
        session: The session whose hooks measure full steps.
        meter: What measures.
        trains: Tells whether there is an optimizer.

    Attributes:
        lookout: What is done in light steps.
        scouts: New roots are looked for in this step.
    """

    def __init__(self, session: Session, meter: Gauge, trains: Callable[[], bool]) -> None:
        self.session, self.meter = session, meter
        self.lookout = Lookout(meter, session.clock, trains)
        self._gates, self._heads, self._scouting, self._ahead = Shelf(), Shelf(), Shelf(), Shelf()
        self.scouts = True
        self._learned = 0
        self._waiting: list[Tap] = []
        self._threads: set[int] = set()
        self._changing = threading.RLock()

    def close(self) -> None:
        """Take down for good what has no handle, or may be where its handle does not reach."""
        self.lookout.close()
        self._gates.take_down()

    def take(self, scout: RemovableHandle, ahead: RemovableHandle) -> None:
        """Take over the hook that finds roots and the one that runs ahead of optimizers."""
        for shelf, handle in ((self._scouting, scout), (self._ahead, ahead)):
            table = handle.hooks_dict_ref()
            if table is not None:
                shelf.entries.append((weakref.ref(table), handle.id, table[handle.id]))

    def learn(self, roots: Iterable[Root]) -> None:
        """Take over the hooks of roots that have been seen in full, and prepare what light steps need."""
        if self._learned == len(self.meter.seats) and not any(tap.fired for tap in self._waiting):
            return
        with self._changing:
            self._learned = len(self.meter.seats)
            self.lookout.close()
            for shelf in (self._gates, self._heads, self.lookout.shelf):
                shelf.clear()
            for root in roots:
                self._learn(root)
            self._waiting = [t for t in self.session.taps if not t.fired and t.site.kind in ("out", "param.grad")]

    def _learn(self, root: Root) -> None:
        module, clock = root.module(), self.session.clock
        if module is None:
            return
        target = self.session.targets[id(module)]
        inner = [m for n, m in module.named_modules() if n in root.types and m is not module]
        fused = _fused(module)
        self._gates.gather([m for m in inner if m in fused], clock)
        self._gates.gather([m for m in inner if m not in fused], clock, called=True)
        self._heads.gather([module], clock, called=module not in fused)
        params = {id(p): p for p in module.parameters()}
        stations = [(s, params[i]) for (i, _), s in target.stations.items() if i in params]
        self._gates.gather_stations(stations)
        self.lookout.place(root, module, target.before)
        seats = self.meter.seats.values()
        self.meter.curves |= {s.id for s in seats if s.site.path == root.prefix and _is_number(s)}

    def _leading(self) -> int:
        """The module whose calls are the steps, by its id."""
        leader = self.session.clock.leader
        return next((key for key, target in list(self.session.targets.items()) if target.passes is leader), 0)

    def prepare(self, level: Level, *, scouts: bool) -> None:
        """Put up the hooks that the next step needs, and take down the others.

        Args:
            level: The level of that step.
            scouts: Look for new roots in light steps too.
        """
        with self._changing:
            self._prepare(level, scouts=scouts)

    def _prepare(self, level: Level, *, scouts: bool) -> None:
        self._threads.add(threading.get_ident())
        others = [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]  # autograd's are
        alone, single = len(self._threads) == len(others) == 1, len(self._threads) == 1
        self.lookout.spoiled, self.scouts = False, scouts or level is Level.FULL
        self.lookout.now.forget()
        compiles = dynamo.has_compiled()
        full, light = level is Level.FULL or compiles, level in {Level.LOOK, Level.NORM} and not compiles
        self.lookout.paced = self.session.clock.optimizer is None
        self.meter.level, self.lookout.deep = _DEPTH[level], level is Level.NORM
        if full:
            self._gates.hang(alone=single)
        else:
            self._gates.take_down(alone=alone)
        _hang(self._heads, up=full or self.lookout.paced)
        if not self._heads.up:  # the end of a call under way would not be seen
            for target in list(self.session.targets.values()):
                target.passes.end()
        _hang(self._scouting, up=full or scouts)
        _hang(self._ahead, up=level is not Level.OFF or not single)  # another thread may be going through these
        _hang(self.lookout.shelf, up=light)
        if light and self.lookout.paced:
            self.lookout.began(self._leading())  # the call is under way


def _hang(shelf: Shelf, *, up: bool) -> None:
    if up:
        shelf.hang()
    else:
        shelf.take_down()


def _fused(module: nn.Module) -> set[nn.Module]:
    """The parts of what looks for hooks on its parts, and computes another way where there are some."""
    return {part for m in module.modules() if isinstance(m, nn.TransformerEncoderLayer) for part in m.modules()}


def _is_number(seat: Any) -> bool:
    """Whether a site is an output of a single number, such as a loss."""
    return seat.site.kind == "out" and math.prod(seat.shape) == 1 and "float" in seat.dtype
