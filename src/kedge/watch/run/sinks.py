"""The data of a watched run, passed to several sinks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from kedge.rules.rule import Finding
from kedge.stderr import Shield
from kedge.store.columns import BINARY, COLUMNS
from kedge.store.events import RunEvent
from kedge.store.rows import Rows
from kedge.watch.run.recorder import RecordingSink

Columns = Mapping[str, Any]
Entries = Sequence[Mapping[str, Any]]


class RunSink(Protocol):
    """Receives the data of a watched run: during the run, or later from its recording."""

    def sites(self, sites: Entries, roots: Entries) -> None:
        """Receive the sites and roots, in the form of ``sites.json``; called again when there are more."""

    def stats(self, step: int, columns: Columns) -> None:
        """Receive the statistics of one step: one array for each column, one row for each site."""

    def event(self, event: Mapping[str, Any]) -> None:
        """Receive a line of ``events.jsonl``, or a finding: its fields, and ``"kind": "finding"``."""

    def close(self) -> None:
        """Called at the end of the run."""


class Sinks:
    """Passes the same data to the recorder and to further sinks.

    A sink that fails is reported and gets nothing more. Findings are searched for as soon as
    something is not finite, and at the end.
    """

    def __init__(
        self, recorder: RecordingSink, sinks: Iterable[RunSink], complain: Callable[[str], None]
    ) -> None:
        self.recorder = recorder
        self._shields = [
            (sink, Shield(type(sink).__name__, "it receives no more data", tell=complain))
            for sink in sinks
        ]
        self.find: Callable[[], Sequence[Finding]] = tuple
        self._spoiled = False
        self._reported: set[tuple[str, ...]] = set()

    def sites(self, sites: Entries, roots: Entries) -> None:
        """Pass on the sites and roots."""
        self.recorder.sites(sites, roots)
        self._each(lambda sink: sink.sites(sites, roots))

    def stats(self, step: int, columns: Columns) -> None:
        """Pass on the statistics of a step, or of several; each sink gets them step by step."""
        self.recorder.stats(step, columns)
        if not self._shields:
            return
        for number, part in by_step(step, columns):
            self._each(partial(_send_stats, number, part))
        if not self._spoiled and not rows_of(step, columns).clean.all():
            self._spoiled = True
            self._report_findings()

    def event(self, event: RunEvent) -> None:
        """Pass on an event."""
        self.recorder.event(event)
        if self._shields:
            self._each(partial(_send_event, event.entry()))

    def close(self) -> None:
        """Pass on the findings, and close all sinks."""
        self.recorder.close()
        if self._shields:
            self._report_findings()
        self._each(lambda sink: sink.close())

    def _report_findings(self) -> None:
        for finding in self.find():
            known = (finding.code, finding.site, finding.severity)
            if known not in self._reported:
                self._reported.add(known)
                self._each(partial(_send_event, entry_of(finding)))

    def _each(self, send: Callable[[RunSink], None]) -> None:
        for sink, shield in self._shields:
            shield(send, sink)


def by_step(step: int, columns: Columns) -> Iterator[tuple[int, Columns]]:
    """Yield the rows of each step: all are of `step` unless there is a column ``step``."""
    if "step" not in columns:
        yield step, columns
        return
    steps = np.asarray(columns["step"])
    for number in np.unique(steps):
        chosen = np.flatnonzero(steps == number)
        part = {name: selected(column, chosen) for name, column in columns.items()}
        del part["step"]
        yield int(number), part


def selected(column: Any, chosen: np.ndarray[Any, Any]) -> Any:
    """Return some rows of a column, which is a list if it holds bytes."""
    if isinstance(column, list):
        return [column[i] for i in chosen.tolist()]
    return np.asarray(column)[chosen]


def _send_stats(step: int, columns: Columns, sink: RunSink) -> None:
    sink.stats(step, columns)


def _send_event(line: Mapping[str, Any], sink: RunSink) -> None:
    sink.event(line)


def entry_of(finding: Finding) -> dict[str, Any]:
    """Return the event that passes a finding to a sink."""
    return {"kind": "finding", **finding.entry()}


def rows_of(step: int, columns: Columns) -> Rows:
    """Return the columns of one step as rows, one for each site; missing columns count as not measured."""
    count = len(columns["site"])
    nothing = (b"",) * count
    held = {name: _column(name, columns, count) for name in COLUMNS if name != "site"}
    held["step"] = np.full(count, step, dtype=np.int64)
    for name in BINARY:
        held[name] = tuple(columns.get(name, nothing))
    return Rows(**held)


def _column(name: str, columns: Columns, count: int) -> Any:
    dtype, default = COLUMNS[name]
    if name not in columns:
        return np.full(count, default, dtype=dtype)
    values = np.asarray(columns[name])
    wide = np.float64 if values.dtype.kind == "f" else np.int64
    return values.astype(wide, copy=False)
