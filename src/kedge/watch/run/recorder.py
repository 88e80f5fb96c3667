"""The sink that writes the data of a watched program to disk.

A failure to write never affects the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any

from kedge.errors import RecordingError
from kedge.stderr import Shield

if TYPE_CHECKING:
    from kedge.store.events import RunEvent
    from kedge.store.writing.folder import RecordingWriter

PATIENCE = 120.0
"""Least seconds that a rank keeps its data while rank 0 has not made the recording."""

PATIENCE_AT_THE_END = 3.0
"""Most seconds that a rank waits at its end for rank 0 to make the recording."""

_FEW = 100
"""How many writes are kept in any case while rank 0 has not made the recording."""

_MANY = 10_000
"""Most writes that are kept while it has not."""

_PAUSE = 0.05


class RecordingSink:
    """Writes the data of a watched run to disk.

    The recording begins with the first step: by then the device is known, and a program that calls
    no model leaves nothing behind. If writing fails, the program runs on unrecorded. Data that a
    rank has before rank 0 has made the recording is kept; the program does not wait.

    Args:
        place: The path of the recording.
        begin: Makes the recording there, or joins it; returns None as long as there is none to
            join. See `kedge.watch.run.begin.begin_recording`.
        complain: Reports to the user.
        strict: Whether a failure ends the program.
        waits: Whether to wait for rank 0 at the end, for `PATIENCE_AT_THE_END`.

    Attributes:
        begun: Called with the folder of the recording when there is one.
    """

    def __init__(
        self,
        place: Path,
        begin: Callable[[], RecordingWriter | None],
        complain: Callable[[str], None],
        *,
        strict: bool = False,
        waits: bool = True,
    ) -> None:
        self.place = place
        self.begin = begin
        self.begun: Callable[[Path], None] = _nothing
        self.waits = waits
        self.writer: RecordingWriter | None = None
        self._shield = Shield(
            "writing",
            "the program goes on, but is not recorded from here on",
            tell=complain,
            on_failure=self._give_up,
            strict=strict,
            plain=RecordingError,
        )
        self._kept: list[Callable[[RecordingWriter], None]] = []
        self._since: float | None = None
        self._closed = False
        self._step = 0

    @property
    def failed(self) -> bool:
        """Whether writing has failed."""
        return self._shield.failure is not None

    def folder(self) -> Path | None:
        """Return the recording that this process writes into; None before.

        A later attempt of ranks has its own.
        """
        if self.writer is None:
            return None
        return self.writer.path

    def sites(self, sites: Sequence[Mapping[str, Any]], roots: Sequence[Mapping[str, Any]]) -> None:
        """Write the list of sites; the first call makes the recording."""
        self._attempt(lambda writer: writer.sites(sites, roots))

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write the statistics of one step."""
        self._step = step
        self._attempt(lambda writer: writer.stats(step, columns))

    def event(self, event: RunEvent) -> None:
        """Write an event, if there is a recording."""
        if self.writer is not None or self._kept:
            self._attempt(lambda writer: writer.event(event))

    def close(self) -> None:
        """End the recording."""
        until = monotonic()
        if self.waits:
            until += PATIENCE_AT_THE_END
        while self._kept and self.writer is None and monotonic() < until:
            sleep(_PAUSE)
            self._attempt()
        if self._kept:
            self._shield.fail(self._missing())
        if self.writer is not None:
            self._attempt(lambda writer: writer.close())
        self._closed = True

    def _attempt(self, *writes: Callable[[RecordingWriter], None]) -> None:
        if not self._closed:  # a thread of the program may be inside a hook while the program ends
            self._shield(self._write, writes)

    def _write(self, writes: Iterable[Callable[[RecordingWriter], None]]) -> None:
        self._kept += writes
        if self.writer is None:
            self.writer = self.begin()
            if self.writer is not None:
                self.begun(self.writer.path)
        if self.writer is None:
            self._be_patient()
            return
        kept = self._kept
        self._kept = []
        for write in kept:
            write(self.writer)

    def _be_patient(self) -> None:
        now = monotonic()
        if self._since is None:
            self._since = now
        most = _FEW if now - self._since > PATIENCE else _MANY
        if len(self._kept) > most:
            raise self._missing()

    def _missing(self) -> RecordingError:
        return RecordingError(
            f"rank 0 has not created a recording at {self.place}; give all ranks the same "
            "path, in a folder that they share"
        )

    def _give_up(self) -> None:
        self._kept.clear()
        if self.writer is not None:
            with suppress(Exception):  # on a full disk there may be room for a line
                self.writer.stopped(self._step, str(self._shield.failure))
            with suppress(Exception):  # the recording may be out of reach; it must not stay locked
                self.writer.close()


def _nothing(_: Path) -> None:
    return None
