"""Writes the rows of a watched run, each after the sites and events that explain it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from kedge.actions.measure.meter import Meter
from kedge.flow import Sink
from kedge.store.columns import joined
from kedge.store.events import RunEvent
from kedge.watch.models.optimizers import Optimizers
from kedge.watch.models.roots import RootModule
from kedge.watch.records.curves import Curves


class StepSink(Sink, Protocol):
    """The sink of a watched run."""

    def sites(self, sites: list[dict[str, Any]], roots: list[dict[str, Any]]) -> None:
        """Receive the list of sites, whenever it has grown."""

    def event(self, event: RunEvent) -> None:
        """Receive one event."""


class MeterSink:
    """The meter's sink, which writes to the log; see `kedge.flow.Sink`.

    Args:
        log: Receives the records.
        meter: Has the entries of the sites.
        curves: Has the collected single numbers.
        roots: The models.
        optimizers: The program's optimizers.
        sources: Returns the line of the program by the path of a module, and what is known of a
            loss by its path.

    Attributes:
        notes: The events to write before the next rows.
    """

    def __init__(
        self,
        log: StepSink,
        meter: Meter,
        curves: Curves,
        roots: Sequence[RootModule],
        optimizers: Optimizers,
        sources: Callable[[], tuple[Mapping[str, Any], Mapping[str, Any]]],
    ) -> None:
        self.log, self.meter, self.curves = log, meter, curves
        self.roots, self.optimizers, self.sources = roots, optimizers, sources
        self.notes: list[RunEvent] = []
        self._written = (0, 0)

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write rows, together with the collected single numbers."""
        waiting = self.curves.take(step)
        if waiting is not None:
            columns = joined([{**columns, "step": np.full(len(columns["site"]), step)}, waiting])
        self._write(step, columns)

    def write_curves(self, step: int, *, wait: bool = False) -> None:
        """Write the collected single numbers of the steps up to one; with `wait` also those on their way from a device."""
        columns = self.curves.take(step, wait=wait)
        if columns is not None:
            self._write(int(columns["step"][-1]), columns)

    def _write(self, step: int, columns: Mapping[str, Any]) -> None:
        self.write_sites()
        self.write_notes()
        self.log.stats(step, columns)

    def write_sites(self, *, again: bool = False) -> None:
        """Write the list of sites if it has grown; with `again` in any case."""
        seats = self.meter.sites.seats.values()
        size = (
            len(seats) + sum(len(root.optimizers) for root in self.roots),
            self.meter.sites.wires,
        )
        if not seats or (size == self._written and not again):
            return
        self._written, (lines, losses) = size, self.sources()
        for root in self.roots:
            root.steps = max((self.optimizers.entries[i].steps for i in root.optimizers), default=0)
        self.log.sites(
            [_entry_of(seat, self.roots, lines, losses) for seat in seats],
            [root.entry() for root in self.roots],
        )

    def write_notes(self) -> None:
        """Write the events in `notes`."""
        while self.notes:
            self.log.event(self.notes.pop(0))

    def finish(self, step: int) -> None:
        """Write the rest at the end of a run whose last active step is `step`."""
        self.write_curves(step, wait=True)
        self.meter.finish()
        if self.roots and not self.meter.sites.seats:
            self.notes.clear()
        self.write_sites(again=True)  # the number of steps of each root is final now
        self.write_notes()


def _entry_of(
    seat: Any, roots: Sequence[RootModule], lines: Mapping[str, Any], losses: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entry of a site in the recording; see docs/reference/recording.md."""
    path, kind = seat.site.path, seat.site.kind
    entry = {
        "id": seat.id, "site": str(seat.site), "path": path, "kind": kind, "type": "", "root": -1,
        "shape": list(seat.shape), "dtype": seat.dtype, "channels": seat.channels, "from": list(seat.sources),
        "owner": "", "node": seat.node, "source": None,
    }  # fmt: skip
    if seat.spread is not None:
        entry |= {"copies": list(seat.spread.copies), "partial": seat.spread.partial}
    if kind == "loss":
        return {**entry, "site": path, **losses.get(path, {})}
    root = max((r for r in roots if _is_inside(path, r.prefix)), key=lambda r: len(r.prefix))
    of_param = kind.startswith("param") or kind == "update"
    owner = path.rpartition(".")[0] if of_param else path
    inner = owner[len(root.prefix) :].lstrip(".") if root.prefix else owner
    source = None if of_param else lines.get(path)
    return {
        **entry,
        "type": root.types.get(inner, ""),
        "root": root.index,
        "owner": owner,
        "source": source,
    }


def _is_inside(path: str, prefix: str) -> bool:
    """Whether a site's path belongs to a root with this prefix."""
    return not prefix or path == prefix or path.startswith(prefix + ".")
