"""How findings name modules and figures."""

from __future__ import annotations

import numpy as np

from kedge.rules.wiring import Module

#: How many sites a list in the evidence names.
NAMED = 6


def name_of(module: Module) -> str:
    """Name a module in a sentence."""
    if module.path and module.type and module.path != module.type:
        return f"{module.path} ({module.type})"
    return module.path or module.type or "the model"


def plain(number: float) -> float | None:
    """Round a figure to six digits for a finding's evidence; None in place of what JSON cannot hold."""
    return float(f"{number:.6g}") if np.isfinite(number) else None
