"""What a watched program gives, written to disk; the program never suffers from the writing."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedge.cli.program import Program
from kedge.errors import RecordingError, RecordingExists

if TYPE_CHECKING:
    from kedge.store.folder import RecordingWriter


def check_place(name: str, force: bool) -> None:
    """See whether a recording can be written here, before anything else happens.

    Raises:
        RecordingExists: Something is there, and may not be replaced.
        RecordingError: The folder it is to be in is not there.
    """
    place = Path(name)
    if not place.absolute().parent.is_dir():
        raise RecordingError(f"cannot write {name}: there is no folder {place.parent}; make it, or choose another -o")
    if not os.path.lexists(place):
        return
    if not (place / "manifest.json").is_file():
        raise RecordingExists(f"cannot write {name}: it exists and is not a recording; choose another name with -o")
    if not force:
        raise RecordingExists(f"cannot write {name}: it exists; --force replaces it, -o chooses another name")


class Recorder:
    """Takes what was seen to disk.

    The recording begins with the first step: by then the device is known, and a program that
    calls no model leaves nothing behind. When the disk refuses, the program runs on unrecorded.
    """

    def __init__(self, place: Path, manifest: Mapping[str, Any], force: bool, complain: Callable[[str], None]) -> None:
        self.place, self.manifest, self.force, self.complain = place, manifest, force, complain
        self.writer: RecordingWriter | None = None
        self.failed = False

    def sites(self, sites: Sequence[Mapping[str, Any]], roots: Sequence[Mapping[str, Any]]) -> None:
        """Write which sites there are; the first call makes the recording."""
        self._attempt(lambda: self._begun().sites(sites, roots))

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write the statistics of one step."""
        self._attempt(lambda: self._begun().stats(step, columns))

    def event(self, event: Mapping[str, Any]) -> None:
        """Write a note, if there is a recording."""
        writer = self.writer
        if writer is not None:
            self._attempt(lambda: writer.event(event))

    def close(self) -> None:
        """End the recording."""
        if self.writer is not None:
            self._attempt(self.writer.close)

    def _begun(self) -> RecordingWriter:
        if self.writer is None:
            from kedge.store.folder import create

            self.writer = create(self.place, {**self.manifest, **_surroundings()}, force=self.force)
        return self.writer

    def _attempt(self, write: Callable[[], None]) -> None:
        if self.failed:
            return
        try:
            write()
        except Exception as error:  # noqa: BLE001 - whatever the disk does, it must not end somebody's training
            self.failed = True
            self.complain(f"writing failed: {error}; the program goes on, but is not recorded from here on")


def manifest_of(program: Program, sites: str, every: int) -> dict[str, Any]:
    """Describe a run before it begins, in the words of ``manifest.json``."""
    return {
        "kedge": metadata.version("kedge"),
        "command": program.command,
        "script": program.target,
        "python": platform.python_version(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "pid": os.getpid(),
        "every": every,
        "sites": sites,
        "rank": int(os.environ.get("RANK", "0")),
        "world": int(os.environ.get("WORLD_SIZE", "1")),
    }


def _surroundings() -> dict[str, str]:
    """Name torch's version and the device in use.

    Asking whether there is a device would start it, and spoil later forks; what is in use has been started.
    """
    import torch

    device = "mps" if torch.backends.mps.is_available() else "cpu"
    if torch.cuda.is_initialized():
        device = f"cuda ({torch.cuda.get_device_name()})"
    elif torch.xpu.is_initialized():
        device = "xpu"
    return {"torch": torch.__version__, "device": device}
