"""How a model is called with what was given as one input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def run(model: nn.Module, given: Any) -> Any:
    """Call a model: a tuple or list holds its arguments, a dict those by keyword, anything else is its one argument."""
    if isinstance(given, Mapping):
        return model(**given)
    return model(*given) if isinstance(given, (tuple, list)) else model(given)
