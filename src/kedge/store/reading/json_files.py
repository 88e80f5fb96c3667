"""The JSON files of a recording: their names, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.errors import NewerFormat, NotARecording
from kedge.files.atomic_write import told
from kedge.json_input.reading import BadJson, parse, read_regular
from kedge.json_input.shape import Check, Misshapen
from kedge.short_text import listed, shortened
from kedge.store.events import RunEvent, event_from
from kedge.store.reading import shapes
from kedge.store.sites import Root, SiteInfo, root_from, site_from

#: The format that is written, and the newest that can be read. 1 is the first.
FORMAT = 1

MANIFEST = "manifest.json"
STATS = "stats-{rank}.arrows"
_STATS = re.compile(r"stats-(0|[1-9][0-9]{0,8})\.arrows")

Document = Mapping[str, Any]


def sites_file(rank: int = 0) -> str:
    """Return the name of the file in which a rank describes its sites."""
    return f"sites-{rank}.json" if rank else "sites.json"


def events_file(rank: int = 0) -> str:
    """Return the name of the file in which a rank writes its events."""
    return f"events-{rank}.jsonl" if rank else "events.jsonl"


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
    number = manifest.get("format")
    if type(number) is not int or number < 1:
        raise NotARecording(
            f"{folder} is not a recording: its {MANIFEST} has {shortened(repr(number))} instead of the number of its format; "
            "name a folder that kedge run wrote"
        )
    if number > FORMAT:
        version = manifest.get("kedge")
        by = shortened(version) if isinstance(version, str) else "(unknown)"
        raise NewerFormat(
            f"{folder} is written in format {shortened(str(number))}, by Kedge {by}; "
            f"this version reads formats up to {FORMAT}: upgrade Kedge to read it"
        )
    _checked(folder / MANIFEST, manifest, shapes.MANIFEST)
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
        if not folder.is_dir():
            inside = (folder.parent / MANIFEST).is_file()
            name = (
                f"{folder.parent}, the folder it is in"
                if inside
                else "a folder that kedge run wrote"
            )
            return f"it is a file; name {name}"
        found = sorted(entry.name for entry in folder.iterdir())
    if not found:
        return f"the folder is empty and has no {MANIFEST}; name a folder that kedge run wrote"
    return f"the folder has no {MANIFEST}, it holds {listed(found, 3)}; name a folder that kedge run wrote"


def read_sites(folder: Path, rank: int = 0) -> tuple[tuple[Root, ...], tuple[SiteInfo, ...]] | None:
    """Return the roots and sites of a rank; None if nothing has fired yet."""
    path = folder / sites_file(rank)
    with told(f"read {path}"):
        present = is_there(path)
    if not present:
        return None
    document = _checked(path, _read_object(path), shapes.SITES)
    roots = tuple(map(root_from, document["roots"]))
    sites = tuple(map(site_from, document["sites"]))
    for place, site in enumerate(sites):
        if site.id != place:
            raise damaged(path, f"site {site.site!r} has the id {site.id!r}, not {place}")
        beyond = [source for source in site.sources if source is not None and source >= len(sites)]
        if beyond:
            raise damaged(
                path,
                f"site {site.site!r} has the source {beyond[0]}, and there are {len(sites)} sites",
            )
        if not -1 <= site.root < max(len(roots), 1):
            raise damaged(
                path,
                f"site {site.site!r} has the root {site.root}, and there are {len(roots)} roots",
            )
    return roots, sites


def read_event(path: Path, number: int, line: bytes) -> RunEvent:
    """Return one line of the events.

    Raises:
        NotARecording: The line is not an event.
    """
    try:
        event = parse(line)
    except BadJson as error:
        raise damaged(
            path, f"line {number} {str(error).removeprefix('it ').partition(' (')[0]}"
        ) from error
    if not isinstance(event, dict):
        raise damaged(path, f"line {number} is not a JSON object")
    try:
        return event_from(event)
    except Misshapen as error:
        raise damaged(path, f"line {number}: {error}") from error


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
