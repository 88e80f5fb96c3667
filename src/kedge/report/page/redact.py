"""A recording without the details that readers of a page should not see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kedge.store.recording import Recording

Entry = Mapping[str, Any]

PLACES = ("file", "line")
OPERATION = ("site", "name", "value")


def shareable(recording: Recording, *, source: bool = True) -> Recording:
    """Return a recording without its folder and, on request, without the program's source.

    This precedes the rules, since their findings quote paths and source lines.

    Args:
        recording: The recording.
        source: Whether to keep source lines and their files, the folder of the script, the
            command's arguments, and the messages of errors.
    """
    named = replace(recording, path=Path(recording.path.name))
    return named if source else _without_source(named)


def _without_source(recording: Recording) -> Recording:
    # Only the name of the program is kept; its path may be of another operating system.
    script = os.path.basename(str(recording.manifest.get("script") or ""))  # noqa: PTH119
    return replace(
        recording,
        manifest={**recording.manifest, "command": None, "script": script},
        roots=tuple(
            replace(root, modules=tuple(map(_module, root.modules))) for root in recording.roots
        ),
        sites=tuple(replace(site, source=None) for site in recording.sites),
        events=tuple(map(_event, recording.events)),
    )


def _course(course: Entry) -> Entry:
    """Return the course of a step without the lines of the tensors held in it."""
    if not (tensors := course.get("tensors")):
        return course
    return {**course, "tensors": {**tensors, "line": [None] * len(tensors["line"])}}


def _module(entry: Entry) -> Entry:
    return {key: value for key, value in entry.items() if key not in PLACES}


def _event(event: Entry) -> Entry:
    if event.get("kind") == "saved" and "lines" in event:
        items = [
            {key: value for key, value in item.items() if key != "line"}
            for item in event.get("items", ())
        ]
        return {**event, "lines": [], "items": items, "course": _course(event.get("course", {}))}
    if event.get("kind") == "operation":
        kept = [
            {key: entry[key] for key in OPERATION if key in entry}
            for entry in event.get("operations", ())
        ]
        return {**event, "operations": kept}
    if event.get("kind") == "producer":
        return {key: value for key, value in event.items() if key not in (*PLACES, "text")}
    if event.get("kind") != "end" or not event.get("error"):
        return event
    return {**event, "error": str(event["error"]).partition(":")[0]}
