"""What is done at the ends of steps that are not looked at; see Note [Glances]."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch.optim import Optimizer

from kedge.hooks.levels import Levels
from kedge.hooks.pace import Level, Pace
from kedge.hooks.schedule import Clock
from kedge.hooks.updates import Updates
from kedge.torch_internals.graph_task import in_backward


class Asleep:
    """Counts steps that are not looked at, glances at some, and wakes the watch.

    Args:
        pace: What decides when.
        clock: What counts the steps.
        updates: What looks at gradients.
        levels: What puts up the hooks of a level.
        cost: Gives what watching has taken so far.
        timed: Times a block, for that.
        note: Takes an event for the recording.

    Attributes:
        passed: How many steps the clock has not been told of.
        slept: The step that has just ended was one of those.
        spoiled: A glance at it met what is not finite.
    """

    def __init__(
        self,
        pace: Pace,
        clock: Clock,
        updates: Updates,
        levels: Levels,
        cost: Callable[[], float],
        timed: Callable[[], AbstractContextManager[None]],
        note: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.pace, self.clock, self.updates, self.levels = pace, clock, updates, levels
        self.cost, self.timed, self.note = cost, timed, note
        self.passed, self._sound = 0, -1
        self.slept = self.spoiled = self._inside = False

    def step(self) -> int:
        """Give the step under way, the ones that the clock has not been told of counted."""
        return self.clock.step + self.passed

    def listen(self) -> None:
        """Hear, at the end of a step that was looked at, whether the next ones will be heard to end."""
        self.pace.heard = self.clock.optimizer is not None and not self._inside
        self.pace.glancing = self.pace.heard and self.updates.sees

    def rise(self, optimizer: Optimizer) -> None:
        """Do what is to be done at the end of a step at which it was time to wake; `slept` says whether that was all."""
        self._inside = in_backward()
        self.slept = not self._inside and self._sleeps_on(optimizer)

    def _sleeps_on(self, optimizer: Optimizer) -> bool:
        pace, now = self.pace, time.perf_counter()
        if pace.settling:
            pace.settled(now, self.cost())
            return True
        if not pace.glancing or pace.level is not Level.OFF:
            return False
        step = self.step()
        risen = pace.rise(step, now)
        if risen is not Level.GLANCE:
            return risen is Level.OFF
        sound = self.updates.glance(optimizer)
        self.spoiled = sound is False
        if sound:
            self._sound = step
        pace.glanced(step, now, time.perf_counter())
        return sound is True

    def wake(self) -> bool:
        """Tell the clock of the steps that passed; returns whether there were any."""
        passed, self.passed = self.passed, 0
        self.clock.step += passed
        return passed > 0

    def tell(self, optimizer: Optimizer) -> None:
        """Measure the gradients that a glance found not to be finite, and if that is granted the next step in full."""
        self.spoiled = False
        with self.timed():
            self._look(Level.LOOK)
            self.levels.lookout.spoiled = True
            self.updates.tell(optimizer)
            self.pace.wish()
            self.note({"kind": "glance", "step": self.clock.step, "sound": self._sound})

    def awaken(self) -> None:
        """Measure what is left of the step under way in full."""
        with self.timed():
            self._look(Level.FULL)

    def _look(self, level: Level) -> None:
        self.pace.rouse(self.clock.step, level, time.perf_counter(), self.cost())
        self.levels.prepare(level, scouts=level is Level.FULL)
