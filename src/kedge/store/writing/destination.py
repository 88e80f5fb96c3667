"""Where a recording may be made: at a free place, or in place of an old recording."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

from kedge.errors import RecordingError, RecordingExists
from kedge.files.atomic_write import told
from kedge.store.reading.json_files import MANIFEST
from kedge.store.writing.lock import alone, check_written


def check_place(path: str | os.PathLike[str], force: bool) -> None:
    """Check that a recording can be made at this place, without changing anything.

    Args:
        path: The folder to make.
        force: Whether an old recording may be replaced.

    Raises:
        RecordingExists: A recording is there and may not be replaced, or something else is there.
        BeingWritten: The recording that is there is being written.
        RecordingError: The parent folder does not exist, or may not be written to.
    """
    folder = Path(path)
    parent = folder.absolute().parent
    if not parent.is_dir():
        raise RecordingError(
            f"cannot create the recording {folder}: there is no folder {folder.parent}; "
            "create it, or name another place"
        )
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RecordingError(
            f"cannot create the recording {folder}: {parent} is not writable; "
            "name a folder that you can write to"
        )
    _check_way(folder, force)


def put(fresh: Path, folder: Path, force: bool) -> None:
    """Move a finished folder to the place of the recording.

    An old recording there is replaced if ``force`` is set. A reader sees the old recording or the
    new one; of two processes that do this at once, one succeeds.

    Raises:
        RecordingExists: A recording is there and may not be replaced, or something else is there.
        BeingWritten: The recording that is there is being written.
        RecordingError: The old recording cannot be removed.
    """
    _check_way(folder, force)
    if not os.path.lexists(folder):
        _move(fresh, folder)
        return
    old = fresh.with_name(fresh.name + ".old")
    with alone(folder):
        with told(f"remove the old recording {folder}"):
            folder.rename(old)
        try:
            _move(fresh, folder)
        except RecordingExists:  # another process has replaced it meanwhile
            shutil.rmtree(old)
            raise
        except RecordingError:
            old.rename(folder)
            raise
    with told(f"remove the old recording {old}"):
        shutil.rmtree(old)


def _move(fresh: Path, folder: Path) -> None:
    try:
        with told(f"create the recording {folder}"):
            fresh.rename(folder)
    except RecordingError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and cause.errno in {errno.ENOTEMPTY, errno.EEXIST}:
            raise RecordingExists(
                f"cannot create the recording {folder}: another process has just created one "
                "there; name another place"
            ) from error
        raise


def _check_way(folder: Path, force: bool) -> None:
    if not os.path.lexists(folder):
        return
    if not _is_recording(folder):
        raise RecordingExists(
            f"cannot create the recording {folder}: something that is not a recording is there "
            "and is left alone; name another place"
        )
    if not force:
        raise RecordingExists(
            f"cannot create the recording {folder}: there is one already; "
            "name another place, or replace it with --force (in code: force=True)"
        )
    check_written(folder)


def _is_recording(folder: Path) -> bool:
    """Whether a path is a folder, not a link to one, with a manifest that names a format."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and "format" in manifest
