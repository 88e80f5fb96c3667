"""The wrapper around each piece of Kedge's work inside the program, which never ends the program."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import torch

from kedge.actions.measure.meter import Meter
from kedge.stderr import Shield
from kedge.torch_internals import device_graphs, modes
from kedge.torch_internals.own_work import own_work
from kedge.watch.steps.costs import Costs

OFF = 0
"""The level at which a meter measures nothing."""


class WatchShield:
    """Wraps the work of a watcher: it is timed, runs in one thread at a time, and never ends the program.

    Args:
        meter: The meter.
        costs: Times the work.

    Attributes:
        shield: Reports the first failure, after which nothing is watched.
        in_child: Whether this is a forked child process, which only counts its optimizer steps.
    """

    def __init__(self, meter: Meter, costs: Costs) -> None:
        self.meter, self.costs, self.in_child = meter, costs, False
        self.shield = Shield("watching", "it stops here, and the program goes on", on_failure=self._switch_off)

    @property
    def failure(self) -> Exception | None:
        """Kedge's failure; None if there is none."""
        return self.shield.failure

    @property
    def pid(self) -> int:
        """The process that is watched."""
        return self.shield.pid

    def around(self, work: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that runs some work."""

        def hook(*args: Any) -> None:
            if not (torch.compiler.is_compiling() or modes.is_under_jit() or device_graphs.leaves_alone()):
                self.shield(self._timed, work, args)

        return hook

    def _timed(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        with self.meter.lock, self.costs, own_work():  # the program may train in several threads
            work(*args)

    def _switch_off(self) -> None:
        self.meter.level = OFF


def stop_in_children(shield: WatchShield) -> None:
    """Stop measuring in forked children from now on: the recording belongs to their parent."""
    _watching.add(shield)


def _leave_to_parent() -> None:
    for shield in _watching:
        shield.meter.level, shield.in_child = OFF, True


_watching: weakref.WeakSet[WatchShield] = weakref.WeakSet()

os.register_at_fork(after_in_child=_leave_to_parent)  # once: Python keeps such functions for ever
