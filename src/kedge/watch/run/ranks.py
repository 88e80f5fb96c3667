"""The ranks of a distributed run: which one this process is, and where they all record.

# Note [One folder]
The ranks of a run record into one folder. Rank 0 makes it, and the others take part once it is
there. That it is theirs they know by the run's id and by the address at which the ranks meet, which
their launcher tells them all and the manifest repeats. A launcher may start all ranks again after a
failure: what an earlier attempt recorded is left alone, and the next one is recorded beside it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from kedge.errors import RecordingError
from kedge.store.writing.destination import check_place
from kedge.store.writing.lock import check_written

PATIENCE = 3.0
"""For how many seconds rank 0 waits at the end for the other ranks."""

_NO_ID = "none"
"""How torchrun calls a run that was given no id."""

_UUID = re.compile(r"([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class LaunchedRank:
    """What the launcher of this process says about it, in the environment variables that torchrun sets.

    Attributes:
        rank: The rank.
        world: How many ranks there are.
        run: The id of the run, the same for all ranks; None for a process by itself.
        attempt: Where the ranks meet, and which attempt this is; the same for all ranks.
        repeats: Whether a recording of this run may be that of an earlier attempt.
    """

    rank: int = 0
    world: int = 1
    run: str | None = None
    attempt: str | None = None
    repeats: bool = False

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> LaunchedRank:
        """Read the environment; a rank without a world, or beyond it, counts for nothing."""
        rank, world = (environment.get(name, "") for name in ("RANK", "WORLD_SIZE"))
        run = environment.get("TORCHELASTIC_RUN_ID")
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)) or (world == "1" and run is None):
            return cls()
        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        address, port = (environment.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        named = run is not None and run != _NO_ID
        attempt = f"{address}:{port}/{restarts}"
        return cls(int(rank), int(world), run if named else port, attempt, named or restarts != "0")

    @property
    def leads(self) -> bool:
        """Whether this process makes the recording, and speaks for all."""
        return self.rank == 0

    @property
    def label(self) -> str:
        """What tells recordings of one program apart: the process, or what all ranks of the run share."""
        if self.run is None:
            return str(os.getpid())
        uuid = _UUID.fullmatch(self.run)
        return uuid[1] if uuid else re.sub(r"[^\w.-]", "_", self.run)

    def describe(self) -> dict[str, Any]:
        """Say it in the words of ``manifest.json``."""
        return {"rank": self.rank, "world": self.world, "run": self.run, "attempt": self.attempt}

    def settle(self, name: str, force: bool) -> str:
        """Find out where rank 0 is to record; see Note [One folder].

        Args:
            name: The place that was asked for.
            force: Whether an old recording there may be replaced.

        Raises:
            RecordingError: Nothing can be recorded there.
        """
        if not self.leads:
            return name
        place = next(place for place in places(Path(name)) if not self._keeps(place, first=name, force=force))
        check_place(place, force)
        return str(place)

    def await_others(self, place: Path, seconds: float = PATIENCE) -> None:
        """Let the other ranks write their last rows before what all have written is judged, but not for long."""
        until = time.monotonic() + seconds
        while self.world > 1 and time.monotonic() < until:
            try:
                check_written(place)
            except RecordingError:
                time.sleep(0.05)
            else:
                return

    def _keeps(self, place: Path, *, first: str, force: bool) -> bool:
        """Whether what is at a place stays there: an earlier attempt's recording, and what is in the way beside it."""
        if not self.repeats or not os.path.lexists(place):
            return False
        return _run_at(place) == self.run or not (force or place == Path(first))


def places(place: Path) -> Iterator[Path]:
    """Name a place and those of further attempts: ``train.kedge``, ``train.restart-1.kedge``."""
    yield place
    for number in count(1):
        yield place.with_name(f"{place.stem}.restart-{number}{place.suffix}")


def _run_at(place: Path) -> str | None:
    """Read of which run there is a recording at a place."""
    try:
        run = json.loads((place / "manifest.json").read_bytes()).get("run")
    except (OSError, ValueError, AttributeError):
        return None
    return None if run is None else str(run)
