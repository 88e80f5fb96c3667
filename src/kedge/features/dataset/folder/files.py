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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from socket import gethostname
from typing import TYPE_CHECKING, Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor

from kedge.errors import BeingWritten, NotFeatures, required
from kedge.features.dataset.folder.formats import OWN, REMEDY, VALUES, Format, state_sum, sum_of
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

if TYPE_CHECKING:  # so that the import contract sees what `format_of` loads
    from kedge.features.dataset.folder import parquet, zarr  # noqa: F401

INDEX = "index-{rank}.jsonl"
STATE = "state-{rank}.safetensors"
LOCK = "writer-{rank}.lock"
SHARD = "shard-{rank}-{number:05}{suffix}"
_SHARD = re.compile(r"shard-(\d{1,9})-(\d{1,9})\.\w+", re.ASCII)
#: What separates the site, the number and the part of a reducer's state in the name of a tensor.
RESERVED = "#"

#: The formats by name: the suffix of a shard, the module, and the package that it needs.
_FORMATS = {
    "safetensors": (".safetensors", "formats", "safetensors"),
    "zarr": (".zarr", "zarr", "zarr"),
    "parquet": (".parquet", "parquet", "pyarrow"),
}


def format_of(name: str) -> Format:
    """Return a format by its name; it is loaded when it is first used.

    Raises:
        MissingExtra: The format needs a package that is not installed.
    """
    suffix, module, package = _FORMATS[name]
    with required(package, name, f"shards in the format {name} need"):
        made: Format = import_module(f"kedge.features.dataset.folder.{module}").FORMAT
    assert made.suffix == suffix  # noqa: S101 - otherwise readers would not find the written files
    return made


def format_at(path: Path) -> Format:
    """Return the format of a shard, by its suffix.

    Raises:
        KeyError: There is no such format.
    """
    names = {suffix: name for name, (suffix, *_) in _FORMATS.items()}
    return format_of(names[path.suffix])


def _check_texts(value: Any) -> None:
    """Check a list of texts; faster than one by one, as a shard has a hundred thousand."""
    if type(value) is not list or not set(map(type, value)) <= {str}:
        list_of(text)(value)


