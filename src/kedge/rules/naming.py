"""The names of modules, lines of the program, lists and figures in findings."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from kedge.rules.recorded.wiring import ModuleSites
from kedge.sites.site import escape

#: How many sites a list in the evidence names.
NAMED = 6


def name_of(module: ModuleSites) -> str:
    """Return the name of a module in a sentence: ``path (Type)``."""
    return name_at(module.path, module.type)


def name_at(path: str, kind: str) -> str:
    """Return the name of a module with a path and a type, either of which may be empty."""
    shown = escape(path)
    if path and kind and path != kind:
        return f"{shown} ({kind})"
    return shown or kind or "the model"


class Placed(Protocol):
    """What has a line of the program, if it is known."""

    @property
    def file(self) -> str | None:
        """The file."""

    @property
    def line(self) -> int | None:
        """The number of the line."""


def line_of(placed: Placed) -> str:
    """Return a line of the program as ``file:line``."""
    return f"{placed.file}:{placed.line}"


def quoted(text: str | None) -> str:
    """Return the text of a line for the end of a sentence; empty if it is not known."""
    if not text:
        return ""
    return f': "{text}"'


def plain(number: float) -> float | None:
    """Return a figure rounded to six digits for a finding's evidence; None for NaN and infinity, which JSON lacks."""
    if not np.isfinite(number):
        return None
    return float(f"{number:.6g}")
