"""The ranks of a distributed run: the rank of this process, and the recording of all ranks.

# Note [One folder]
The ranks of a run record into one folder. Rank 0 makes it, and the others join once it exists. They
recognize it by the run's id and by the address where the ranks meet: the launcher gives both to all
ranks, and the manifest repeats them. A launcher may restart all ranks after a failure: the
recording of an earlier attempt stays, and the next attempt is recorded beside it.
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
from kedge.store.writing.lock import check_written, writers

PATIENCE = 3.0
"""Seconds that rank 0 waits at the end for the other ranks."""

_NO_ID = "none"
"""The id that torchrun gives to a run without one."""

_UUID = re.compile(r"([0-9a-f]{8})(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class LaunchedRank:
    """This process's place in a run, from the environment variables that torchrun sets.

    Attributes:
        rank: The rank.
        world: How many ranks there are.
        run: The id of the run, the same for all ranks; None for a process by itself.
        attempt: The meeting address and the number of the attempt; the same for all ranks.
        repeats: Whether an existing recording of this run may be that of an earlier attempt.
    """

    rank: int = 0
    world: int = 1
    run: str | None = None
    attempt: str | None = None
    repeats: bool = False

    @classmethod
    def here(cls, environment: Mapping[str, str] = os.environ) -> LaunchedRank:
        """Return the rank in the environment; a rank without a world, or beyond it, is ignored."""
        rank = environment.get("RANK", "")
        world = environment.get("WORLD_SIZE", "")
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
            return cls()
        run = environment.get("TORCHELASTIC_RUN_ID")
        if world == "1" and run is None:
            return cls()

        restarts = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        address = environment.get("MASTER_ADDR", "")
        port = environment.get("MASTER_PORT", "")
        repeats = True
        if run is None or run == _NO_ID:
            run = port
            repeats = restarts != "0"
        return cls(int(rank), int(world), run, f"{address}:{port}/{restarts}", repeats)

    @property
    def leads(self) -> bool:
        """Whether this process makes the recording, and reports for all ranks."""
        return self.rank == 0

    @property
    def meets(self) -> bool:
        """Whether the launcher gave the ranks a place or an id to meet by.

        Without one, no other rank is waited for.
        """
        return bool(self.run)

    @property
    def label(self) -> str:
        """The part of a recording's name that is unique.

        It is the process, or an id that all ranks of the run share.
        """
        if self.run is None:
            return str(os.getpid())
        uuid = _UUID.fullmatch(self.run)
        if uuid is not None:
            return uuid[1]
        return re.sub(r"[^\w.-]", "_", self.run)

    def describe(self) -> dict[str, Any]:
        """Return its entries in ``manifest.json``."""
        return {"rank": self.rank, "world": self.world, "run": self.run, "attempt": self.attempt}

    def settle(self, name: str, force: bool) -> str:
        """Return the place where rank 0 records; see Note [One folder].

        Args:
            name: The requested place.
            force: Whether an old recording there may be replaced.

        Raises:
            RecordingError: Nothing can be recorded there.
        """
        if not self.leads:
            return name
        candidates = places(Path(name))
        place = next(p for p in candidates if not self._keeps(p, first=name, force=force))
        check_place(place, force)
        return str(place)

    def await_others(self, place: Path, seconds: float = PATIENCE) -> None:
        """Wait until the other ranks have written their last rows, before the recording of all is judged.

        A rank that has not begun to write is waited for as well: it may still have its rows to
        itself.

        Args:
            place: The recording.
            seconds: Most seconds to wait.
        """
        until = time.monotonic() + seconds
        while self.world > 1 and time.monotonic() < until and not self._all_have_written(place):
            time.sleep(0.05)

    def _all_have_written(self, place: Path) -> bool:
        begun = {writer["rank"] for writer in writers(place)}
        if not begun:
            return True  # rank 0 has made no recording, so no other rank can write into it
        if len(begun) < self.world:
            return False
        try:
            check_written(place)
        except RecordingError:
            return False
        return True

    def _keeps(self, place: Path, *, first: str, force: bool) -> bool:
        """Whether files at a place stay: an earlier attempt's recording, or others beside it."""
        if not self.repeats or not os.path.lexists(place):
            return False
        return _run_at(place) == self.run or not (force or place == Path(first))


def places(place: Path) -> Iterator[Path]:
    """Yield a place and those of further attempts: ``train.kedge``, ``train.restart-1.kedge``."""
    yield place
    for number in count(1):
        yield place.with_name(f"{place.stem}.restart-{number}{place.suffix}")


def _run_at(place: Path) -> str | None:
    """Return the run id of the recording at a place; None if there is none."""
    try:
        run = json.loads((place / "manifest.json").read_bytes()).get("run")
    except (OSError, ValueError, AttributeError):
        return None
    if run is None:
        return None
    return str(run)