def _check_counts(value: Any) -> None:
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
    {"keys": _check_texts, "bad": list_of(tuple_of(text, text, text)), "shapes": _SHAPES},
    {
        "places": _check_texts,
        "fields": _SHAPES,
        "texts": mapping_of(_check_texts),
        "rank": count,
        "number": count,
        OWN: count,
        VALUES: mapping_of(fields({"rows": positive, "sums": _check_counts})),
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


class _ShardName(NamedTuple):
    """The rank and the number in the name of a shard, in the order of writing."""

    rank: int
    number: int


def _shard_name(name: str) -> _ShardName | None:
    found = _SHARD.fullmatch(name)
    if found is None:
        return None
    return _ShardName(int(found[1]), int(found[2]))


def _shards_in(folder: Path) -> dict[str, _ShardName]:
    with told(f"read {folder}"):
        names = [path.name for path in folder.iterdir()]
    found = {}
    for name in names:
        parts = _shard_name(name)
        if parts is not None:
            found[name] = parts
    return found


def entries(folder: Path, *, missing_ok: bool = False) -> list[ShardEntry]:
    """Return the shards that count, by rank and then in the order of writing; see Note [Complete shards].

    Args:
        folder: The folder.
        missing_ok: Whether a shard may be missing, because its samples will be computed again.

    Raises:
        NotFeatures: A shard is missing or damaged.
    """
    files = _shards_in(folder)
    ranks = {parts.rank for parts in files.values()} | set(ranks_of(folder, INDEX))
    reduces = _reduces(folder)
    through = {rank: counted_through(folder, rank, reduces) for rank in ranks}
    known: dict[str, ShardEntry] = {}
    for rank in ranks:
        known |= _index(folder, rank, through[rank])
    missing = sorted(known.keys() - files.keys())
    if missing and not missing_ok:
        raise _lacks(folder, missing, reduces)
    found = []
    for name, parts in files.items():
        if parts.number <= through[parts.rank]:
            found.append(known.get(name) or entry_of_about(folder / name))
    return sorted(found, key=lambda entry: (entry.rank, entry.number))


def _lacks(folder: Path, missing: list[str], reduces: bool) -> NotFeatures:
    more = f" and {len(missing) - 1} more of its shards" if len(missing) > 1 else ""
    remedy = "run the extraction again to recompute those samples, or restore the file"
    if reduces:
        remedy = (
            "reducers have counted those samples already, so restore the file, or "
            "start again in another folder"
        )
    return NotFeatures(f"{folder} lacks {missing[0]}{more}; {remedy}")


def entry_of_about(path: Path, about: Mapping[str, Any] | None = None) -> ShardEntry:
    """Return the index entry of a shard, from its description, which is read if it is not given."""
    if about is None:
        about = about_shard(path)
    parts = _shard_name(path.name)
    assert parts is not None  # noqa: S101 - only shards come here
    return ShardEntry(
        path.name,
        *parts,
        samples=len(about["keys"]),
        left_out=len(about["bad"]),
        shapes=about["shapes"],
        check=about.get(OWN),
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
            about = format_at(path).about(path)
        _ABOUT(about)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise NotFeatures(f"{path} is damaged ({error}); {REMEDY}") from error
    places = about.get("places", about["keys"])
    own = sum_of(about)
    if len(places) != len(about["keys"]) or about.get(OWN, own) != own:
        raise NotFeatures(f"{path} is damaged: its description has changed; {REMEDY}")
    parts = _shard_name(path.name)
    if parts is not None and parts != (
        about.get("rank", parts.rank),
        about.get("number", parts.number),
    ):
        raise NotFeatures(
            f"{path} is a copy of the shard with the number {about['number']} of rank "
            f"{about['rank']}; {REMEDY}"
        )
    return about


def description_of(folder: Path, entry: ShardEntry) -> dict[str, Any]:
    """Return a shard's description, which is compared with that of the index.

    Raises:
        NotFeatures: The shard is damaged, or not the one that the index describes.
    """
    path = folder / entry.name
    about = about_shard(path)
    if entry_of_about(path, about) != entry:
        raise NotFeatures(
            f"{path} is not the shard that {INDEX.format(rank=entry.rank)} describes: "
            f"it was changed or replaced; {REMEDY}"
        )
    return about


def _reduces(folder: Path) -> bool:
    manifest = read_manifest(folder) or {}
    return bool(manifest.get("reduce"))


def counted_through(folder: Path, rank: int, reduces: bool) -> float:
    """Return the number of the last shard that a rank's reducers have counted; infinity without reducers."""
    if not reduces:
        return float("inf")
    path = folder / STATE.format(rank=rank)
    if not path.exists():
        return float("-inf")
    try:
        with _opened_state(path) as file:
            return int((file.metadata() or {})["through"])
    except (SafetensorError, KeyError, ValueError) as error:
        raise _damaged(path, error) from error


def read_state(path: Path) -> dict[str, list[dict[str, Tensor]]]:
    """Return the states of a rank's reducers: for each site a list.

    Raises:
        NotFeatures: The file is damaged.
    """
    found: dict[tuple[str, int], dict[str, Tensor]] = {}
    try:
        with _opened_state(path) as file:
            pieces = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
            own = (file.metadata() or {}).get(OWN)
        for full, tensor in pieces.items():
            name, number, part = full.rsplit(RESERVED, 2)
            found.setdefault((name, int(number)), {})[part] = tensor
    except (SafetensorError, ValueError) as error:
        raise _damaged(path, error) from error
    if own is not None and own != state_sum(pieces):
        raise _damaged(path, "its values have changed")

    states: dict[str, list[dict[str, Tensor]]] = {}
    for name, number in sorted(found):
        some = states.setdefault(name, [])
        if number != len(some):
            raise _damaged(path, f"there is no reducer {len(some)} of {name!r}")
        some.append(found[name, number])
    return states


@contextmanager
def _opened_state(path: Path) -> Iterator[Any]:
    with told(f"read {path}"):
        open_regular(path).close()
        with safe_open(path, "pt") as file:
            yield file


def _damaged(path: Path, found: object) -> NotFeatures:
    return NotFeatures(
        f"{path} is damaged ({found}); the reduced values are lost, so name another folder"
    )


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
    files: dict[str, _ShardName] = {}
    with told(f"repair {folder}"):
        for path in sorted(folder.iterdir()):
            name = _shard_name(path.name)
            if part.fullmatch(path.name):
                remove(path)
            elif name is not None and name.rank == rank:
                if name.number > through:
                    remove(path)
                else:
                    files[path.name] = name

    known = _index(folder, rank, through)
    missing = sorted(known.keys() - files.keys())
    if missing and reduces:
        raise _lacks(folder, missing, reduces)
    if not files and not known:
        return 0
    names = sorted(files, key=files.__getitem__)
    listed = [known.get(name) or entry_of_about(folder / name) for name in names]
    lines = [entry.line() for entry in listed]
    index = folder / INDEX.format(rank=rank)
    temporary = index.with_name(f".{index.name}.part")
    with told(f"write {index}"):
        temporary.write_text("".join(lines), encoding="utf-8")
        temporary.replace(index)
    return 1 + max((parts.number for parts in files.values()), default=-1)


def remove(path: Path) -> None:
    """Remove a shard of any format: a file or a folder."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()


def rename_whole(temporary: Path, path: Path) -> None:
    """Rename a written file or folder once all of it is on the disk."""
    if temporary.is_dir():
        for each in temporary.rglob("*"):
            _sync(each)
    _sync(temporary)
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


def ranks_of(folder: Path, pattern: str) -> Iterator[int]:
    """Yield the ranks that have a file of this pattern, such as a state."""
    number = r"(0|[1-9]\d{0,8})"
    named = re.compile(re.escape(pattern).replace(r"\{rank\}", number), re.ASCII)
    with told(f"read {folder}"):
        found = [named.fullmatch(path.name) for path in folder.iterdir()]
    yield from (int(name[1]) for name in found if name)


def _index(folder: Path, rank: int, through: float) -> dict[str, ShardEntry]:
    """Return the entries of a rank's index by name, up to the last complete line and the last shard that counts."""
    entries: dict[str, ShardEntry] = {}
    path = folder / INDEX.format(rank=rank)
    if not path.exists():
        return entries
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
        except ValueError:
            break  # later entries are rebuilt from the shards
        known = ShardEntry.__dataclass_fields__.keys() & found.keys()
        entry = ShardEntry(**{name: found[name] for name in known})
        if entry.rank != rank or _shard_name(entry.name) != (rank, entry.number):
            break
        if entry.number <= through:
            entries[entry.name] = entry
    return entries


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
        with told(f"write to {folder}"):
            if claim(file, alone=True) == "refused":
                who = path.read_text(encoding="utf-8").strip() or "another process"
                raise BeingWritten(
                    f"cannot write to {folder}: {who} is writing there; wait for it to "
                    "end, or name another folder"
                )
            file.cut(0)
            write_all(file, f"process {os.getpid()} on {gethostname()}\n".encode())
        yield
