"""Several runs that take turns on one machine, a few steps each, so that all of them meet the same machine.

A machine that is shared runs at half its speed for seconds at a time, and two runs one after the
other differ by more than what is to be measured. Here each run is a process of its own, and only
one of them computes at any time: the others wait for their turn. While a run waits its clock
stands, so that what paces itself by it does not take the waiting for the program's time.
"""

from __future__ import annotations

import os
import random
import select
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_GO, _DONE = "go", "done"
_true_clock = time.perf_counter


def make_pipes(folder: str) -> None:
    """Make what a run and its conductor speak through."""
    for name in (_GO, _DONE):
        os.mkfifo(Path(folder) / name)


class Turn:
    """A run's side: computes while it has the turn.

    Args:
        folder: Where the pipes are.

    Attributes:
        waited: The seconds it has waited so far.
    """

    def __init__(self, folder: str) -> None:
        self._go = os.open(Path(folder) / _GO, os.O_RDWR)
        self._done = os.open(Path(folder) / _DONE, os.O_RDWR)
        self.waited = 0.0
        time.perf_counter = self.clock  # type: ignore[assignment]

    def clock(self) -> float:
        """The seconds, without those of waiting."""
        return _true_clock() - self.waited

    def take(self) -> None:
        """Wait for the first turn."""
        begun = _true_clock()
        os.read(self._go, 1)
        self.waited += _true_clock() - begun

    def pass_on(self) -> None:
        """Let the others compute, and wait until it is this run's turn again."""
        os.write(self._done, b".")
        self.take()

    def leave(self) -> None:
        """Say that this run has ended."""
        os.write(self._done, b"!")


def conduct(
    runs: Mapping[str, Any], folders: Mapping[str, str], ended: Callable[[str], None]
) -> None:
    """Give each run the turn, in a new order every time round, until all have ended.

    Args:
        runs: The processes.
        folders: Where their pipes are.
        ended: Called with the name of a run that died.
    """
    pipes = {
        n: tuple(os.open(Path(f) / p, os.O_RDWR) for p in (_GO, _DONE)) for n, f in folders.items()
    }
    try:
        going = list(runs)
        while going:
            for name in random.sample(going, len(going)):
                go, done = pipes[name]
                os.write(go, b".")
                while not select.select([done], [], [], 1.0)[0]:
                    if runs[name].poll() is not None:
                        ended(name)
                if os.read(done, 1) == b"!":
                    runs[name].wait()
                    going.remove(name)
    finally:
        for pair in pipes.values():
            for pipe in pair:
                os.close(pipe)
