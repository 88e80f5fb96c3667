"""The recording that a command reads: by its name with or without the suffix, or the newest one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.cli.parser import nearest
from kedge.cli.progress import progress
from kedge.errors import NewerFormat, NotARecording, RecordingError
from kedge.short_text import listed
from kedge.stderr import say

if TYPE_CHECKING:
    from kedge.store.recording import Recording

SUFFIX = ".kedge"
_MANIFEST = "manifest.json"


def add_recording(parser: argparse.ArgumentParser) -> None:
    """Add the argument that names a recording."""
    parser.add_argument(
        "recording",
        metavar="RUN",
        nargs="?",
        help=f"the recording, with or without {SUFFIX} (default: the newest one in this folder)",
    )


def is_recording(name: str) -> bool:
    """Whether a folder has the file that makes it a recording."""
    return os.path.isfile(os.path.join(name, _MANIFEST))


def recording_named(name: str | None, *, may_come: bool = False) -> str:
    """Return the path of the recording that was named; of the newest one here if none was.

    Args:
        name: What was typed.
        may_come: Whether a path without a recording is returned too, as a run may be about to
            begin.

    Raises:
        NotARecording: No such recording is there, and the message can name others.
    """
    if name is None:
        newest = _newest()
        say(f"reading {newest}, the newest recording here")
        return newest
    full = _with_suffix(name)
    if full == name and not is_recording(name) and not may_come:
        _must_be_near(name)
    return full


def expanded(names: Sequence[str]) -> list[str]:
    """Return what was typed, with the recordings in a folder instead of that folder, each once."""
    found: dict[str, str] = {}
    for name in names:
        for path in _inside(name) or [name]:
            found.setdefault(os.path.realpath(_with_suffix(path)), path)
    return list(found.values())


def _with_suffix(name: str) -> str:
    """Return the path of the recording that a name stands for, also of a damaged one."""
    if is_recording(name):
        return name
    full = name.rstrip(os.sep) + SUFFIX
    if is_recording(full) or (os.path.isdir(full) and not os.path.lexists(name)):
        return full
    return name


def _inside(folder: str) -> list[str]:
    """Return the paths of all recordings in a folder that is not one, in the order of their begin."""
    if is_recording(_with_suffix(folder)) or not os.path.isdir(folder):
        return []
    return [os.path.join(folder, found.name) for found in scanned(folder)]


def open_recording(name: str) -> Recording:
    """Read a recording; a large one takes seconds.

    Raises:
        RecordingError: It cannot be read.
    """
    from kedge.store.recording import Recording

    with progress(f"reading {name}"):
        return Recording.open(name)


@dataclass(frozen=True, order=True)
class FoundRecording:
    """A recording in a folder; those of a folder are sorted by the time at which they began.

    Attributes:
        began: That time, in nanoseconds.
        name: The name of its folder.
        whole: Whether it has a manifest. One that a crash or a copy has left without can be named,
            but not read.
    """

    began: int
    name: str
    whole: bool


def scanned(folder: str) -> list[FoundRecording]:
    """Return the recordings in a folder, in the order in which they began; none if the folder cannot be read.

    A folder counts by its suffix, even if it is damaged: then the user has to know. Without the
    suffix it counts by its manifest, since `kedge run -o NAME` gives it any name; other programs
    have files of the same name, so that is read. Folders whose names begin with a dot do not count:
    Kedge makes a recording in one of them before it gets its name.
    """
    with suppress(OSError):
        found = [_found(entry) for entry in os.scandir(folder)]
        return sorted(one for one in found if one is not None)
    return []


def _found(entry: os.DirEntry[str]) -> FoundRecording | None:
    if entry.name.startswith("."):
        return None
    with suppress(OSError):  # it may be removed meanwhile, or be another user's
        named = entry.name.endswith(SUFFIX)
        if is_recording(entry.path) and (named or _has_own_manifest(entry.path)):
            manifest = os.stat(os.path.join(entry.path, _MANIFEST))
            return FoundRecording(manifest.st_mtime_ns, entry.name, whole=True)
        if named and entry.is_dir():
            return FoundRecording(entry.stat().st_mtime_ns, entry.name, whole=False)
    return None


def _has_own_manifest(path: str) -> bool:
    """Whether the manifest in a folder is Kedge's, of this version or a newer one."""
    from kedge.store.reading.json_files import read_manifest

    try:
        read_manifest(Path(path))
    except NewerFormat:
        return True
    except RecordingError:
        return False
    return True


def _newest() -> str:
    found = _readable(os.curdir)
    if not found:
        raise NotARecording(
            f"no recording is named, and there is none in {os.getcwd()}: "
            "kedge run writes one; or name its folder"
        )
    return found[0]


def _must_be_near(name: str) -> None:
    """Refuse a path without a recording, if it is known which one may have been meant."""
    folder, last = os.path.split(name.rstrip(os.sep))
    known = _readable(folder or os.curdir)
    if os.path.isfile(name):
        own = [each for each in known if each.startswith(f"{last}.")]
        if own:
            raise NotARecording(
                f"{name} is not a recording: it is a file; its newest recording is {own[0]}"
            )
    elif known and not os.path.lexists(name):
        stems = {each.removesuffix(SUFFIX): each for each in known}
        near = nearest(last.removesuffix(SUFFIX), stems)
        where = f"in {folder}" if folder else "here"
        remedy = f"{where} there is {listed(known)}"
        if near:
            remedy = f"did you mean {os.path.join(folder, stems[near])}?"
        raise NotARecording(f"{name} is not a recording: there is no such folder; {remedy}")


def _readable(folder: str) -> list[str]:
    """Return the names of the recordings in a folder that can be read, the newest first."""
    return [found.name for found in reversed(scanned(folder)) if found.whole]
