"""The folder of a recording, written while a program runs: one writer for each file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from secrets import token_hex
from typing import Any, Self

from kedge.atomic_write import replace, told, write_all
from kedge.errors import NotARecording
from kedge.store.arrow import StatsWriter
from kedge.store.destination import put
from kedge.store.json_files import FORMAT, MANIFEST, STATS, events_file, read_manifest, sites_file
from kedge.store.lock import hold, release


def create(path: str | os.PathLike[str], manifest: Mapping[str, Any], force: bool) -> RecordingWriter:
    """Start a recording.

    Args:
        path: The folder to make; the folder it is to be in must be there.
        manifest: What ``manifest.json`` will hold besides the format.
        force: Whether to remove a recording that is there already, unless it is being written.
            Nothing else is ever removed.

    Raises:
        RecordingExists: A recording is there and ``force`` is not given, or something else is there.
        BeingWritten: The recording that is there is being written.
        RecordingError: The folder cannot be made.
    """
    folder, rank = Path(path), int(manifest.get("rank", 0))
    fresh = folder.with_name(f".{folder.name}.{token_hex(4)}")
    with told(f"make the recording {folder}"):
        fresh.mkdir()
    held: FileIO | None = None
    try:
        replace(fresh / MANIFEST, json.dumps({"format": FORMAT, **manifest}, indent=2) + "\n")
        held = hold(fresh, rank)
        put(fresh, folder, force)
        return RecordingWriter(folder, rank, held)
    except BaseException:
        if held is not None:
            release(held)
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def join(path: str | os.PathLike[str], manifest: Mapping[str, Any]) -> RecordingWriter | None:
    """Take part in the recording that rank 0 of the same run makes.

    Args:
        path: Where it may be.
        manifest: What this rank would write; ``run`` and ``attempt`` are the same for all ranks of a run.

    Returns:
        None if there is no recording of this run.
    """
    folder, rank = Path(path), int(manifest["rank"])
    try:
        found = read_manifest(folder)
    except NotARecording:
        return None
    same = all(found.get(name) == manifest.get(name) for name in ("run", "attempt"))
    if not same or (folder / STATS.format(rank=rank)).exists():
        return None  # left there by another run, and perhaps about to be replaced
    held = hold(folder, rank)
    try:
        return RecordingWriter(folder, rank, held)
    except BaseException:
        release(held)
        raise


class RecordingWriter:
    """Write one rank's share of a recording; whatever is written can be read at once."""

    def __init__(self, folder: Path, rank: int, held: FileIO) -> None:
        self.path = folder
        self._sites, self._held = folder / sites_file(rank), held
        self._stats = StatsWriter(folder / STATS.format(rank=rank))
        with told(f"start {folder / events_file(rank)}"):
            self._events = FileIO(folder / events_file(rank), "a")

    def sites(self, sites: Sequence[Mapping[str, Any]], roots: Sequence[Mapping[str, Any]]) -> None:
        """Describe all sites and roots known so far; call it before writing rows of a new site."""
        document = {"roots": list(roots), "sites": list(sites)}
        replace(self._sites, json.dumps(document) + "\n")

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Append the rows of one step, as :meth:`StatsWriter.write` takes them."""
        self._stats.write(step, columns)

    def event(self, event: Mapping[str, Any]) -> None:
        """Append one event, after all rows; its numbers must be finite, as JSON has no others."""
        self._stats.flush()
        line = json.dumps(event, allow_nan=False) + "\n"
        with told(f"write to {self._events.name}"):
            write_all(self._events, line.encode())

    def close(self) -> None:
        """End the recording; closing twice does nothing."""
        try:
            self._events.close()
            self._stats.close()
        finally:
            release(self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()
