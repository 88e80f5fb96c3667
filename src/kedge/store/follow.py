"""Following a recording while it is being written."""

from __future__ import annotations

import os
from pathlib import Path

from kedge.errors import RecordingError
from kedge.store.json_files import MANIFEST, Document, read_manifest, read_ranks
from kedge.store.rank_reader import ShareReader, signature
from kedge.store.recording import Recording


class Follower:
    """Reads a recording as it grows; each time only what is new.

    The folder need not be there yet, and may be replaced by that of another run, which is then
    followed from its beginning.

    Args:
        path: The folder of the recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._run: _Run | None = None

    def poll(self) -> Recording | None:
        """Read what was written since the last time.

        Returns:
            All that was read so far, as a value that does not change when more comes; None if nothing
            was written, or if there is no recording yet.

        Raises:
            NotARecording: The path is something else, or a file is damaged.
            NewerFormat: A newer Kedge writes it.
        """
        before = self._written()
        if before is None:
            self._refuse_what_cannot_become_one()
            return None
        try:
            run = self._run
            if run is None or run.written != before:
                run = _Run(self.path, before)
            recording = run.read()
        except RecordingError:
            if self._written() == before:
                raise
            return None  # it was removed while it was read, by the run that replaces it
        if self._written() != before:
            return None
        self._run = run
        return recording

    def _written(self) -> tuple[int, ...] | None:
        """Tell runs apart: each writes its manifest once."""
        try:
            return signature(self.path / MANIFEST)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def _refuse_what_cannot_become_one(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            read_manifest(self.path)


class _Run:
    """What was read of one run."""

    def __init__(self, folder: Path, written: tuple[int, ...]) -> None:
        self.written = written
        self._folder = folder
        self._manifest: Document = read_manifest(folder)
        self._readers: dict[int, ShareReader] = {}
        self._told = False
        self._torn: list[bool] = []

    def read(self) -> Recording | None:
        """Read on; None if there is nothing new."""
        ranks = read_ranks(self._folder) or (0,)
        fresh = [rank for rank in ranks if rank not in self._readers]
        self._readers |= {rank: ShareReader(self._folder, rank) for rank in fresh}
        readers = [self._readers[rank] for rank in sorted(self._readers)]
        news = [reader.read() for reader in readers]
        torn = [reader.torn for reader in readers]
        if self._told and not any(news) and not fresh and torn == self._torn:
            return None
        self._told, self._torn = True, torn
        return Recording.of(self._folder, self._manifest, [reader.share() for reader in readers], any(torn))
