"""The program's own code, kept in a recording, so that a step can run again where the program is not."""

from __future__ import annotations

import sys
from pathlib import Path

from kedge.files.atomic_write import new_folder
from kedge.frames import is_between, is_installed

FOLDER = "sources"
_LARGEST = 2**20
"""Most characters of a file that is kept."""


def write_sources(recording: Path) -> None:
    """Write the script and the modules beside it that the program has imported, if that is not done yet.

    Raises:
        RecordingError: They cannot be written.
    """
    script = _file_of("__main__")
    folder = recording / FOLDER
    if script is None or folder.exists():
        return
    with new_folder(folder) as place:
        for name in [*sys.modules]:
            file = _file_of(name)
            if file is None or not file.is_relative_to(script.parent):
                continue
            text = file.read_text(encoding="utf-8", errors="replace")
            if len(text) <= _LARGEST:
                copy = place / file.relative_to(script.parent)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_text(text, encoding="utf-8")


def changed_since(recording: Path, script: Path) -> list[str]:
    """Return the files of a program that differ from those that a recording has, or are missing.

    Args:
        recording: The recording.
        script: The program's script; the others are beside it.
    """
    kept = recording / FOLDER
    changed = []
    for copy in sorted(kept.rglob("*.py")):
        name = copy.relative_to(kept)
        file = script.parent / name
        if not file.is_file() or file.read_text(
            encoding="utf-8", errors="replace"
        ) != copy.read_text(encoding="utf-8"):
            changed.append(str(name))
    return changed


def _file_of(name: str) -> Path | None:
    """Return the source of an imported module of the program's own; None if it has none."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if not isinstance(file, str) or not file.endswith(".py"):
        return None
    if is_between(file) or is_installed(file):
        return None
    path = Path(file).absolute()
    return path if path.is_file() else None
