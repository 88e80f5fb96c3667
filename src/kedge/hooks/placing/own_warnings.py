"""Silences warnings of PyTorch to the program that Kedge's own hooks cause."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

# The first is about hooks on all modules, the second about how Dynamo reads the functions of our hooks.
_GLOBAL_HOOKS = r"Using `torch.compile\(module\)` when there are global hooks"
_MESSAGES = (
    _GLOBAL_HOOKS,
    r".*torch.autograd.function.Function.* should not be instantiated",
)
ANOMALY_WARNINGS = (r"Error detected in ", r"\s*Previous calculation was induced by ")
"""The warnings of a backward pass that raises while autograd records the stack of each operation."""


_Filter = tuple[str, re.Pattern[str], type[Warning], None, int]


def ignore_warnings(messages: Sequence[str] = _MESSAGES) -> None:
    """Ignore warnings that the program can do nothing about.

    `warnings.filterwarnings` would make Python forget which of the program's own warnings it has printed already.
    """
    warnings.filters[:0] = _filters(messages)  # type: ignore[index]  # a list, whatever its stub says


def show_warnings(messages: Sequence[str] = _MESSAGES) -> None:
    """Stop ignoring these warnings."""
    for entry in _filters(messages):
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]


class IgnoredOfGlobalHooks:
    """Ignores PyTorch's warning about hooks on all modules, until it is removed."""

    def __init__(self) -> None:
        self._on = False
        self.back()

    def back(self) -> None:
        """Ignore the warning."""
        if not self._on:
            ignore_warnings((_GLOBAL_HOOKS,))
            self._on = True

    def out(self) -> None:
        """Show it."""
        if self._on:
            self._on = False
            show_warnings((_GLOBAL_HOOKS,))

    def remove(self) -> None:
        """Show it."""
        self.out()


def _filters(messages: Sequence[str]) -> list[_Filter]:
    return [("ignore", re.compile(message, re.IGNORECASE), Warning, None, 0) for message in messages]
