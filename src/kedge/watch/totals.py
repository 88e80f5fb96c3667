"""The figures of a watched run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class WatchSummary:
    """The figures of a watched run.

    Attributes:
        sites: How many sites fired.
        steps: How many steps the program made.
        sampled: How many of them were measured in full.
        seconds: Wall-clock seconds from the first watched call to the end.
        watching: Seconds of them that Kedge took, by its own measurement.
        levels: Steps of each kind: "measured", "guarded", "skipped".
        failed: Whether Kedge failed, so that the run was watched in part or not at all.
        left_alone: The line of the program for which its operations were not looked at, as text;
            empty if they were.
    """

    sites: int
    steps: int
    sampled: int
    seconds: float
    watching: float
    levels: dict[str, int]
    failed: bool = False
    left_alone: str = ""
