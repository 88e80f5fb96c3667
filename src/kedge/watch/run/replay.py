"""Passes a recording to a sink as if its run were active."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import numpy as np

from kedge.rules.project_config import configured_rules
from kedge.rules.registry import check
from kedge.store.columns import BINARY, COLUMNS
from kedge.store.recording import Recording, SiteInfo
from kedge.watch.run.sinks import RunSink, entry_of


def replay(recording: Recording | str | os.PathLike[str], sink: RunSink) -> None:
    """Pass everything in a recording to a sink, step by step, and then the findings of the rules.

    Args:
        recording: The recording, or its path; its run may still be active.
        sink: Gets the sites, the steps and the events, and is closed.
    """
    if not isinstance(recording, Recording):
        recording = Recording.open(recording)
    try:
        _pass_on(recording, sink)
    finally:
        sink.close()


def _pass_on(recording: Recording, sink: RunSink) -> None:
    sink.sites(
        [_entry(site) for site in recording.sites],
        [
            {"name": root.name, "prefix": root.prefix, "parameters": root.parameters}
            for root in recording.roots
        ],
    )
    columns = _columns(recording)
    steps, order = columns["step"], np.argsort(columns["step"], kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(steps[order])) + 1):
        if len(part):
            sink.stats(
                int(steps[part[0]]),
                {name: _selected(values, part) for name, values in columns.items()},
            )
    for event in recording.events:
        sink.event(event.entry())
    for finding in check(recording, configured_rules()):
        sink.event(entry_of(finding))


def _columns(recording: Recording) -> dict[str, Any]:
    """Return all rows as columns, with the rows of one site and step merged."""
    each = [(site.id, recording.rows(site)) for site in recording.sites]
    columns: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, dtype), *(getattr(rows, name) for _, rows in each)])
        for name, (dtype, _) in COLUMNS.items()
        if name != "site"
    }
    columns["site"] = np.repeat([i for i, _ in each], [len(rows) for _, rows in each])
    return columns | {
        name: [held for _, rows in each for held in getattr(rows, name)] for name in BINARY
    }


def _selected(values: Any, part: Any) -> Any:
    return [values[i] for i in part.tolist()] if isinstance(values, list) else values[part]


def _entry(site: SiteInfo) -> dict[str, Any]:
    entry = asdict(site)
    return entry | {"from": list(entry.pop("sources")), "shape": list(site.shape)}
