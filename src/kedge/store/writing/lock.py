"""The lock of a recording's writers, which ends with the process, however that ends.

# Note [The lock]
Each writer of a recording holds a shared lock on one file in its folder; replacing the recording
takes an exclusive one. The operating system releases the lock when the process is gone, so a
killed run blocks no other. Readers ignore it. It is a lock of the open file (`flock`), which a
forked child shares, so the child closes the file at once. On a file system without locks, a
recording without an end counts as being written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import gethostname
from typing import Any

from kedge.errors import BeingWritten
from kedge.files.atomic_write import told
from kedge.files.file_lock import claim
from kedge.files.own_file import APPEND, OwnFile, write_all
from kedge.store.events import EndEvent
from kedge.store.reading.events import EventsReader
from kedge.store.reading.json_files import events_file

LOCK = "writers.lock"

_REPLACED = "cannot write to {}: another process has just replaced it; name another place"


def hold(folder: Path, rank: int) -> OwnFile:
    """Mark a recording as written by this process.

    The mark lasts until the returned file is closed or the process ends.

    Raises:
        BeingWritten: The folder was replaced meanwhile.
    """
    with told(f"start {folder / LOCK}"):
        file = _open(folder)
        claim(file, alone=False)
        if not _is_still(file, folder):
            file.close()
            raise BeingWritten(_REPLACED.format(folder))
        writer = {"rank": rank, "pid": os.getpid(), "host": gethostname()}
        write_all(file, (json.dumps(writer) + "\n").encode())
    return file


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep every other process from writing or replacing a recording during the block.

    Raises:
        BeingWritten: A running process is writing it, or replacing it.
    """
    with told(f"replace {folder}"), _open(folder) as file:
        answer = claim(file, alone=True)
        may_be_written = answer == "unknown" and not _has_ended(folder)
        if answer == "refused" or may_be_written or not _is_still(file, folder):
            raise BeingWritten(_message(folder))
        yield


def check_written(folder: Path) -> None:
    """Check that no process is writing a recording, without changing anything.

    Raises:
        BeingWritten: A running process is writing it.
    """
    if (folder / LOCK).exists():
        with alone(folder):
            pass


def writers(folder: Path) -> list[dict[str, Any]]:
    """Return the ``rank``, ``pid`` and ``host`` of each process that began to write a recording."""
    lines: list[str] = []
    with suppress(FileNotFoundError):  # nobody has begun, or the recording was replaced meanwhile
        lines = (folder / LOCK).read_text(encoding="utf-8").splitlines()
    found: list[dict[str, Any]] = []
    for line in lines:
        with suppress(ValueError):  # half a line: it is being written, or the disk was full
            found.append(json.loads(line))
    return found


def _open(folder: Path) -> OwnFile:
    try:
        return OwnFile(folder / LOCK, APPEND)
    except FileNotFoundError as error:
        raise BeingWritten(_REPLACED.format(folder)) from error


def _is_still(file: OwnFile, folder: Path) -> bool:
    """Whether a locked file is still the one in the folder, which may have been replaced meanwhile."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), (folder / LOCK).stat())
    except FileNotFoundError:
        return False


def _has_ended(folder: Path) -> bool:
    reader = EventsReader(folder / events_file(0))
    reader.read()
    return any(isinstance(event, EndEvent) for event in reader.events)


def _message(folder: Path) -> str:
    named = [f"process {writer['pid']} on {writer['host']}" for writer in writers(folder)]
    who = ", ".join(dict.fromkeys(named)) or "another process"
    return (
        f"cannot replace {folder}: it is being written by {who}; name another place, or wait "
        "for the end of that run (if that process is gone, remove the folder by hand)"
    )
