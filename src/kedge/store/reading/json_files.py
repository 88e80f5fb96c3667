"""The JSON files of a recording: their names, their shapes, and how they are read.

The shapes are what readers rely on; see docs/reference/recording.md. Those of the events are
classes: `kedge.store.events`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kedge.errors import NewerFormat, NotARecording
from kedge.files.atomic_write import told
from kedge.frames import SourceLine
from kedge.json_input.classes import read_as
from kedge.json_input.reading import BadJson, parse, read_regular
from kedge.json_input.shape import (
    Check,
    Misshapen,
    anything,
    count,
    count_or_flag,
    fields,
    flag,
    list_of,
    nullable,
    number,
    text,
    total,
    whole,
)
from kedge.short_text import listed, shortened
from kedge.store.events import RunEvent, event_from
from kedge.store.sites import Root, SiteInfo, root_from, site_from

#: The format that is written, and the newest that can be read. 1 is the first.
FORMAT = 1

MANIFEST = "manifest.json"
STATS = "stats-{rank}.arrows"
_STATS = re.compile(r"stats-(0|[1-9][0-9]{0,8})\.arrows")

Document = Mapping[str, Any]


_MANIFEST_SHAPE = fields(
    {},
    {
        "format": whole,
        "kedge": nullable(text),
        "command": nullable(list_of(text)),
        "script": nullable(text),
        "folder": nullable(text),
        "digest": nullable(text),
        "python": nullable(text),
        "torch": nullable(text),
        "device": nullable(text),
        "started": nullable(text),
        "host": nullable(text),
        "pid": nullable(whole),
        "every": nullable(anything),
        "budget": nullable(number),
        "sites": nullable(text),
        "dump": nullable(flag),
        "rank": count,
        "world": count,
    },
)
_MODULE_SHAPE = fields(
    {"path": text},
    {
        "type": text,
        "file": nullable(text),
        "line": nullable(whole),
        "parameters": total,
        "trainable": nullable(count_or_flag),
    },
)
_ROOT_SHAPE = fields(
    {"name": text},
    {
        "type": text,
        "prefix": text,
        "parameters": total,
        "modules": list_of(_MODULE_SHAPE),
        "trained": nullable(flag),
        "by_hand": nullable(flag),
        "optimizers": list_of(count),
        "steps": count,
    },
)
SITE_SHAPE = fields(
    {"id": count, "site": text},
    {
        "path": text,
        "kind": text,
        "type": text,
        "root": whole,
        "shape": list_of(count),
        "dtype": text,
        "channels": nullable(count),
        "from": list_of(nullable(count)),
        "owner": text,
        "node": nullable(text),
        "source": nullable(partial(read_as, SourceLine)),
        "copies": nullable(list_of(count)),
        "partial": flag,
    },
)
_SITES_SHAPE = fields({"roots": list_of(_ROOT_SHAPE), "sites": list_of(SITE_SHAPE)})


def sites_file(rank: int = 0) -> str:
    """Return the name of the file in which a rank describes its sites."""
    if rank == 0:
        return "sites.json"
    return f"sites-{rank}.json"


def events_file(rank: int = 0) -> str:
    """Return the name of the file in which a rank writes its events."""
    if rank == 0:
        return "events.jsonl"
    return f"events-{rank}.jsonl"


def position_file(rank: int = 0) -> str:
    """Return the name of the file in which a rank notes where it is."""
    if rank == 0:
        return "position.json"
    return f"position-{rank}.json"


def read_ranks(folder: Path) -> tuple[int, ...]:
    """Return the ranks that have started to write statistics."""
    with told(f"read {folder}"):
        found = [_STATS.fullmatch(path.name) for path in folder.iterdir()]
    return tuple(sorted(int(name[1]) for name in found if name))


def read_manifest(folder: Path) -> Document:
    """Return the manifest of a recording.

    Raises:
        NotARecording: There is no such folder, or it is not a recording.
        NewerFormat: A newer Kedge wrote it.
    """
    with told(f"read {folder / MANIFEST}"):
        present = is_there(folder / MANIFEST)
    if not present:
        raise NotARecording(f"{folder} is not a recording: {_instead(folder)}")
    manifest = _read_object(folder / MANIFEST)
    written = manifest.get("format")
    if type(written) is not int or written < 1:
        raise NotARecording(
            f"{folder} is not a recording: its {MANIFEST} has {shortened(repr(written))} "
            "instead of the number of its format; name a folder that kedge run wrote"
        )
    if written > FORMAT:
        by = "(unknown)"
        version = manifest.get("kedge")
        if isinstance(version, str):
            by = shortened(version)
        raise NewerFormat(
            f"{folder} is written in format {shortened(str(written))}, by Kedge {by}; "
            f"this version reads formats up to {FORMAT}: upgrade Kedge to read it"
        )
    _checked(folder / MANIFEST, manifest, _MANIFEST_SHAPE)
    return manifest


def is_there(path: Path) -> bool:
    """Whether there is a file of this name, of any kind.

    Raises:
        OSError: That cannot be known.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _instead(folder: Path) -> str:
    """Return the part of a message that says what is there instead of a recording."""
    with told(f"read {folder}"):
        if not folder.exists():
            return "there is no such folder; kedge run writes one and prints its name"
        if not folder.is_dir() and (folder.parent / MANIFEST).is_file():
            return f"it is a file; name {folder.parent}, the folder it is in"
        if not folder.is_dir():
            return "it is a file; name a folder that kedge run wrote"
        found = sorted(entry.name for entry in folder.iterdir())
    if not found:
        there = f"the folder is empty and has no {MANIFEST}"
    else:
        there = f"the folder has no {MANIFEST}, it holds {listed(found, 3)}"
    return f"{there}; name a folder that kedge run wrote"


