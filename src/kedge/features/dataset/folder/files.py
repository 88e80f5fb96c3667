"""The files of a folder of features: its shards, and which of them count.

# Note [Complete shards]
A shard is written under another name and renamed once all of it is on the disk, so a file with a
shard's name is complete. It contains its keys. A rank's index, with a line for each shard, saves
opening all of them; missing lines are rebuilt from the shards. With reducers, their state is
written after each shard and contains the number of the last shard counted. A shard beyond that lost
its state to a kill: it counts as missing, and its samples are computed again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any

from safetensors import SafetensorError, safe_open

from kedge.errors import BeingWritten, NotFeatures
from kedge.features.dataset.folder.checksums import OWN, REMEDY, VALUES, sum_of
from kedge.features.dataset.folder.formats.known import format_name, format_of
from kedge.features.dataset.folder.manifest import read_manifest
from kedge.files.atomic_write import told
from kedge.files.file_lock import claim
from kedge.files.own_file import OwnFile, write_all
from kedge.json_input.reading import BadJson, open_regular, parse, read_regular
from kedge.json_input.shape import (
    MOST,
    count,
    fields,
    list_of,
    mapping_of,
    nullable,
    positive,
    text,
    tuple_of,
)

INDEX = "index-{rank}.jsonl"
STATE = "state-{rank}.safetensors"
LOCK = "writer-{rank}.lock"
SHARD = "shard-{rank}-{number:05}{suffix}"
_SHARD = re.compile(r"shard-(\d{1,9})-(\d{1,9})\.\w+", re.ASCII)


def _texts(value: Any) -> None:
    """Check a list of texts; faster than one by one, as a shard has a hundred thousand."""
    if type(value) is not list or not set(map(type, value)) <= {str}:
        list_of(text)(value)


def _counts(value: Any) -> None:
    """Check a list of counts, as above."""
    if (
        type(value) is not list
        or not set(map(type, value)) <= {int}
        or not 0 <= min(value, default=0) <= max(value, default=0) < MOST
    ):
        list_of(count)(value)


_SHAPES = mapping_of(list_of(count))
_LINE = fields(
    {
        "name": text,
        "rank": count,
        "number": count,
        "samples": count,
        "left_out": count,
        "shapes": _SHAPES,
    },
    {OWN: nullable(count)},
)
_ABOUT = fields(
    {"keys": _texts, "bad": list_of(tuple_of(text, text, text)), "shapes": _SHAPES},
    {
        "places": _texts,
        "fields": _SHAPES,
        "texts": mapping_of(_texts),
        "rank": count,
        "number": count,
        OWN: count,
        VALUES: mapping_of(fields({"rows": positive, "sums": _counts})),
    },
)


@dataclass(frozen=True)
class ShardEntry:
    """One shard, as a line of the index describes it.

    Attributes:
        name: The file's name.
        rank: The rank that wrote it.
        number: Its number among that rank's shards, from 0.
        samples: The number of samples with features.
        left_out: The number of bad samples recorded in it.
        shapes: For each site the shape of one sample.
        check: The checksum of the shard's description; None if it has none. See Note [Checksums].
    """

    name: str
    rank: int
    number: int
    samples: int
    left_out: int
    shapes: Mapping[str, list[int]]
    check: int | None = None

    def line(self) -> str:
        """Return the line of the index."""
        return json.dumps(vars(self)) + "\n"


def entries(folder: Path, *, missing_ok: bool = False) -> list[ShardEntry]:
    """Return the shards that count, by rank and then in the order of writing; see Note [Complete shards].

    Args:
        folder: The folder.
        missing_ok: Whether a shard may be missing, because its samples will be computed again.

    Raises:
        NotFeatures: A shard is missing or damaged.
    """
    with told(f"read {folder}"):
        files = {
            path.name: _parts(path.name) for path in folder.iterdir() if _SHARD.fullmatch(path.name)
        }
    ranks = {rank for rank, _ in files.values()} | set(ranks_of(folder, INDEX))
    reduces = _reduces(folder)
    through = {rank: counted_through(folder, rank, reduces) for rank in ranks}
    known = {
        entry.name: entry
        for rank in ranks
        for entry in _index(folder, rank)
        if entry.number <= through[rank]
    }
    missing = sorted(known.keys() - files.keys())
    if missing and not missing_ok:
        raise NotFeatures(_missing(folder, missing, reduces))
    counted = [name for name, (rank, number) in files.items() if number <= through[rank]]
    found = [known.get(name) or entry_of(folder / name) for name in counted]
    return sorted(found, key=lambda entry: (entry.rank, entry.number))


def _missing(folder: Path, missing: list[str], reduces: bool) -> str:
    more = f" and {len(missing) - 1} more of its shards" if len(missing) > 1 else ""
    again = "run the extraction again to recompute those samples, or restore the file"
    counted = "reducers have counted those samples already, so restore the file, or start again in another folder"
    return f"{folder} lacks {missing[0]}{more}; {counted if reduces else again}"


def entry_of(path: Path) -> ShardEntry:
    """Return the index entry of a shard, read from the shard itself."""
    return entry_of_about(path, about_shard(path))


def entry_of_about(path: Path, about: Mapping[str, Any]) -> ShardEntry:
    """Return the index entry of a shard with this description."""
    rank, number = _parts(path.name)
    return ShardEntry(
        path.name,
        rank,
        number,
        len(about["keys"]),
        len(about["bad"]),
        about["shapes"],
        about.get(OWN),
    )


def about_shard(path: Path) -> dict[str, Any]:
    """Return a shard's metadata.

    Raises:
        NotFeatures: The shard is damaged, or a copy of another one.
    """
    if not (path.is_file() or path.is_dir()):
        raise NotFeatures(f"{path} is damaged: it is neither a file nor a folder; {REMEDY}")
    try:
        with told(f"read {path}"):
            about = format_of(format_name(path) or "").about(path)
        _ABOUT(about)
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise NotFeatures(f"{path} is damaged ({error}); {REMEDY}") from error
    if len(about.get("places", about["keys"])) != len(about["keys"]) or about.get(
        OWN, sum_of(about)
    ) != sum_of(about):
        raise NotFeatures(f"{path} is damaged: its description has changed; {REMEDY}")
    rank, number = _parts(path.name)
    if (about.get("rank", rank), about.get("number", number)) != (rank, number):
        raise NotFeatures(
            f"{path} is a copy of the shard with the number {about['number']} of rank {about['rank']}; {REMEDY}"
        )
    return about


def description_of(folder: Path, entry: ShardEntry) -> dict[str, Any]:
    """Return a shard's description, which is compared with that of the index.

    Raises:
        NotFeatures: The shard is damaged, or not the one that the index describes.
    """
    path = folder / entry.name
    about = about_shard(path)
    found = entry_of_about(path, about)
    if found != entry:
        raise NotFeatures(
            f"{path} is not the shard that {INDEX.format(rank=entry.rank)} describes: it was changed or replaced; {REMEDY}"
        )
    return about


def counted_through(folder: Path, rank: int, reduces: bool) -> float:
    """Return the number of the last shard that a rank's reducers have counted; infinity without reducers."""
    path = folder / STATE.format(rank=rank)
    if not reduces:
        return float("inf")
    if not path.exists():
        return float("-inf")
    try:
        with told(f"read {path}"):
            open_regular(path).close()
        with told(f"read {path}"), safe_open(path, "pt") as file:
            return int((file.metadata() or {})["through"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise NotFeatures(
            f"{path} is damaged ({error}); the reduced values are lost, so name another folder"
        ) from error


def _reduces(folder: Path) -> bool:
    return bool((read_manifest(folder) or {}).get("reduce"))


def repair(folder: Path, rank: int) -> int:
    """Remove the incomplete files of a rank's killed writer, and complete the rank's index.

    Returns:
        The number of the next shard.

    Raises:
        NotFeatures: A shard is missing, and reducers have already counted its samples.
    """
    reduces = _reduces(folder)
    through = counted_through(folder, rank, reduces)
    part = re.compile(rf"\.(shard-{rank}-\d+|state-{rank}|index-{rank})\.\w+\.part")
    with told(f"repair {folder}"):
        for path in sorted(folder.iterdir()):
            if part.fullmatch(path.name) or _is_of(path, rank, beyond=through):
                remove(path)
    files = sorted(
        (path for path in folder.iterdir() if _is_of(path, rank)),
        key=lambda path: _parts(path.name),
    )
    known = {entry.name: entry for entry in _index(folder, rank) if entry.number <= through}
    missing = sorted(known.keys() - {path.name for path in files})
    if missing and reduces:
        raise NotFeatures(_missing(folder, missing, reduces))
    if files or known:
        _write_index(
            folder / INDEX.format(rank=rank),
            [known.get(path.name) or entry_of(path) for path in files],
        )
    return 1 + max((_parts(path.name)[1] for path in files), default=-1)


def _is_of(path: Path, rank: int, beyond: float = -1) -> bool:
    """Whether a file is a rank's shard with a number greater than `beyond`."""
    found = _SHARD.fullmatch(path.name)
    return found is not None and int(found[1]) == rank and int(found[2]) > beyond


def _write_index(path: Path, lines: Iterable[ShardEntry]) -> None:
    temporary = path.with_name(f".{path.name}.part")
    with told(f"write {path}"):
        temporary.write_text("".join(entry.line() for entry in lines), encoding="utf-8")
        temporary.replace(path)


def remove(path: Path) -> None:
    """Remove a shard of any format: a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def rename_whole(temporary: Path, path: Path) -> None:
    """Rename a written file or folder once all of it is on the disk."""
    within = [*temporary.rglob("*")] if temporary.is_dir() else []
    for each in (*within, temporary):
        _sync(each)
    temporary.replace(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def append(path: Path, line: str) -> None:
    """Append a line to a file."""
    with OwnFile(path) as file:
        write_all(file, line.encode())


def _parts(name: str) -> tuple[int, int]:
    found = _SHARD.fullmatch(name)
    assert found is not None  # noqa: S101 - only names that match come here
    return int(found[1]), int(found[2])


def ranks_of(folder: Path, pattern: str) -> Iterator[int]:
    """Yield the ranks that have a file of this pattern, such as a state."""
    named = re.compile(re.escape(pattern).replace(r"\{rank\}", r"(0|[1-9]\d{0,8})"), re.ASCII)
    with told(f"read {folder}"):
        found = [named.fullmatch(path.name) for path in folder.iterdir()]
    yield from (int(name[1]) for name in found if name)


def _index(folder: Path, rank: int) -> Iterator[ShardEntry]:
    """Yield the entries of a rank's index, up to the last complete line."""
    path = folder / INDEX.format(rank=rank)
    if not path.exists():
        return
    with told(f"read {path}"):
        try:
            *lines, _ = read_regular(path).split(b"\n")
        except BadJson as error:
            raise NotFeatures(
                f"{path} is damaged: {error}; remove it: it is rebuilt from the shards"
            ) from error
    for line in lines:
        try:
            found = parse(line, exact=True)
            _LINE(found)
            if _SHARD.fullmatch(found["name"]) is None or _parts(found["name"]) != (
                found["rank"],
                found["number"],
            ):
                return
            if found["rank"] != rank:
                return
            yield ShardEntry(
                **{name: found[name] for name in ShardEntry.__dataclass_fields__ if name in found}
            )
        except ValueError:
            return  # later entries are rebuilt from the shards


@contextmanager
def only_writer(folder: Path, rank: int) -> Iterator[None]:
    """Context in which no other process writes this rank's files; the lock ends with the process, even if it is killed.

    Raises:
        BeingWritten: Another process writes them.
    """
    path = folder / LOCK.format(rank=rank)
    with told(f"write to {folder}"):
        file = OwnFile(path)
    with file:
        _claim(file, folder)
        yield


def _claim(file: OwnFile, folder: Path) -> None:
    with told(f"write to {folder}"):
        if claim(file, alone=True) == "refused":
            who = Path(file.path).read_text(encoding="utf-8").strip() or "another process"
            raise BeingWritten(
                f"cannot write to {folder}: {who} is writing there; wait for it to end, or name another folder"
            )
        file.cut(0)
        write_all(file, f"process {os.getpid()} on {gethostname()}\n".encode())
