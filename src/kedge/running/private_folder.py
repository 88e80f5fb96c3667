"""A temporary folder for one user alone."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self

_LONGEST = 80
"""Most characters of its path: that of a socket inside may have 107."""


class PrivateFolder:
    """A temporary folder that one user alone can open; it is removed at the end of a ``with`` block.

    Args:
        owner: The user and the group to whom it belongs. Only root can give it to somebody else.
    """

    def __init__(self, owner: tuple[int, int]) -> None:
        self.owner = owner
        self.path = Path()

    def __enter__(self) -> Self:
        around = tempfile.gettempdir()
        if len(around) > _LONGEST:
            around = "/tmp"  # noqa: S108
        self.path = Path(tempfile.mkdtemp(prefix="kedge-", dir=around))
        self.own(self.path)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def own(self, path: Path) -> None:
        """Set the owner of a file in here, or of the folder, to `owner`."""
        if self.owner != (os.geteuid(), os.getegid()):
            os.chown(path, *self.owner, follow_symlinks=False)

    def write(self, name: str, text: str) -> Path:
        """Write a file that only its owner can read."""
        path = self.path / name
        path.touch(mode=0o600, exist_ok=False)
        path.write_text(text, encoding="utf-8")
        self.own(path)
        return path
