"""The events of one rank, read again and again: each time only what is new. Needs no numpy."""

from __future__ import annotations

from pathlib import Path

from kedge.files.atomic_write import told
from kedge.json_input.reading import BadJson, read_regular
from kedge.store.events import RunEvent
from kedge.store.reading.json_files import damaged, is_there, read_event


class EventsReader:
    """A reader of the events; the last line may be incomplete."""

    def __init__(self, path: Path) -> None:
        self.events: list[RunEvent] = []
        self.torn = False
        self._path = path
        self._at = 0

    def read(self) -> bool:
        """Read the new lines; return whether there are any."""
        with told(f"read {self._path}"):
            if not is_there(self._path):
                return False
            *lines, rest = self._new().split(b"\n")
        first = len(self.events) + 1
        self.events += [
            read_event(self._path, number, line) for number, line in enumerate(lines, first)
        ]
        self._at += sum(len(line) + 1 for line in lines)
        self.torn = rest != b""
        return bool(lines)

    def _new(self) -> bytes:
        """Return the bytes that were added since the last call."""
        try:
            return read_regular(self._path, self._at)
        except BadJson as error:
            raise damaged(self._path, str(error)) from error
