"""The options of a watched run, and their description in its recording.

Nothing here needs torch or numpy.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from kedge.watch.run.ranks import LaunchedRank

BEGINNING = "beginning to watch", "the program goes on unwatched"
ENDING = "ending the watch", "the end of the recording may be missing"
"""Work around a watch that may fail, each with the consequence of a failure."""


@dataclass(frozen=True)
class WatchOptions:
    """The options of a watched run.

    Attributes:
        sites: A selector.
        every: One step in this many is measured in full.
        budget: The share of the run's time that watching may take; None for no limit.
        dump: Whether the tensors around the first non-finite value are kept.
        saved: Called when the watch begins, with the shield that reports its failures; returns a
            list of everything that autograd saves in the first step
            (`kedge.watch.records.first_step.SavedTensorList`). None: no list.
        on: What is done at findings while the program runs; see `kedge.watch.acting.orders`.
        rerun: Whether bad steps run again in a copy of the process.
        keep_steps: How many of the last steps are kept, to run again later; None to keep bad steps
            alone, if they are small.
        time: Whether the modules are timed in measured steps.
    """

    sites: str = "**"
    every: int = 10
    budget: float | None = 0.03
    dump: bool = False
    saved: Callable[[Any], Any] | None = None
    on: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    rerun: bool = True
    keep_steps: int | None = None
    time: bool = False


def manifest_of(command: Sequence[str], script: str, options: WatchOptions) -> dict[str, Any]:
    """Return the entries of ``manifest.json`` that are known before a run begins.

    Args:
        command: The arguments after ``python`` that run it.
        script: The script or module.
        options: The options of the watch.
    """
    return {
        "kedge": metadata.version("kedge"),
        "command": list(command),
        "script": script,
        "python": platform.python_version(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "every": options.every,
        "budget": options.budget,
        "sites": options.sites,
        "dump": options.dump,
        "host": platform.node(),
        **LaunchedRank.here().describe(),
    }
