"""A recording read again and again while it is being written."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

from kedge.errors import RecordingError
from kedge.files.atomic_write import told
from kedge.files.given_path import given_path
from kedge.store.reading.json_files import MANIFEST, Document, is_there, read_manifest, read_ranks
from kedge.store.reading.rank_reader import RankReader, signature
from kedge.store.recording import Recording, recording_of

#: The seconds over which the pace is measured.
PACED_OVER = 30.0


class Follower:
    """A reader of a growing recording that reads only what is new.

    The folder need not exist yet. If the recording of another run replaces it, that one is read
    from its beginning.

    Args:
        path: The folder of the recording.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = given_path(path)
        self._run: _Run | None = None

    def poll(self) -> Recording | None:
        """Read everything written since the last call.

        Returns:
            The recording so far, as a value that does not change later; None if nothing
            was written, or if there is no recording yet.

        Raises:
            NotARecording: The path is something else, or a file is damaged.
            NewerFormat: A newer Kedge writes it.
        """
        before = self._written()
        if before is None:
            self._check_place()
            return None
        try:
            run = self._run
            if run is None or run.written != before:
                run = _Run(self.path, before)
            recording = run.read()
        except RecordingError:
            if self._written() == before:
                raise
            return None  # the run that replaces it removed it meanwhile
        if self._written() != before:
            return None
        self._run = run
        return recording

    def _written(self) -> tuple[int, ...] | None:
        """Return the signature of the manifest, which each run writes once; None if there is none."""
        with told(f"read {self.path / MANIFEST}"):
            try:
                return signature(self.path / MANIFEST)
            except (FileNotFoundError, NotADirectoryError):
                return None

    def _check_place(self) -> None:
        with told(f"read {self.path}"):
            elsewhere = is_there(self.path) and not self.path.is_dir()
        if elsewhere:
            read_manifest(self.path)


class Pace:
    """The steps per second of a growing recording.

    They are those of the last seconds or, after the end, of the whole run.
    """

    def __init__(self) -> None:
        self._reached: deque[tuple[float, int]] = deque()

    def forget(self) -> None:
        """Begin anew, for another run."""
        self._reached.clear()

    def at(self, recording: Recording, now: float) -> float | None:
        """Return the pace of a recording that has just been read; None while it is not known.

        Args:
            recording: The recording so far.
            now: The time in seconds.
        """
        end = recording.end
        if end is not None and end.steps and end.seconds:
            return end.steps / end.seconds
        if end is not None or not len(recording.steps):
            return None
        reached = self._reached
        step = int(recording.steps[-1])
        if reached and reached[-1][1] > step:  # another run replaced it
            reached.clear()
        reached.append((now, step))
        while len(reached) > 2 and now - reached[1][0] > PACED_OVER:
            reached.popleft()
        first_time, first_step = reached[0]
        if now <= first_time or step <= first_step:
            return None
        return (step - first_step) / (now - first_time)


class _Run:
    """Everything read of one run."""

    def __init__(self, folder: Path, written: tuple[int, ...]) -> None:
        self.written = written
        self._folder = folder
        self._manifest: Document = read_manifest(folder)
        self._readers: dict[int, RankReader] = {}
        self._has_read = False
        self._torn: list[bool] = []

    def read(self) -> Recording | None:
        """Return the recording so far; None if nothing is new."""
        ranks = read_ranks(self._folder) or (0,)
        fresh = [rank for rank in ranks if rank not in self._readers]
        for rank in fresh:
            self._readers[rank] = RankReader(self._folder, rank)
        readers = [self._readers[rank] for rank in sorted(self._readers)]
        news = [reader.read() for reader in readers]
        torn = [reader.torn for reader in readers]
        if self._has_read and not any(news) and not fresh and torn == self._torn:
            return None
        self._has_read = True
        self._torn = torn
        shares = [reader.share() for reader in readers]
        return recording_of(self._folder, self._manifest, shares, any(torn))