RootsAndSites = tuple[tuple[Root, ...], tuple[SiteInfo, ...]]


def read_sites(folder: Path, rank: int = 0) -> RootsAndSites | None:
    """Return the roots and sites of a rank; None if nothing has fired yet."""
    path = folder / sites_file(rank)
    with told(f"read {path}"):
        present = is_there(path)
    if not present:
        return None
    document = _checked(path, _read_object(path), _SITES_SHAPE)
    roots = tuple(map(root_from, document["roots"]))
    sites = tuple(map(site_from, document["sites"]))
    for place, site in enumerate(sites):
        if site.id != place:
            raise damaged(path, f"site {site.site!r} has the id {site.id!r}, not {place}")
        for source in site.sources:
            if source is not None and source >= len(sites):
                beyond = f"the source {source}, and there are {len(sites)} sites"
                raise damaged(path, f"site {site.site!r} has {beyond}")
        if not -1 <= site.root < max(len(roots), 1):
            beyond = f"the root {site.root}, and there are {len(roots)} roots"
            raise damaged(path, f"site {site.site!r} has {beyond}")
    return roots, sites


def read_event(path: Path, place: int, line: bytes) -> RunEvent:
    """Return one line of the events.

    Raises:
        NotARecording: The line is not an event.
    """
    try:
        event = parse(line)
    except BadJson as error:
        problem = str(error).removeprefix("it ").partition(" (")[0]
        raise damaged(path, f"line {place} {problem}") from error
    if not isinstance(event, dict):
        raise damaged(path, f"line {place} is not a JSON object")
    try:
        return event_from(event)
    except Misshapen as error:
        raise damaged(path, f"line {place}: {error}") from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        with told(f"read {path}"):
            content = read_regular(path)
        document = parse(content)
    except BadJson as error:
        raise damaged(path, str(error)) from error
    if not isinstance(document, dict):
        raise damaged(path, "it is JSON, but not an object")
    return document


def _checked(path: Path, document: Document, shape: Check) -> Document:
    """Return a document as its shape keeps it."""
    try:
        kept: Document = shape(document)
    except Misshapen as error:
        raise damaged(path, str(error)) from error
    return kept


def damaged(path: Path, found: str) -> NotARecording:
    """Return the error of a file of a recording that is not as it should be."""
    return NotARecording(
        f"{path} is damaged: {found}; copy the whole folder again, or record the run again"
    )
