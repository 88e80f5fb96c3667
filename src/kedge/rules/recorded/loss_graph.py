"""The operations behind a loss, as its autograd graph names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.frames import SourceLine
from kedge.sites.operation_names import recorded_names
from kedge.store.events import LossGraphEvent
from kedge.store.recording import Recording

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


@dataclass(frozen=True)
class LossPlace:
    """Where the loss of a graph is, as findings say it.

    Attributes:
        name: The site of the loss, with the line that calls backward: ``loss at train.py:12``.
        step: The step that the graph is of; -1 if that is not known.
        source: That line; None if it is not known.
    """

    name: str
    step: int
    source: SourceLine | None


def place_of(recording: Recording, event: LossGraphEvent) -> LossPlace:
    """Return where the loss of a graph is."""
    site = next((site for site in recording.sites if site.site == event.site), None)
    source = None
    name = event.site
    if site is not None and site.source:
        source = site.source
        name = f"{event.site} at {source}"
    step = -1
    if event.step is not None:
        step = event.step
    return LossPlace(name, step, source)


def operations(event: LossGraphEvent) -> list[str]:
    """Return the operations from a loss backwards."""
    return recorded_names(event.nodes)


def computing(names: Sequence[str]) -> list[str]:
    """Return the operations without those that only change the shape, the layout or the dtype."""
    return [name for name in names if name not in _RESHAPES]
