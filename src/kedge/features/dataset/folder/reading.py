"""Access to the features in a folder, by site and by key: columns that read shards on demand."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.errors import NoSuchKey, NoSuchSite, NotFeatures
from kedge.features.dataset.folder.files import STATE, about_shard, entries, ranks_of, read_state
from kedge.features.dataset.folder.formats import type_name
from kedge.features.dataset.folder.manifest import MANIFEST, TEXT, read_manifest
from kedge.features.dataset.folder.samples import RowIndex, StoredSamples, one_shape
from kedge.features.dataset.folder.stored_shard import Numbers
from kedge.features.dataset.keys_and_fields import LABELS
from kedge.features.reduce import restore
from kedge.features.reduce.reducer import Reducer
from kedge.files.given_path import given_path
from kedge.short_text import counted

_AT_ONCE = 1024  # samples that are read together when a column is iterated

Several = slice | Sequence[int] | Sequence[bool] | Tensor | NDArray[Any]
"""Several samples of a column: a slice, their numbers, or a mask with an entry for each sample."""


class FeatureColumn:
    """The values of one site or field: a sequence of tensors on the disk, one for each sample.

    `column[3]` reads one sample; `column[10:20]`, `column[[1, 5]]` and `column[mask]` read several,
    `column.tensor()` all. A column is a data set for PyTorch's loaders, also with workers.

    Attributes:
        name: The site or field.
        dtype: The type of the numbers.
    """

    def __init__(self, name: str, dtype: torch.dtype, where: RowIndex) -> None:
        self.name = name
        self.dtype = dtype
        self._where = where

    def __len__(self) -> int:
        return len(self._where)

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of samples; a single one unless samples differ in size."""
        return self._where.shapes(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole column as one tensor, ``(samples, ...)``.

        Raises:
            ReadError: The samples have different shapes.
        """
        return (len(self), *one_shape(self.name, self.shapes))

    def __getitem__(self, which: int | Several) -> Tensor:
        """Return the values of one sample, or of several as one tensor."""
        if type(which) is int and 0 <= which < len(self._where.shard):
            return self._where.one(self.name, self.dtype, which)
        found = _chosen(which, len(self), self.name)
        if isinstance(found, int):
            return self._where.one(self.name, self.dtype, found)
        return self._several(found)

    def __getitems__(self, samples: Sequence[int]) -> list[Tensor]:
        """Return the values of several samples, as PyTorch's loaders ask for those of a batch."""
        if len(self.shapes) > 1:
            return [self[number] for number in samples]
        return list(self[samples].unbind(0))

    def __iter__(self) -> Iterator[Tensor]:
        if len(self.shapes) > 1:
            yield from (self[number] for number in range(len(self)))
            return
        for start in range(0, len(self), _AT_ONCE):
            yield from self[start : start + _AT_ONCE]

    def tensor(self) -> Tensor:
        """Return the whole column."""
        return self._several(np.arange(len(self)))

    def numpy(self) -> NDArray[Any]:
        """Return the whole column as an array; bfloat16, which NumPy lacks, becomes float32."""
        values = self.tensor()
        if values.dtype == torch.bfloat16:
            values = values.float()
        array: NDArray[Any] = values.numpy()
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype, copy=bool(copy))

    def _several(self, samples: Numbers) -> Tensor:
        if not len(samples):
            return torch.empty(0, *self.shape[1:], dtype=self.dtype)
        return self._where.several(self.name, self.dtype, samples)

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {len(self):,} samples, {type_name(self.dtype)})"


class StoredTexts(Sequence[str]):
    """A field of texts, such as paths: a sequence with one for each sample.

    `column[3]` is the text of one sample; `column[10:20]`, `column[[1, 5]]` and `column[mask]` are
    lists of several.

    Attributes:
        name: The field.
    """

    def __init__(self, name: str, where: RowIndex) -> None:
        self.name, self._where = name, where

    def __len__(self) -> int:
        return len(self._where)

    @overload
    def __getitem__(self, which: int) -> str: ...

    @overload
    def __getitem__(self, which: Several) -> list[str]: ...

    def __getitem__(self, which: int | Several) -> str | list[str]:
        found = _chosen(which, len(self), self.name)
        if isinstance(found, int):
            return self._where.texts(self.name, np.array([found]))[0]
        return self._where.texts(self.name, found)

    def __getitems__(self, samples: Sequence[int]) -> list[str]:
        """Return the texts of several samples, as PyTorch's loaders ask for those of a batch."""
        return self[samples]

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])

    def numpy(self) -> NDArray[Any]:
        """Return all texts as an array of objects."""
        return np.array(self[:], dtype=object)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {len(self):,} samples, text)"


