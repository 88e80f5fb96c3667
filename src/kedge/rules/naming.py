"""The names of modules, lines of the program, lists and figures in findings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    return f"{shown} ({kind})" if path and kind and path != kind else shown or kind or "the model"


def line_of(source: Mapping[str, Any]) -> str:
    """Return a line of the program as ``file:line``."""
    return f"{source['file']}:{source['line']}"


def text_of(source: Mapping[str, Any]) -> str:
    """Return the text of a line for the end of a sentence; empty if it is not known."""
    return f': "{source["text"]}"' if source.get("text") else ""


def plain(number: float) -> float | None:
    """Return a figure rounded to six digits for a finding's evidence; None for NaN and infinity, which JSON lacks."""
    return float(f"{number:.6g}") if np.isfinite(number) else None
