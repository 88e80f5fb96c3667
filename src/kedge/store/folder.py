"""The folder of a recording, written while a program runs: one writer for each file."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, Self

from kedge.errors import RecordingExists
from kedge.store.arrow import StatsWriter
from kedge.store.disk import replace, told, write_all
from kedge.store.documents import EVENTS, FORMAT, MANIFEST, SITES, STATS


def create(path: str | os.PathLike[str], manifest: Mapping[str, Any], force: bool) -> RecordingWriter:
    """Start a recording.

    Args:
        path: The folder to make; the folder it is to be in must be there.
        manifest: What ``manifest.json`` will hold besides the format.
        force: Whether to remove a recording that is there already. Nothing else is ever removed.

    Raises:
        RecordingExists: A recording is there and ``force`` is not given, or something else is there.
        RecordingError: The folder cannot be made.
    """
    folder = Path(path)
    if os.path.lexists(folder):
        _make_way(folder, force)
    with told(f"make the recording {folder}"):
        folder.mkdir()
    replace(folder / MANIFEST, json.dumps({"format": FORMAT, **manifest}, indent=2) + "\n")
    return RecordingWriter(folder, int(manifest.get("rank", 0)))


def _make_way(folder: Path, force: bool) -> None:
    if not _is_recording(folder):
        raise RecordingExists(
            f"cannot make the recording {folder}: something that is not a recording is there and is left alone; "
            "name another place"
        )
    if not force:
        raise RecordingExists(
            f"cannot make the recording {folder}: there is one already; "
            "name another place with -o, or replace it with --force"
        )
    with told(f"remove the old recording {folder}"):
        shutil.rmtree(folder)


def _is_recording(folder: Path) -> bool:
    """Tell whether a path is a folder whose manifest names a format."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and "format" in manifest


class RecordingWriter:
    """Write one rank's share of a recording; whatever is written can be read at once."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = folder
        self._stats = StatsWriter(folder / STATS.format(rank=rank))
        with told(f"start {folder / EVENTS}"):
            self._events = FileIO(folder / EVENTS, "a")

    def sites(self, sites: Sequence[Mapping[str, Any]], roots: Sequence[Mapping[str, Any]]) -> None:
        """Describe all sites and roots known so far; call it before writing rows of a new site."""
        document = {"roots": list(roots), "sites": list(sites)}
        replace(self.path / SITES, json.dumps(document) + "\n")

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Append the rows of one step, as :meth:`StatsWriter.write` takes them."""
        self._stats.write(step, columns)

    def event(self, event: Mapping[str, Any]) -> None:
        """Append one event; its numbers must be finite, as JSON has no others."""
        line = json.dumps(event, allow_nan=False) + "\n"
        with told(f"write to {self.path / EVENTS}"):
            write_all(self._events, line.encode())

    def close(self) -> None:
        """End the recording; closing twice does nothing."""
        self._events.close()
        self._stats.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *reason: object) -> None:
        self.close()
