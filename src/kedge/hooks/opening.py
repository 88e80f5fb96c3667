"""The two ways in: a session, and a hook with a session of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from kedge.flow import Schedule
from kedge.hooks.handle import Hooked
from kedge.hooks.session import Session


def session(*, strict: bool = False, on_error: Literal["raise", "warn"] = "raise") -> Session:
    """Open a session: ``with kedge.session() as s: s.hook(...)``; see `Session`."""
    return Session(strict=strict, on_error=on_error)


def hook(target: nn.Module | Tensor | Mapping[str, Tensor] | Any, *what: Any, when: Schedule | None = None) -> Hooked:
    """Attach one hook in a session of its own, at once; arguments and errors as in `Session.hook`.

    Use it as a block, or keep the handle and call its ``remove()``.
    """
    alone = Session()
    hooked = alone.hook(target, *what, when=when)
    return Hooked(alone, hooked.taps, hooked.actions, owns=True)