Column = FeatureColumn | StoredTexts


def _chosen(which: Any, length: int, name: str) -> int | Numbers:
    """Return the number of one sample, or the numbers of several.

    Raises:
        IndexError: There is no such sample, or samples cannot be chosen in this way.
    """
    if isinstance(which, (bool, np.bool_)):
        raise _cannot(
            name,
            f"{which} is none of these; compare values, not a column: column[labels.numpy() == 3]",
        )
    if isinstance(which, (int, np.integer)):
        if not -length <= which < length:
            raise _no_sample(name, length, which)
        return int(which) % length
    if isinstance(which, slice):
        return np.arange(*which.indices(length))
    if isinstance(which, (tuple, str)) or which is None or which is Ellipsis:
        raise _cannot(
            name,
            f"{which!r} is none of these; index the tensor of a sample instead, as in column[3][0]",
        )
    array = which.cpu().numpy() if isinstance(which, Tensor) else np.asarray(which)
    is_whole = array.dtype.kind in "iu"
    if not array.ndim and is_whole:
        return _chosen(int(array), length, name)
    if array.dtype.kind == "b" and array.shape == (length,):
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and not is_whole):
        shape = list(array.shape)
        raise _cannot(name, f"this is of {array.dtype} and the shape {shape}, for {length} samples")
    numbers = array.astype(np.int64)
    beyond = (numbers < -length) | (numbers >= length)
    if beyond.any():
        raise _no_sample(name, length, numbers[beyond][0])
    return np.where(numbers < 0, numbers + length, numbers)


def _no_sample(name: str, length: int, number: Any) -> IndexError:
    return IndexError(f"{name!r} has the values of {length} samples; there is no {number}")


def _cannot(name: str, found: str) -> IndexError:
    return IndexError(
        f"samples of {name!r} are chosen by a number, a slice, a list of numbers, or a "
        f"mask: {found}"
    )


def open_features(folder: str | os.PathLike[str]) -> FeatureSet:
    """Return the features that `extract_dataset` or `kedge extract` wrote, or is still writing.

    Args:
        folder: The folder.

    Raises:
        NotFeatures: The folder holds no features, or is damaged.
        NewerFormat: A later version of Kedge wrote the folder.
    """
    path = given_path(folder)
    manifest = read_manifest(path)
    if manifest is None:
        what = "it has no manifest" if path.is_dir() else "no such folder"
        raise NotFeatures(
            f"{path} holds no features of a data set: {what}; name the folder that was "
            "given as out= or --out"
        )
    return FeatureSet(path, manifest)


