"""Writes the rows of a watched run, each after the sites and events that explain it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from kedge.actions.measure.meter import Meter
from kedge.flow import Sink
from kedge.sites.site import OF_OPERATION, op_text
from kedge.store.columns import joined
from kedge.store.events import RunEvent
from kedge.watch.models.optimizers import Optimizers
from kedge.watch.models.roots import RootModule
from kedge.watch.records.curves import Curves


class StepSink(Sink, Protocol):
    """The sink of a watched run."""

    def sites(self, sites: Sequence[Mapping[str, Any]], roots: Sequence[Mapping[str, Any]]) -> None:
        """Receive the sites and roots, whenever there are more.

        `sites` is the same list if only the roots have changed.
        """

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
        self.log = log
        self.meter = meter
        self.curves = curves
        self.roots = roots
        self.optimizers = optimizers
        self.sources = sources
        self.notes: list[RunEvent] = []
        self._entries: list[dict[str, Any]] = []
        self._known = (0, 0, 0, 0)
        self._trained = 0

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Write rows, together with the collected single numbers."""
        waiting = self.curves.take(step)
        if waiting is not None:
            steps = np.full(len(columns["site"]), step)
            columns = joined([{**columns, "step": steps}, waiting])
        self._write(step, columns)

    def write_curves(self, step: int, *, wait: bool = False) -> None:
        """Write the collected single numbers of the steps up to one.

        With `wait` also those that are on their way from a device.
        """
        columns = self.curves.take(step, wait=wait)
        if columns is not None:
            self._write(int(columns["step"][-1]), columns)

    def _write(self, step: int, columns: Mapping[str, Any]) -> None:
        self.write_sites()
        self.write_notes()
        self.log.stats(step, columns)

    def write_sites(self) -> None:
        """Write the sites and roots if more is known of the sites."""
        if self._describe():
            self._write_roots()

    def _describe(self) -> bool:
        """Make the entries of new sites; return whether anything is to be written.

        If more is known of the old ones, all are made again.
        """
        table = self.meter.sites
        lines, losses = self.sources()
        known = (len(self.roots), table.wires, len(lines), len(losses))
        trained = sum(len(root.optimizers) for root in self.roots)
        if known != self._known:
            self._entries = []
        has_new = len(table.seats) != len(self._entries)
        if not table.seats or (not has_new and trained == self._trained):
            return False

        self._known = known
        self._trained = trained
        if has_new:
            seats = islice(table.seats.values(), len(self._entries), None)
            new = [_entry_of(seat, self.roots, lines, losses) for seat in seats]
            self._entries = [*self._entries, *new]
        return True

    def _write_roots(self) -> None:
        for root in self.roots:
            root.steps = self.optimizers.steps_of(root.optimizers)
        trained = [root for root in self.roots if root.optimizers and root.modules]
        are_several = len(trained) > 1
        entries = [root.entry(is_one_of_several=are_several) for root in self.roots]
        self.log.sites(self._entries, entries)

    def write_notes(self) -> None:
        """Write the events in `notes`."""
        while self.notes:
            self.log.event(self.notes.pop(0))

    def write_of_tensors(self, events: Sequence[RunEvent]) -> None:
        """Write the events of a program of tensors, which may have no site."""
        if events and not self._entries:
            self.log.sites([], [])
        for event in events:
            self.log.event(event)

    def finish(self, step: int) -> None:
        """Write the rest at the end of a run whose last active step is `step`."""
        self.write_curves(step, wait=True)
        self.meter.finish()
        if self.roots and not self.meter.sites.seats:
            self.notes.clear()
        self._describe()
        if self._entries:
            self._write_roots()  # the number of steps of each is final now
        self.write_notes()

    def release(self) -> None:
        """Drop the entries of all sites, when everything is written."""
        self._entries = []


def _entry_of(
    seat: Any, roots: Sequence[RootModule], lines: Mapping[str, Any], losses: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the entry of a site in the recording; see docs/reference/recording.md."""
    path = seat.site.path
    kind = seat.site.kind
    entry = {
        "id": seat.id,
        "site": str(seat.site),
        "path": path,
        "kind": kind,
        "type": "",
        "root": -1,
        "shape": list(seat.shape),
        "dtype": seat.dtype,
    }
    # What says no more than its default is left out: 10,000 modules have 90,000 sites.
    if seat.channels is not None:
        entry["channels"] = seat.channels
    if seat.sources:
        entry["from"] = list(seat.sources)
    if seat.node is not None:
        entry["node"] = seat.node
    if seat.spread is not None:
        entry["copies"] = list(seat.spread.copies)
        entry["partial"] = seat.spread.partial
    if seat.site.op is not None:
        path = op_text(seat.site.op)
        return {**entry, "path": path, "kind": f"{OF_OPERATION}{kind}", "owner": path}
    if kind == "loss":
        return {**entry, "site": path, "owner": "", **losses.get(path, {})}

    around = (root for root in roots if _is_inside(path, root.prefix))
    root = max(around, key=lambda root: len(root.prefix))
    of_param = kind.startswith("param") or kind in ("update", "state")
    owner = path.rpartition(".")[0] if of_param else path
    inner = owner.removeprefix(root.prefix).lstrip(".")
    entry["type"] = root.types.get(inner, "")
    entry["root"] = root.index
    if of_param:
        entry["owner"] = owner
    elif lines.get(path) is not None:
        entry["source"] = lines[path]
    return entry


def _is_inside(path: str, prefix: str) -> bool:
    """Whether a site's path belongs to a root with this prefix."""
    return not prefix or path == prefix or path.startswith(prefix + ".")
