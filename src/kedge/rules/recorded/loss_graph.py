"""The operations behind a loss, as its autograd graph names them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.frames import SourceLine
from kedge.rules.evidence import Evidence, unsaid
from kedge.rules.recorded.optimizers import events_of
from kedge.sites.operation_names import recorded_name, recorded_names
from kedge.store.events import LossGraphEvent, LossLinesEvent
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


@dataclass(frozen=True, kw_only=True)
class LossEvidence(Evidence):
    """What every finding about the operations of a loss has.

    Attributes:
        made_at: The program's line of the operation that has the fault.
    """

    made_at: SourceLine | None = unsaid(unless=None)

    def culprit(self) -> SourceLine | None:
        """Return the line of the operation that has the fault."""
        return self.made_at


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


def line_at(recording: Recording, event: LossGraphEvent, place: int) -> SourceLine | None:
    """Return the program's line of one of the nodes of a graph; None if it is not known."""
    for lines in events_of(recording, LossLinesEvent):
        chain = lines.operations[: len(event.nodes)]
        if lines.site == event.site and tuple(each.node for each in chain) == event.nodes:
            return chain[place].source
    return None


def line_of_loss(recording: Recording, site: str) -> SourceLine | None:
    """Return the program's line that computes a loss, by its site; None if it is not known."""
    for lines in events_of(recording, LossLinesEvent):
        if lines.site == site and lines.operations:
            return lines.operations[0].source
    return None


def line_of_result(
    recording: Recording, event: LossGraphEvent, operation: str, shape: Sequence[int]
) -> SourceLine | None:
    """Return the program's line of the operation behind a loss whose result has a shape.

    None if it is not known, or if there are several such operations.
    """
    found = set()
    for lines in events_of(recording, LossLinesEvent):
        if lines.site == event.site:
            for each in lines.operations:
                if recorded_name(each.node) == operation and each.shape == tuple(shape):
                    found.add(each.source)
    if len(found) != 1:
        return None
    return found.pop()


def operations(event: LossGraphEvent) -> list[str]:
    """Return the operations from a loss backwards."""
    return recorded_names(event.nodes)


def computing(names: Sequence[str]) -> list[str]:
    """Return the operations without those that only change the shape, the layout or the dtype."""
    return [name for name in names if name not in _RESHAPES]