class FeatureSet(Mapping[str, FeatureColumn]):
    """The features of a data set: for each site a column with a row for each sample.

    Samples are in the data set's order, regardless of the order and the number of processes that
    computed them. Shards that were read stay open until `close`, or until nothing refers to the
    features any more.

    Attributes:
        path: The folder.
        manifest: The description of the run that wrote it.
        fields: What was stored with the features, by name: for each field a column, of numbers or
            of texts.
    """

    def __init__(self, path: Path, manifest: Mapping[str, Any]) -> None:
        self.path, self.manifest = path, manifest
        self._entries = entries(path)
        types = manifest.get("field_types", {})
        self._samples = StoredSamples(path, self._entries, types)
        self.fields: Mapping[str, Column] = StoredFields(path, types, self._samples)
        kept: set[str] = set()
        for entry in self._entries:
            kept |= entry.shapes.keys()
        columns = manifest.get("columns", {})
        unknown = kept - columns.keys()
        if unknown:
            raise NotFeatures(
                f"{path / MANIFEST} does not describe {min(unknown)!r}, which the "
                "shards have: it has changed; extract the features again into another "
                "folder"
            )
        self._types = {name: columns[name][0] for name in columns if name in kept}

    def __getitem__(self, site: str) -> FeatureColumn:
        if site not in self._types:
            there = ", ".join(map(repr, self)) or "none"
            message = f"{self.path} has no site {site!r}; it has {there}"
            if site in self.fields:
                read = ".labels" if site == LABELS else f".fields[{site!r}]"
                message += f"; {site!r} is a field, which {read} reads"
            raise NoSuchSite(message)
        dtype = getattr(torch, self._types[site])
        return FeatureColumn(site, dtype, self._samples.rows)

    def __contains__(self, site: object) -> bool:
        return site in self._types

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    @property
    def labels(self) -> Column:
        """The samples' labels.

        Raises:
            NoSuchSite: The features were extracted without `labels`.
        """
        return self.fields[LABELS]

    @property
    def samples(self) -> tuple[str, ...]:
        """The samples' keys, in the order of the columns' rows."""
        return self._samples.keys

    def sample(self, key: object) -> dict[str, Tensor]:
        """Return the features of one sample, by site.

        Raises:
            NoSuchKey: The folder has no features of this sample.
        """
        number = self.number(key)
        return {name: column[number] for name, column in self.items()}

    def number(self, key: object) -> int:
        """Return the row of a sample's values.

        Raises:
            NoSuchKey: The folder has no features of this sample.
        """
        number = self._samples.number(str(key))
        if number is None:
            reason = f"there are {len(self._samples):,} others"
            if str(key) in self.bad:
                reason = f"it was left out: {self.bad[str(key)]}"
            raise NoSuchKey(f"{self.path} has no features of a sample {str(key)!r}; {reason}")
        return number

    @property
    def bad(self) -> dict[str, str]:
        """The reason why each skipped sample has no features, by key."""
        return self._samples.bad

    def shards(self) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
        """Yield the keys and each site's values of every shard, in the order of writing."""
        for shard in self._samples.shards:
            values = {name: shard.values(name, self[name].dtype) for name in shard.sites}
            yield list(shard.keys), values

    def written_by(self, rank: int) -> int:
        """Return the number of samples that this rank has written, in this run and earlier ones."""
        return sum(entry.samples for entry in self._entries if entry.rank == rank)

    @cached_property
    def reduced(self) -> dict[str, list[Reducer]]:
        """The reducers of each reduced site, merged over the samples of all ranks."""
        merged: dict[str, list[Reducer]] = {}
        for rank in sorted(ranks_of(self.path, STATE)):
            for name, states in read_state(self.path / STATE.format(rank=rank)).items():
                found = [restore(state) for state in states]
                if name not in merged:
                    merged[name] = found
                    continue
                for mine, other in zip(merged[name], found, strict=True):
                    mine.merge(other)
        return merged

    def close(self) -> None:
        """Close the open shards, such as before the folder is removed; reading opens them again."""
        self._samples.close()

    def __repr__(self) -> str:
        lines = [f"{self.path}: {len(self._samples):,} samples"]
        pooled = self.manifest.get("pooled", {})
        for name, column in self.items():
            how = f"  {pooled[name]}" if name in pooled else ""
            lines.append(f"  {name}  {_shown(column)}{how}")
        for name, field in self.fields.items():
            lines.append(f"  {name}  {_shown(field)} (field)")
        for name, some in self.reduced.items():
            lines.append(f"  {name}  {', '.join(map(repr, some))}")
        if self.bad:
            lines.append(f"  left out: {counted(len(self.bad), 'sample')}")
        return "\n".join(lines)


class StoredFields(Mapping[str, Column]):
    """What was stored with the features, by name.

    Args:
        path: The folder.
        types: The type of each field.
        samples: The samples.
    """

    def __init__(
        self, path: Path, types: Mapping[str, Sequence[str]], samples: StoredSamples
    ) -> None:
        self._path = path
        self._types = types
        self._samples = samples

    def __getitem__(self, name: str) -> Column:
        if name not in self._types:
            lacks, option = f"field {name!r}", "fields= (--fields)"
            if name == LABELS:
                lacks, option = "labels", "labels= (--labels)"
            there = ", ".join(map(repr, self)) or "none"
            raise NoSuchSite(
                f"{self._path} has no {lacks}; its fields: {there}; extract the "
                f"features with {option} into another folder"
            )
        kind, *_ = self._types[name]
        rows = self._samples.rows
        if kind == TEXT:
            return StoredTexts(name, rows)
        return FeatureColumn(name, getattr(torch, kind), rows)

    def __contains__(self, name: object) -> bool:
        return name in self._types

    def __iter__(self) -> Iterator[str]:
        return iter(self._types)

    def __len__(self) -> int:
        return len(self._types)

    def __repr__(self) -> str:
        return repr(dict(self))


def _shown(column: Column) -> str:
    if isinstance(column, StoredTexts):
        return TEXT
    shapes = " or ".join(str(list(shape)) for shape in sorted(column.shapes)[:3])
    return f"{type_name(column.dtype)} {shapes}"


def places_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the place and the key of every finished sample, skipped ones included."""
    for entry in entries(folder, missing_ok=True):
        about = about_shard(folder / entry.name)
        yield from zip(about.get("places", about["keys"]), about["keys"], strict=True)
        yield from ((place, key) for place, key, _ in about["bad"])
