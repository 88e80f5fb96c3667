"""Several hooks of a model under one handle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from kedge.hooks.handle import Hooked
from kedge.hooks.session import session


def hook_all(model: nn.Module, hooks: Iterable[tuple[Any, ...]]) -> Hooked[Any]:
    """Attach several hooks, all of them or none.

    Args:
        model: The model.
        hooks: A selector and its actions for each.

    Returns:
        The handle of them all.
    """
    together = session()
    taps: list[Any] = []
    actions: list[Any] = []
    try:
        for what in hooks:
            hooked = together.hook(model, *what)
            taps += hooked.taps
            actions += hooked.actions
    except BaseException:
        together.end(quiet=True)
        raise
    return Hooked(together, taps, tuple(actions), together.end)
