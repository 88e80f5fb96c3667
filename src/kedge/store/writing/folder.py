"""The folder of a recording, written while a program runs, with one writer for each file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from json import dumps
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

from kedge.errors import NotARecording
from kedge.files.atomic_write import replace, told
from kedge.files.file_lock import release
from kedge.files.own_file import OwnFile, write_all
from kedge.store.events import RunEvent, StoppedEvent
from kedge.store.reading.json_files import (
    FORMAT,
    MANIFEST,
    STATS,
    events_file,
    read_manifest,
    sites_file,
)
from kedge.store.writing.arrow import StatsWriter
from kedge.store.writing.destination import put
from kedge.store.writing.lock import LOCK, hold


def create(
    path: str | os.PathLike[str], manifest: Mapping[str, Any], force: bool
) -> RecordingWriter:
    """Start a recording.

    Args:
        path: The folder to make; its parent must exist.
        manifest: The content of ``manifest.json`` besides the format.
        force: Whether to remove an existing recording, unless it is being written.
            Nothing else is ever removed.

    Raises:
        RecordingExists: A recording exists and ``force`` is not set, or something else is there.
        BeingWritten: The existing recording is being written.
        RecordingError: The folder cannot be made.
    """
    folder = Path(path)
    rank = int(manifest.get("rank", 0))
    fresh = folder.with_name(f".{folder.name}.{token_hex(4)}")
    with told(f"create the recording {folder}"):
        fresh.mkdir()
    held: OwnFile | None = None
    try:
        replace(fresh / MANIFEST, dumps({"format": FORMAT, **manifest}, indent=2) + "\n")
        held = hold(fresh, rank)
        put(fresh, folder, force)
        held.path = os.path.abspath(folder / LOCK)  # noqa: PTH100
        return RecordingWriter(folder, rank, held)
    except BaseException:
        if held is not None:
            release(held)
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def join(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
) -> RecordingWriter | None:
    """Return a writer of this rank's share of the recording that rank 0 of the same run has made.

    Args:
        path: The folder of the recording.
        manifest: The manifest of this rank; ``run`` and ``attempt`` are the same for all ranks of a
            run.

    Returns:
        None if there is no such recording.
    """
    folder = Path(path)
    rank = int(manifest["rank"])
    try:
        found = read_manifest(folder)
    except NotARecording:
        return None
    same = all(found.get(name) == manifest.get(name) for name in ("run", "attempt"))
    if not same or (folder / STATS.format(rank=rank)).exists():
        return None  # it is of another run, and may be about to be replaced
    held = hold(folder, rank)
    try:
        return RecordingWriter(folder, rank, held)
    except BaseException:
        release(held)
        raise


class RecordingWriter:
    """The writer of one rank's share of a recording; everything written can be read at once."""

    def __init__(self, folder: Path, rank: int, held: OwnFile) -> None:
        self.path = folder
        self._sites = folder / sites_file(rank)
        self._held = held
        self._described: Sequence[Mapping[str, Any]] = ()
        self._description = "[]"
        self._stats = StatsWriter(folder / STATS.format(rank=rank))
        with told(f"start {folder / events_file(rank)}"):
            self._events = OwnFile(folder / events_file(rank))

    def sites(
        self,
        sites: Sequence[Mapping[str, Any]],
        roots: Sequence[Mapping[str, Any]],
    ) -> None:
        """Write the description of all sites and roots known so far.

        It must precede the rows of a new site. The same list of sites as in the last call is
        written as it was then: a large model has many, and at the end only the roots are new.
        """
        if sites is not self._described:
            self._description = dumps(list(sites))
            self._described = sites
        text = f'{{"roots": {dumps(list(roots))}, "sites": {self._description}}}\n'
        replace(self._sites, text)

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Append the rows of one step, in the form of :meth:`StatsWriter.write`."""
        self._keep_lock()
        self._stats.write(step, columns)

    def event(self, event: RunEvent) -> None:
        """Append one event after all waiting rows; its numbers must be finite, as in JSON."""
        self._keep_lock()
        self._stats.flush()
        line = dumps(event.entry(), allow_nan=False) + "\n"
        with told(f"write to {self._events.path}"):
            write_all(self._events, line.encode())

    def stopped(self, step: int, error: str) -> None:
        """Append that a step could not be written, and that nothing more will be."""
        self.event(StoppedEvent(step=step, error=error))

    def _keep_lock(self) -> None:
        """Lock the recording again if the program has closed the lock's file."""
        with told(f"write to {self.path}"):
            self._held.check()

    def close(self) -> None:
        """End the recording. Closing twice has no effect."""
        self._described = ()
        self._description = "[]"
        try:
            self._events.close()
            self._stats.close()
        finally:
            release(self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()
