"""Access to the features in a folder, by site and by key."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kedge.errors import NoSuchKey, NoSuchSite, NotFeatures
from kedge.features.dataset.folder.columns import Column, FeatureColumn, StoredTexts
from kedge.features.dataset.folder.files import STATE, about_shard, entries, ranks_of, read_state
from kedge.features.dataset.folder.formats import type_name
from kedge.features.dataset.folder.manifest import MANIFEST, TEXT, read_manifest
from kedge.features.dataset.folder.samples import StoredSamples
from kedge.features.dataset.keys_and_fields import LABELS
from kedge.features.reduce import restore
from kedge.features.reduce.reducer import Reducer
from kedge.files.given_path import given_path
from kedge.short_text import counted


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
        return FeatureColumn(site, getattr(torch, self._types[site]), self._samples.rows)

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
                for mine, other in zip(merged.setdefault(name, found), found, strict=True):
                    if mine is not other:
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
        self._path, self._types, self._samples = path, types, samples

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
