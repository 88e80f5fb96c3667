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
from kedge.watch.run.sinks import RunSink, entry_of, selected


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
    roots = [
        {
            "name": root.name,
            "type": root.type,
            "prefix": root.prefix,
            "parameters": root.parameters,
        }
        for root in recording.roots
    ]
    sink.sites([_entry(site) for site in recording.sites], roots)

    columns = _columns(recording)
    steps = columns["step"]
    order = np.argsort(steps, kind="stable")
    for part in np.split(order, np.flatnonzero(np.diff(steps[order])) + 1):
        if len(part):
            rows = {name: selected(values, part) for name, values in columns.items()}
            sink.stats(int(steps[part[0]]), rows)

    for event in recording.events:
        sink.event(event.entry())
    for finding in check(recording, configured_rules()):
        sink.event(entry_of(finding))


def _columns(recording: Recording) -> dict[str, Any]:
    """Return all rows as columns, with the rows of one site and step merged."""
    every = [recording.rows(site) for site in recording.sites]
    columns: dict[str, Any] = {}
    for name, (dtype, _) in COLUMNS.items():
        if name == "site":
            numbers = [site.id for site in recording.sites]
            columns[name] = np.repeat(numbers, [len(rows) for rows in every])
        else:
            empty = np.zeros(0, dtype)
            columns[name] = np.concatenate([empty, *(getattr(rows, name) for rows in every)])
    for name in BINARY:
        columns[name] = [held for rows in every for held in getattr(rows, name)]
    return columns


def _entry(site: SiteInfo) -> dict[str, Any]:
    entry = asdict(site)
    return entry | {"from": list(entry.pop("sources")), "shape": list(site.shape)}
