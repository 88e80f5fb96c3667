"""Reading what one rank writes, again and again: each time only what is new."""

from __future__ import annotations

import io
import os
from pathlib import Path

from kedge.atomic_write import told
from kedge.errors import NotARecording
from kedge.store.batches import Finder
from kedge.store.by_site import Stretch
from kedge.store.json_files import STATS, Document, event_from, events_file, read_sites, sites_file
from kedge.store.ranks import Share
from kedge.store.sites import Root, SiteInfo
from kedge.store.table import Table


class ShareReader:
    """Reads the files of one rank as they grow."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.rank = rank
        self.torn = False
        self._folder = folder
        self._events = _EventsReader(folder / events_file(rank))
        self._finder = Finder(folder / STATS.format(rank=rank))
        self._sites = _SitesReader(folder, rank)
        self._stretches: list[Stretch] = []

    def read(self) -> bool:
        """Read what was written since the last time; tell whether there was anything.

        Raises:
            NotARecording: A file is damaged, or holds something else.
        """
        # Its writer describes a site before its rows and writes rows before the end event, so the
        # opposite order never meets a row of an unknown site, nor an end without its rows.
        new_events = self._events.read()
        found = self._finder.find() if self._finder.path.exists() else None
        if found is not None:
            self._stretches = _appended(self._stretches, Stretch(found))
        new_sites = self._sites.read()
        self.torn = self._events.torn or self._finder.torn
        return new_events or new_sites or found is not None

    def share(self) -> Share:
        """Give all that was read.

        Raises:
            NotARecording: There are rows, and nothing that describes their sites.
        """
        if self._sites.found is None and self._stretches:
            raise NotARecording(
                f"{self._folder / sites_file(self.rank)} is missing, though {self._finder.path.name} holds rows; "
                "copy the whole folder again, or record the run again"
            )
        roots, sites = self._sites.found or ((), ())
        return Share(self.rank, roots, sites, tuple(self._events.events), Table(stretches=self._stretches))


def _appended(stretches: list[Stretch], new: Stretch) -> list[Stretch]:
    """Add a stretch, and put small ones together.

    The rows of a stretch are put in the order of sites each time it grows. So a stretch is put together with the one
    before it only when it has become half as long: a row is then moved a few times at most, however often new ones
    come, and there are never more than a few stretches.
    """
    stretches = [*stretches, new]
    while len(stretches) > 1 and len(stretches[-2]) < 2 * len(stretches[-1]):
        later, earlier = stretches.pop(), stretches.pop()
        stretches.append(Stretch(earlier.batches.followed_by(later.batches)))
    return stretches


class _EventsReader:
    """Reads the events line by line; the last line may be incomplete."""

    def __init__(self, path: Path) -> None:
        self.events: list[Document] = []
        self.torn = False
        self._path = path
        self._at = 0

    def read(self) -> bool:
        """Read the lines that are new, and tell whether there are any."""
        if not self._path.exists():
            return False
        with told(f"read {self._path}"), io.FileIO(self._path) as file:
            file.seek(self._at)
            *lines, rest = file.readall().split(b"\n")
        known = len(self.events)
        self.events += [event_from(self._path, known + number, line) for number, line in enumerate(lines, 1)]
        self._at += sum(len(line) + 1 for line in lines)
        self.torn = rest != b""
        return bool(lines)


class _SitesReader:
    """Reads the description of the sites when it was written anew."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.found: tuple[tuple[Root, ...], tuple[SiteInfo, ...]] | None = None
        self._folder, self._rank = folder, rank
        self._seen: tuple[int, ...] | None = None

    def read(self) -> bool:
        """Read the description if it is another than the last time, and tell whether it is."""
        path = self._folder / sites_file(self._rank)
        if not path.exists():
            return False
        with told(f"read {path}"):
            seen = signature(path)
        if seen == self._seen:
            return False
        self._seen, self.found = seen, read_sites(self._folder, self._rank)
        return True


def signature(path: Path) -> tuple[int, ...]:
    """Give what differs between a file and the one that takes its place."""
    found = os.stat(path)  # noqa: PTH116 - one call, and nothing of a path is needed
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
