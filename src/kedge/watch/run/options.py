"""What a watched run is to be like, and how its recording describes it; nothing here needs torch or numpy."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from kedge.watch.run.ranks import LaunchedRank

BEGINNING = "beginning to watch", "the program goes on unwatched"
ENDING = "ending the watch", "the recording may lack its end"
"""What may fail around a watch, and what happens then."""


@dataclass(frozen=True)
class WatchOptions:
    """What is to be watched, and how often.

    Attributes:
        sites: A selector.
        every: One step in this many is measured in full.
        budget: The share of the run's time that watching may take; None for any.
        dump: Whether the tensors around the first value that is not finite are kept.
        saved: Makes what writes down everything that autograd saves in the first step
            (`kedge.watch.records.first_step.SavedTensorBill`), given the shield that reports its failures; None: that is not
            done. It is made when the watch begins.
    """

    sites: str = "**"
    every: int = 10
    budget: float | None = 0.03
    dump: bool = False
    saved: Callable[[Any], Any] | None = None


def manifest_of(command: Sequence[str], script: str, order: WatchOptions) -> dict[str, Any]:
    """Describe a run before it begins, in the words of ``manifest.json``.

    Args:
        command: What comes after ``python`` to run it.
        script: The script or module.
        order: What is watched.
    """
    return {
        "kedge": metadata.version("kedge"),
        "command": list(command),
        "script": script,
        "python": platform.python_version(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "every": order.every,
        "budget": order.budget,
        "sites": order.sites,
        "dump": order.dump,
        "host": platform.node(),
        **LaunchedRank.here().describe(),
    }
