"""Looking through what passes a gate: values of the user's classes may refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from kedge.errors import ActionDisabled

if TYPE_CHECKING:
    from kedge.hooks.gates.modules import Gate

Found = list[tuple[str, Tensor]]


def look_through(gate: Gate, find: Callable[..., Found], *what: Any) -> Found:
    """Find the tensors in a value.

    Args:
        gate: Where it passes.
        find: What looks.
        what: What it looks through.

    Raises:
        Exception: Whatever the value raises, if the session raises failures; else that is told once, and nothing is found.
    """
    try:
        return find(*what)
    except Exception as error:
        if gate.session.on_error == "raise":
            raise
        if gate.empty is None:
            gate.empty = f"it cannot be looked through: {type(error).__name__}: {error}"
            gate.session.complain(ActionDisabled(f"{gate.path}:{gate.kinds[0]} is not seen: {gate.empty}"))
        return []
