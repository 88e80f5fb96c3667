"""How files reach the disk: whole, and with an error that says what to do."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kedge.errors import RecordingError

_ADVICE = {
    errno.ENOSPC: "free some space there, or record to another disk",
    errno.EDQUOT: "free some of your quota, or record to another disk",
    errno.ENOENT: "make the folder it is to be in, or name another place",
    errno.ENOTDIR: "name a place that is inside a folder",
    errno.EACCES: "name a place you have the right to use",
    errno.EPERM: "name a place you have the right to use",
    errno.EROFS: "name a place on a disk that is not read-only",
    errno.ESTALE: "leave the folder alone while it is being written",
}


@contextmanager
def told(what: str) -> Iterator[None]:
    """Turn what the operating system refuses into a RecordingError that says what to do."""
    try:
        yield
    except RecordingError:  # one of them is an OSError too, and has been told
        raise
    except OSError as error:
        cause = error.strerror or str(error)
        advice = _ADVICE.get(error.errno or 0, "see that the disk can be used, or name another place")
        raise RecordingError(f"cannot {what}: {cause}; {advice}") from error


def write_all(file: io.FileIO, content: bytes | memoryview) -> None:
    """Write to an unbuffered file, which may take a part at a time.

    A file that somebody has removed would take everything in and keep nothing, so that is an error.
    """
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]
    if not os.fstat(file.fileno()).st_nlink:
        raise OSError(errno.ESTALE, "it was removed while it was being written")


def replace(path: Path, text: str) -> None:
    """Write a small file so that a reader sees the old one or the new one, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with told(f"write {path}"):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
