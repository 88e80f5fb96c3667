"""What surrounds each piece of Kedge's work inside the program, and keeps it from ending the program."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

from kedge.stderr import say
from kedge.torch_internals import modes
from kedge.watch.costs import Costs
from kedge.watch.roots import Meter

OFF = 0
"""The level at which a meter measures nothing."""


class Shield:
    """Surrounds Kedge's work.

    Args:
        meter: What measures.
        costs: Take its time.

    Attributes:
        failure: The error that Kedge failed with, and has watched nothing since; None where all goes well.
        pid: The process that is watched.
        in_child: This is a forked child process, which only counts that it trains.
    """

    def __init__(self, meter: Meter, costs: Costs) -> None:
        self.meter, self.costs, self.pid, self.in_child = meter, costs, os.getpid(), False
        self.failure: Exception | None = None

    def around(self, work: Callable[..., None]) -> Callable[..., None]:
        """Make a hook that never ends the program: if Kedge fails, it says so once and steps aside."""

        def hook(*args: Any) -> None:
            idle = torch.compiler.is_compiling() or self.failure is not None
            if idle or os.getpid() != self.pid or modes.is_under_jit():
                return
            try:
                with self.meter.lock, self.costs:  # the program may train in several threads
                    work(*args)
            except Exception as error:  # noqa: BLE001 - it is the user's program that runs around this
                error.add_note(traceback.format_exc())  # the traceback itself would keep what it went through
                self.failure, self.meter.level = error.with_traceback(None), OFF
                say(f"internal error, watching stops here: {type(error).__name__}: {error}")

        return hook


def leave_to_parent(shield: Shield | None) -> None:
    """In a forked child, where the recording belongs to the parent, measure nothing; the watch may be gone by then."""
    if shield is not None:
        shield.meter.level, shield.in_child = OFF, True
