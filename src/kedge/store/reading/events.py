"""The events of one rank, read again and again: each time only what is new. Needs no numpy."""

from __future__ import annotations

import io
from pathlib import Path

from kedge.atomic_write import told
from kedge.store.reading.json_files import Document, event_from


class EventsReader:
    """A reader of the events; the last line may be incomplete."""

    def __init__(self, path: Path) -> None:
        self.events: list[Document] = []
        self.torn = False
        self._path = path
        self._at = 0

    def read(self) -> bool:
        """Read the new lines; return whether there are any."""
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
