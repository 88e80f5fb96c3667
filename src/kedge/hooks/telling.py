"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

_OURS = str(Path(__file__).parents[1])


def warn(warning: Warning) -> None:
    """Give a warning at the innermost line outside of Kedge."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        level, frame = level + 1, frame.f_back
    warnings.warn(warning, stacklevel=level)
