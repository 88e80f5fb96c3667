"""Calling a model with one input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn


def run(model: nn.Module, given: Any) -> Any:
    """Return a model's output: a tuple or list holds its arguments, a dict its keyword arguments; else one argument."""
    if isinstance(given, Mapping):
        return model(**given)
    return model(*given) if isinstance(given, (tuple, list)) else model(given)
