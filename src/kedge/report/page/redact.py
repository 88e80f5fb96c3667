"""A recording without the details that readers of a page should not see."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from kedge.frames import SourceLine
from kedge.store.events import (
    BadOperation,
    EndEvent,
    OperationsEvent,
    ProducerEvent,
    RunEvent,
    SavedEvent,
    TensorGraphEvent,
)
from kedge.store.recording import Recording
from kedge.store.saved_account import BytesOverStep

Entry = Mapping[str, Any]


def shareable(recording: Recording, *, source: bool = True) -> Recording:
    """Return a recording without its folder and, on request, without the program's source.

    This precedes the rules, since their findings quote paths and source lines.

    Args:
        recording: The recording.
        source: Whether to keep source lines and their files, the folder of the script, the
            command's arguments, and the messages of errors.
    """
    recording = replace(recording, path=Path(recording.path.name))
    if source:
        return recording

    # Only the name of the program is kept; its path may be of another operating system.
    script = os.path.basename(str(recording.manifest.get("script") or ""))  # noqa: PTH119
    roots = []
    for root in recording.roots:
        modules = [_without(entry, "file", "line") for entry in root.modules]
        roots.append(replace(root, modules=tuple(modules)))
    return replace(
        recording,
        manifest={**recording.manifest, "command": None, "script": script},
        roots=tuple(roots),
        sites=tuple(replace(site, source=None) for site in recording.sites),
        events=tuple(map(_event, recording.events)),
    )


def _without(entry: Entry, *keys: str) -> Entry:
    return {key: value for key, value in entry.items() if key not in keys}


def _event(event: RunEvent) -> RunEvent:
    if isinstance(event, SavedEvent):
        items = tuple(_without(item, "line") for item in event.items)
        return replace(event, lines=(), items=items, course=_course(event.course))
    if isinstance(event, OperationsEvent):
        kept = tuple(
            BadOperation(site=made.site, name=made.name, value=made.value)
            for made in event.operations
        )
        return replace(event, operations=kept)
    if isinstance(event, ProducerEvent):
        among = tuple(replace(possible, file=None, line=None) for possible in event.among)
        return replace(event, file=None, line=None, function=None, text=None, among=among)
    if isinstance(event, TensorGraphEvent):
        hooks = [replace(hook, owner=_without_place(hook.owner)) for hook in event.hooks]
        event = replace(event, hooks=tuple(hooks))
    if isinstance(event, EndEvent) and event.error:
        event = replace(event, error=event.error.partition(":")[0])
    without: RunEvent = _without_lines(event)
    return without


def _without_place(owner: str) -> str:
    """Return the owner of a hook, unless that is a file and line."""
    if ":" in owner:
        return "the program"
    return owner


def _without_lines(value: Any) -> Any:
    """Return a part of an event without the program's lines in it."""
    if isinstance(value, tuple):
        return tuple(_without_lines(each) for each in value if not isinstance(each, SourceLine))
    if not is_dataclass(value) or isinstance(value, type):
        return value
    changed: dict[str, Any] = {}
    for each in fields(value):
        held = getattr(value, each.name)
        if isinstance(held, SourceLine):
            changed[each.name] = None
        elif isinstance(held, tuple) or is_dataclass(held):
            changed[each.name] = _without_lines(held)
    return replace(value, **changed)


def _course(course: BytesOverStep | None) -> BytesOverStep | None:
    """Return the course of a step without the lines of the tensors held in it."""
    if course is None:
        return None
    kinds = tuple(replace(kind, line=None) for kind in course.tensors.kinds)
    return replace(course, tensors=replace(course.tensors, kinds=kinds))
