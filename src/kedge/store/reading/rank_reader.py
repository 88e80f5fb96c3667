"""The files of one rank, read again and again: each time only what is new."""

from __future__ import annotations

import os
from pathlib import Path

from kedge.errors import NotARecording
from kedge.files.atomic_write import told
from kedge.json_input.reading import read_regular
from kedge.store.events import EndEvent, PositionEvent, RunEvent
from kedge.store.reading.batches import BatchFinder
from kedge.store.reading.by_site import FileRows
from kedge.store.reading.events import EventsReader
from kedge.store.reading.json_files import (
    STATS,
    RootsAndSites,
    events_file,
    is_there,
    position_file,
    read_event,
    read_sites,
    sites_file,
)
from kedge.store.reading.ranks import RankShare
from kedge.store.reading.table import StatsTable


class RankReader:
    """A reader of the growing files of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.torn = False
        self._folder = folder
        self._events = EventsReader(folder / events_file(rank))
        self._finder = BatchFinder(folder / STATS.format(rank=rank))
        self._sites = _SitesReader(folder, rank)
        self._position = _PositionReader(folder / position_file(rank))
        self._parts: list[FileRows] = []

    def read(self) -> bool:
        """Read everything written since the last call; return whether there was anything.

        Raises:
            NotARecording: A file is damaged, or holds something else.
        """
        # The writer describes a site before its rows and writes rows before the end event. Reading
        # in the opposite order never finds a row of an unknown site, nor an end without its rows.
        new_events = self._events.read()
        found = None
        if self._is_begun():
            found = self._finder.find()
        if found is not None:
            self._parts = _appended(self._parts, FileRows(found))
        new_sites = self._sites.read()
        self.torn = self._events.torn or self._finder.torn
        stands_still = self._position.read()
        return new_events or new_sites or stands_still or found is not None

    def _is_begun(self) -> bool:
        with told(f"read {self._finder.path}"):
            return is_there(self._finder.path)

    def share(self) -> RankShare:
        """Return everything read so far.

        Raises:
            NotARecording: There are rows without a description of their sites.
        """
        if self._sites.found is None and self._parts:
            raise NotARecording(
                f"{self._folder / sites_file(self.rank)} is missing, though "
                f"{self._finder.path.name} holds rows; "
                "copy the whole folder again, or record the run again"
            )
        roots, sites = self._sites.found or ((), ())
        events = list(self._events.events)
        position = self._position.found
        if position is not None and not any(isinstance(event, EndEvent) for event in events):
            events.append(position)
        return RankShare(self.rank, roots, sites, tuple(events), StatsTable(parts=self._parts))


def _appended(parts: list[FileRows], new: FileRows) -> list[FileRows]:
    """Return the parts of a file with a new one, small ones merged.

    The rows of a part are ordered by site again each time it grows. So a part is merged with the
    one before it only when it has become half as long: each row is then moved a few times at most,
    however many parts arrive, and there are never more than a few parts.
    """
    parts = [*parts, new]
    while len(parts) > 1 and len(parts[-2]) < 2 * len(parts[-1]):
        later = parts.pop()
        earlier = parts.pop()
        parts.append(FileRows(earlier.batches.followed_by(later.batches)))
    return parts


class _SitesReader:
    """A reader of the description of the sites, which is rewritten when it changes."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.found: RootsAndSites | None = None
        self._folder = folder
        self._rank = rank
        self._seen: tuple[int, ...] | None = None

    def read(self) -> bool:
        """Read the description if it has changed; return whether it has."""
        path = self._folder / sites_file(self._rank)
        with told(f"read {path}"):
            if not is_there(path):
                return False
            seen = signature(path)
        if seen == self._seen:
            return False
        self._seen = seen
        self.found = read_sites(self._folder, self._rank)
        return True


class _PositionReader:
    """A reader of the note where the program is, which is written again every second."""

    def __init__(self, path: Path) -> None:
        self.found: RunEvent | None = None
        self._path = path
        self._seen: tuple[int, ...] | None = None

    def read(self) -> bool:
        """Read the note if it has changed; return whether the program has stood still since the last one."""
        with told(f"read {self._path}"):
            try:
                seen = signature(self._path)
                if seen == self._seen:
                    return False
                line, _, _ = read_regular(self._path).partition(b"\n")
            except (
                FileNotFoundError,
                NotADirectoryError,
            ):  # before the first look, and after the end
                return False
        try:
            found = read_event(self._path, 1, line)
        except NotARecording:  # it is being written over just now
            return False
        self._seen = seen
        self.found = found
        return isinstance(found, PositionEvent) and found.since != found.seen


def signature(path: Path) -> tuple[int, ...]:
    """Return values that differ between a file and another one that replaces it."""
    found = os.stat(path)  # noqa: PTH116 - one call, and nothing of a path is needed
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
