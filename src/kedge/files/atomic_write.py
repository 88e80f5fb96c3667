"""Writing of complete files, with errors that say what to do."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kedge.errors import RecordingError

_ADVICE = {
    errno.ENOSPC: "free some space there, or record to another disk",
    errno.EDQUOT: "free some of your quota, or record to another disk",
    errno.ENOENT: "create the folder first, or name another place",
    errno.ENOTDIR: "name a place that is inside a folder",
    errno.EACCES: "check the permissions, or name another place",
    errno.EPERM: "check the permissions, or name another place",
    errno.EROFS: "name a place on a disk that is not read-only",
    errno.EBADF: "do not move or remove it, and let the program close only files that it opened itself",
    errno.ESTALE: "leave the folder alone while it is being written",
}


@contextmanager
def told(what: str, then: str = "") -> Iterator[None]:
    """Context that turns errors of the operating system into a RecordingError that says what to do.

    Args:
        what: What is done, such as "write x.json".
        then: What to do after the remedy; none if empty.
    """
    try:
        yield
    except RecordingError:  # a subclass is an OSError too, and already has its message
        raise
    except OSError as error:
        cause = error.strerror or str(error)
        advice = _ADVICE.get(error.errno or 0, "check the disk, or name another place")
        raise RecordingError(
            f"cannot {what}: {cause}; {advice}" + (f"; {then}" if then else "")
        ) from error


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Context that makes a folder so that it has all of its files or does not exist.

    Yields another folder to write them into, which gets the name at the end.

    Raises:
        RecordingError: It cannot be written.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    with told(f"write {folder}"):
        try:
            temporary.mkdir()
            yield temporary
            temporary.replace(folder)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise


def replace(path: Path, text: str) -> None:
    """Write a small file so that readers see the old contents or the new ones, never a part.

    Raises:
        RecordingError: The file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with told(f"write {path}"):
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
