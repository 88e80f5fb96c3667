"""Keeping quiet what torch.compile would tell the program about hooks that are Kedge's."""

from __future__ import annotations

import re
import warnings

# The first is about a hook on all modules, the second about how Dynamo reads the functions of our hooks.
_MESSAGES = (
    r"Using `torch.compile\(module\)` when there are global hooks",
    r".*torch.autograd.function.Function.* should not be instantiated",
)


def hush() -> None:
    """Ignore warnings that the program can do nothing about."""
    for message in _MESSAGES:
        warnings.filterwarnings("ignore", message=message)


def unhush() -> None:
    """Ignore them no longer."""
    ours = [("ignore", re.compile(message, re.IGNORECASE), Warning, None, 0) for message in _MESSAGES]
    for entry in ours:
        if entry in warnings.filters:
            warnings.filters.remove(entry)  # type: ignore[attr-defined]  # a list, whatever its stub says
