"""The files that a program opens for writing while it is examined."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

_WRITING = os.O_WRONLY | os.O_RDWR
_UNTOLD = (f"{os.sep}dev{os.sep}", f"{os.sep}proc{os.sep}")


class WrittenFiles:
    """Notes each file that is opened for writing, by Python's audit events and `torch.save`.

    Attributes:
        saves: Whether `torch.save` still writes.
    """

    def __init__(self) -> None:
        self._paths: dict[str, None] = {}
        self._plain: Any = torch.save
        self.saves = True

    def install(self) -> None:
        """Note files from now on; a hook for audit events stays until the process ends."""
        sys.addaudithook(self._heard)
        torch.save = self._save

    def named(self) -> list[str]:
        """Return the files that are still there, relative to the current folder if they are inside."""
        here = f"{Path.cwd()}{os.sep}"
        return [path.removeprefix(here) for path in self._paths if Path(path).exists()]

    def _save(self, obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            if not self.saves:
                return None
            self._note(os.fspath(f))  # written by C++, without an event
        return self._plain(obj, f, *args, **kwargs)

    def _heard(self, event: str, args: tuple[Any, ...]) -> None:
        if event != "open":
            return
        path, mode, flags = args
        is_written = bool({*"wax+"}.intersection(mode or "")) or bool(flags & _WRITING)
        if is_written and isinstance(path, str | bytes | os.PathLike):
            self._note(os.fsdecode(path))

    def _note(self, path: str) -> None:
        full = str(Path(path).absolute())
        is_bytecode = "__pycache__" in full or full.endswith(".pyc")
        if not full.startswith(_UNTOLD) and not is_bytecode:
            self._paths[full] = None
