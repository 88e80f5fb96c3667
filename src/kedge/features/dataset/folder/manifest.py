"""The manifest: a description of the run that wrote a folder, so that no other run adds to it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import ExtractionFailed, NewerFormat, NotFeatures, OtherRun
from kedge.features.dataset.folder.fingerprint import alike, has_digest, identity, listed, weights
from kedge.features.dataset.samples.batch import Columns, FieldValues
from kedge.features.dataset.samples.fields import Field, entry_of
from kedge.features.dataset.samples.names import name_of, texts
from kedge.features.reduce.reducer import Reducer
from kedge.files.atomic_write import told
from kedge.json_input.reading import parse, read_regular
from kedge.json_input.shape import (
    Misshapen,
    fields,
    list_of,
    mapping_of,
    nullable,
    text,
    tuple_of,
    whole,
)
from kedge.short_text import shortened

MANIFEST = "features.json"
#: The number of the format, which grows when older versions of Kedge cannot read new folders.
FORMAT = 1

_VERSION = fields({"format": whole})

#: The type of a field that holds texts.
TEXT = "text"


def _dtype(value: Any) -> None:
    if not isinstance(getattr(torch, value, None) if isinstance(value, str) else None, torch.dtype):
        raise Misshapen("is no type of numbers")


def _field_type(value: Any) -> None:
    if value != [TEXT]:
        tuple_of(_dtype, text)(value)


_MANIFEST = fields(
    {},
    {
        "columns": mapping_of(tuple_of(_dtype, text)),
        "field_types": mapping_of(_field_type),
        "pooled": mapping_of(text),
        "reduce": mapping_of(list_of(text)),
        "kedge": nullable(text),
    },
)

_WHAT = {
    "files": "the shards are {}",
    "model": "the model is {}",
    "data": "the data set is {}",
    "sites": "the sites are {}",
    "functions": "the functions are {}",
    "keys": "the keys are {}",
    "batch": "batch= is {}",
    "collate": "samples are collated by {}",
    "version": "version= is {}",
    "fields": "labels= and fields= are {}",
    "field_types": "they hold {}",
    "reduce": "the reducers are {}",
    "columns": "the values are {}",
}

_ABOUT_DIGESTS = (
    ". If you have changed no function, a function has changed an object that it refers to, which counts as part of "
    "it: run a new process to continue this folder, or identify your functions yourself, with version='...' "
    "(--version) in a new folder"
)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return a folder's manifest; None if there is none.

    Raises:
        NotFeatures: The manifest cannot be read.
        NewerFormat: A later version of Kedge wrote it.
    """
    path = folder / MANIFEST
    try:
        with told(f"read {path}"):
            content = read_regular(path) if os.path.lexists(path) else None
        if content is None:
            return None
        found = parse(content, exact=True)
        _VERSION(found)
        if found["format"] <= FORMAT:
            _MANIFEST(found)
    except ValueError as error:
        raise NotFeatures(
            f"{path} cannot be read: {error}; it was not written by an extraction"
        ) from error
    if found["format"] > FORMAT:
        raise NewerFormat(
            f"{folder} is of format {shortened(str(found['format']))}, and this Kedge knows formats up to {FORMAT}; Kedge "
            f"{shortened(str(found.get('kedge')))} wrote it; install that version or a later one"
        )
    return dict(found)


