"""The JSON files of a recording: their names, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.atomic_write import told
from kedge.errors import NewerFormat, NotARecording
from kedge.numbers import listed
from kedge.store.sites import Root, SiteInfo, root_from, site_from

#: The format that is written, and the newest that can be read. 1 is the first.
FORMAT = 1

MANIFEST = "manifest.json"
STATS = "stats-{rank}.arrows"

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
        names = [path.name for path in folder.glob(STATS.format(rank="*"))]
    numbers = (name.removeprefix("stats-").removesuffix(".arrows") for name in names)
    return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def read_manifest(folder: Path) -> Document:
    """Return the manifest of a recording.

    Raises:
        NotARecording: There is no such folder, or it is not a recording.
        NewerFormat: A newer Kedge wrote it.
    """
    if not (folder / MANIFEST).is_file():
        raise NotARecording(f"{folder} is not a recording: {_instead(folder)}")
    manifest = _read_object(folder / MANIFEST)
    number = manifest.get("format")
    if type(number) is not int or number < 1:
        raise NotARecording(
            f"{folder} is not a recording: its {MANIFEST} has {number!r} where the number of the format should be; "
            "name a folder that kedge run wrote"
        )
    if number > FORMAT:
        raise NewerFormat(
            f"{folder} is written in format {number}, by Kedge {manifest.get('kedge', '(unknown)')}; "
            f"this version reads formats up to {FORMAT}: upgrade Kedge to read it"
        )
    return manifest


def _instead(folder: Path) -> str:
    """Return the part of a message that says what is there instead of a recording."""
    with told(f"read {folder}"):
        if not folder.exists():
            return "there is no such folder; kedge run writes one and prints its name"
        if not folder.is_dir():
            inside = (folder.parent / MANIFEST).is_file()
            name = f"{folder.parent}, the folder it is in" if inside else "a folder that kedge run wrote"
            return f"it is a file; name {name}"
        found = sorted(entry.name for entry in folder.iterdir())
    if not found:
        return f"the folder is empty and has no {MANIFEST}; name a folder that kedge run wrote"
    return f"the folder has no {MANIFEST}, it holds {listed(found, 3)}; name a folder that kedge run wrote"


def read_sites(folder: Path, rank: int = 0) -> tuple[tuple[Root, ...], tuple[SiteInfo, ...]] | None:
    """Return the roots and sites of a rank; None if nothing has fired yet."""
    path = folder / sites_file(rank)
    if not path.exists():
        return None
    document = _read_object(path)
    try:
        roots = tuple(map(root_from, document["roots"]))
        sites = tuple(map(site_from, document["sites"]))
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"an entry is not as it should be ({type(error).__name__}: {error})") from error
    for place, site in enumerate(sites):
        if site.id != place:
            raise _damaged(path, f"site {site.site!r} has the id {site.id!r} where {place} should be")
    return roots, sites


def event_from(path: Path, number: int, line: bytes) -> Document:
    """Return one line of the events.

    Raises:
        NotARecording: The line is not a JSON object.
    """
    try:
        event = json.loads(line)
    except ValueError as error:
        raise _damaged(path, f"line {number} is not JSON") from error
    if not isinstance(event, dict):
        raise _damaged(path, f"line {number} is not a JSON object")
    return event


def _read_object(path: Path) -> dict[str, Any]:
    with told(f"read {path}"):
        content = path.read_bytes()
    try:
        document = json.loads(content)
    except ValueError as error:
        raise _damaged(path, f"it is not JSON ({error})") from error
    if not isinstance(document, dict):
        raise _damaged(path, "it is JSON, but not an object")
    return document


def _damaged(path: Path, found: str) -> NotARecording:
    return NotARecording(f"{path} is damaged: {found}; copy the whole folder again, or record the run again")
