"""Paths that a user gives."""

from __future__ import annotations

import os
from pathlib import Path


def given_path(path: str | os.PathLike[str]) -> Path:
    """Return a path that a user gave, where ``~`` and ``~name`` at the beginning are home folders, as in a shell."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 - `Path.expanduser` raises an error for a user who does not exist
