"""The operations behind a loss, as its autograd graph names them."""

from __future__ import annotations

from collections.abc import Sequence

from kedge.sites.operation_names import recorded_names
from kedge.store.events import LossGraphEvent

_RESHAPES = frozenset(
    (
        "alias",
        "as_strided",
        "clone",
        "contiguous",
        "expand",
        "flatten",
        "index",
        "movedim",
        "permute",
        "reshape",
        "reshape_alias",
        "select",
        "slice",
        "split",
        "squeeze",
        "t",
        "to_copy",
        "transpose",
        "unbind",
        "unflatten",
        "unsafe_view",
        "unsqueeze",
        "view",
    )
)
"""Operations that return their input's values in another shape, layout or dtype."""


def operations(event: LossGraphEvent) -> list[str]:
    """Return the operations from a loss backwards."""
    return recorded_names(event.nodes)


def computing(names: Sequence[str]) -> list[str]:
    """Return the operations without those that only change the shape, the layout or the dtype."""
    return [name for name in names if name not in _RESHAPES]