def settle(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Write a folder's manifest unless another process has done so, then check that it describes the same run.

    Raises:
        OtherRun: It describes another run.
        RecordingError: The folder cannot be written to.
    """
    temporary = folder / f".{MANIFEST}.{token_hex(4)}"
    if read_manifest(folder) is None:
        with told(f"write {folder / MANIFEST}"):
            try:
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(
                        json.dumps(
                            {"format": FORMAT, "kedge": metadata.version("kedge"), **wanted},
                            indent=2,
                        )
                        + "\n"
                    )
                    file.flush()
                    os.fsync(file.fileno())
                _put(temporary, folder / MANIFEST)
            finally:
                temporary.unlink(missing_ok=True)
    check_same(folder, read_manifest(folder) or {}, wanted)


def _put(temporary: Path, path: Path) -> None:
    """Rename a file, unless another process has already created the target."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not path.exists():
            temporary.replace(path)


def check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that a folder belongs to the wanted run, as far as both descriptions have the same entries.

    Raises:
        OtherRun: The folder belongs to another run.
    """
    wanted = json.loads(json.dumps(wanted))  # as it would be read from the file
    found = {"fields": {}, **found}  # earlier versions had none
    unlike = [
        name
        for name in _WHAT
        if name in found and name in wanted and not alike(found[name], wanted[name])
    ]
    if unlike:
        differences = "; ".join(
            f"there {_WHAT[name].format(_shown(found[name]))}, here {_shown(wanted[name])}"
            for name in unlike
        )
        drawn = (
            ", or load or seed the weights if each process draws its own"
            if "model" in unlike
            else ""
        )
        grown = (
            _ABOUT_DIGESTS
            if any(has_digest(found[name]) and has_digest(wanted[name]) for name in unlike)
            else ""
        )
        raise OtherRun(
            f"cannot add to {folder}, which holds the features of another run: {differences}; name another folder{drawn}{grown}"
        )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return str(value)


def about_model(features: Any) -> dict[str, Any]:
    """Return the description of a model: its class, and a digest of its parameters and settings."""
    if not isinstance(features, nn.Module):
        return {"type": name_of(features)}
    return {
        "type": type(getattr(features, "model", features)).__qualname__,
        "digest": weights(features),
    }


def about_sites(features: Any) -> dict[str, Any]:
    """Return the captured sites with their transforms, new names and dtype; empty for features not from Kedge."""
    wanted = getattr(features, "wanted", None)
    if wanted is None:
        return {}
    sites = {
        text: "as they are" if change is None else f"through {name_of(change)}"
        for text, change in _taken(features)
    }
    renamed = {f"{name}, renamed": f"to {new!r}" for name, new in sorted(wanted.rename.items())}
    kept = (
        {}
        if wanted.dtype is None
        else {"all": f"kept as {str(wanted.dtype).removeprefix('torch.')}"}
    )
    return sites | renamed | kept


def about_functions(features: Any, version: str | None) -> dict[str, str]:
    """Return the identities of the sites' transforms, or of the features themselves if they are not a module."""
    if not isinstance(features, nn.Module):
        return {"features": identity(features, version)}
    return {
        text: identity(change, version) for text, change in _taken(features) if change is not None
    }


def about_keys(keys: Any, version: str | None) -> str:
    """Return the description of keys: places by default, a column, a function, or a list."""
    if keys is None:
        return "the samples' places"
    if callable(keys):
        return identity(keys, version)
    return repr(keys) if isinstance(keys, str) else listed(texts(keys))


def _taken(features: Any) -> list[tuple[str, Any]]:
    wanted = getattr(features, "wanted", None)
    return [] if wanted is None else list(zip(wanted.texts, wanted.transforms, strict=True))


def about_reducers(reducers: Mapping[str, Sequence[Reducer]]) -> dict[str, list[str]]:
    """Return the description of reducers: for each site their classes and settings."""
    return {name: [_reducer(one) for one in some] for name, some in reducers.items()}


def _reducer(reducer: Any) -> str:
    return repr(reducer) if hasattr(reducer, "settings") else type(reducer).__qualname__


def about_fields(stored: Mapping[str, Field], version: str | None) -> dict[str, str]:
    """Return where a batch has the fields."""
    entries = {name: entry_of(field) for name, field in stored.items()}
    return {
        name: identity(entry, version) if callable(entry) else f"the entry {entry!r}"
        for name, entry in entries.items()
    }


def about_content(columns: Columns) -> dict[str, dict[str, list[Any]]]:
    """Return what is known with the first batch: the types of the sites' values, and of the fields."""
    both = sorted(columns.fields.keys() & columns.values.keys())
    if both:
        raise ExtractionFailed(
            f"{both[0]!r} is the name of a site and of a field (labels= is the field 'labels'); rename the site"
        )
    return {"columns": about_columns(columns.values), "field_types": types_of(columns.fields)}


def about_pooling(features: Any) -> dict[str, dict[str, str]]:
    """Return what was done with pooled values in the first batch, by name; later batches may have other sizes."""
    described = getattr(getattr(features, "work", None), "described", {})
    return {"pooled": dict(described)} if described else {}


def types_of(fields: Mapping[str, FieldValues]) -> dict[str, list[Any]]:
    """Return the description of fields: as for sites, or that they hold texts."""
    numbers = about_columns(
        {name: value for name, value in fields.items() if isinstance(value, Tensor)}
    )
    return {name: numbers.get(name, [TEXT]) for name in fields}


def about_columns(values: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Return the description of sites: the dtype, and the number of dimensions of a sample."""
    return dict(_columns(values))


def _columns(values: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Any]]]:
    for name, value in values.items():
        yield name, [str(value.dtype).removeprefix("torch."), f"{value.ndim - 1}-dimensional"]


def shown_type(about: Sequence[Any]) -> str:
    """Return the type of a field, as in a sentence."""
    return "texts" if list(about) == [TEXT] else " ".join(map(str, about))
