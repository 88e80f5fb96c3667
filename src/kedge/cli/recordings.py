"""The recording that a command reads: by its name with or without the suffix, or the newest one."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kedge.cli.parser import nearest
from kedge.cli.progress import progress
from kedge.errors import NotARecording
from kedge.numbers import listed
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
    """Return the path of the recording that was named; of the newest one in this folder if none was.

    Args:
        name: What was typed.
        may_come: Whether a path without a recording is returned too, as a run may be about to begin.

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
    """Return what was typed, with the recordings in a folder instead of that folder, and each of them once."""
    found: dict[str, str] = {}
    for name in names:
        for path in _inside(name) or [name]:
            found.setdefault(os.path.realpath(_with_suffix(path)), path)
    return list(found.values())


def _with_suffix(name: str) -> str:
    """Return the path of the recording that a name stands for."""
    full = name.rstrip(os.sep) + SUFFIX
    return full if is_recording(full) and not is_recording(name) else name


def _inside(folder: str) -> list[str]:
    """Return the paths of all recordings in a folder that is not one itself, in the order in which they began."""
    if is_recording(_with_suffix(folder)) or not os.path.isdir(folder):
        return []
    found = []
    for name in os.listdir(folder):
        path = os.path.join(folder, name)
        if is_recording(path):
            found.append((os.stat(os.path.join(path, _MANIFEST)).st_mtime_ns, path))
        elif name.endswith(SUFFIX) and os.path.isdir(path):  # a damaged one
            found.append((os.stat(path).st_mtime_ns, path))
    return [path for _, path in sorted(found)]


def open_recording(name: str) -> Recording:
    """Read a recording; a large one takes seconds.

    Raises:
        RecordingError: It cannot be read.
    """
    from kedge.store.recording import Recording

    with progress(f"reading {name}"):
        return Recording.open(name)


def _newest() -> str:
    found = _recordings(os.curdir)
    if not found:
        raise NotARecording(
            f"no recording is named, and there is none in {os.getcwd()}: kedge run writes one; or name its folder"
        )
    return found[0]


def _must_be_near(name: str) -> None:
    """Refuse a path without a recording, if it is known which one may have been meant."""
    folder, last = os.path.split(name.rstrip(os.sep))
    known = _recordings(folder or os.curdir)
    if os.path.isfile(name):
        own = [each for each in known if each.startswith(f"{last}.")]
        if own:
            raise NotARecording(f"{name} is not a recording: it is a file; its newest recording is {own[0]}")
    elif known and not os.path.lexists(name):
        stems = {each.removesuffix(SUFFIX): each for each in known}
        near = nearest(last.removesuffix(SUFFIX), stems)
        where = f"in {folder}" if folder else "here"
        remedy = f"did you mean {os.path.join(folder, stems[near])}?" if near else f"{where} there is {listed(known)}"
        raise NotARecording(f"{name} is not a recording: there is no such folder; {remedy}")


def _recordings(folder: str) -> list[str]:
    """Return the names of the recordings in a folder, the newest first."""
    found = []
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    for name in names:
        manifest = os.path.join(folder, name, _MANIFEST)
        if name.endswith(SUFFIX) and os.path.isfile(manifest):
            found.append((os.stat(manifest).st_mtime_ns, name))
    return [name for _, name in sorted(found, reverse=True)]
