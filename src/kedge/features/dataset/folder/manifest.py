"""The manifest: a description of the run that wrote a folder, so that no other run adds to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from secrets import token_hex
from typing import Any

import torch
from torch import Tensor, nn

from kedge.errors import ExtractionFailed, NewerFormat, NotFeatures, OtherRun
from kedge.features.dataset.batch import Columns, FieldValues
from kedge.features.dataset.folder.fingerprint import alike, has_digest, identity, listed, weights
from kedge.features.dataset.folder.formats import type_name
from kedge.features.dataset.keys_and_fields import entry_of, must_be_names, name_of, texts
from kedge.features.dataset.loading import BatchSource, is_loader, is_stream
from kedge.features.dataset.options import Options
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
    if not isinstance(value, str) or not isinstance(getattr(torch, value, None), torch.dtype):
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
    ". If you have changed no function, a function has changed an object that it "
    "refers to, which counts as part of it: run a new process to continue this folder, "
    "or identify your functions yourself, with version='...' (--version) in a new "
    "folder"
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
        number = shortened(str(found["format"]))
        writer = shortened(str(found.get("kedge")))
        raise NewerFormat(
            f"{folder} is of format {number}, and this Kedge knows formats up to "
            f"{FORMAT}; Kedge {writer} wrote it; install that version or a later one"
        )
    return dict(found)


def settle(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Write a folder's manifest unless another process has done so, then check that it describes the same run.

    Raises:
        OtherRun: It describes another run.
        RecordingError: The folder cannot be written to.
    """
    path = folder / MANIFEST
    temporary = folder / f".{MANIFEST}.{token_hex(4)}"
    if read_manifest(folder) is None:
        manifest = {"format": FORMAT, "kedge": metadata.version("kedge"), **wanted}
        with told(f"write {path}"):
            try:
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(json.dumps(manifest, indent=2) + "\n")
                    file.flush()
                    os.fsync(file.fileno())
                try:
                    path.hardlink_to(temporary)
                except FileExistsError:
                    pass  # another process has written it
                except OSError:  # a file system without hard links
                    if not path.exists():
                        temporary.replace(path)
            finally:
                temporary.unlink(missing_ok=True)
    check_same(folder, read_manifest(folder) or {}, wanted)


def check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Check that a folder belongs to the wanted run, as far as both descriptions have the same entries.

    Raises:
        OtherRun: The folder belongs to another run.
    """
    wanted = json.loads(json.dumps(wanted))  # as it would be read from the file
    found = {"fields": {}, **found}  # earlier versions had none
    differences = []
    remedy = "name another folder"
    digests_differ = False
    for name, what in _WHAT.items():
        if name not in found or name not in wanted or alike(found[name], wanted[name]):
            continue
        there = what.format(_shown(found[name]))
        differences.append(f"there {there}, here {_shown(wanted[name])}")
        if name == "model":
            remedy += ", or load or seed the weights if each process draws its own"
        if has_digest(found[name]) and has_digest(wanted[name]):
            digests_differ = True
    if differences:
        if digests_differ:
            remedy += _ABOUT_DIGESTS
        raise OtherRun(
            f"cannot add to {folder}, which holds the features of another run: "
            f"{'; '.join(differences)}; {remedy}"
        )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return str(value)


def check_folder(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Check that a folder is empty, or belongs to the wanted run as far as its description is known.

    Raises:
        OtherRun: The folder holds something else.
        ExtractionFailed: The run has reducers for values that it does not have, which an earlier
            Kedge allowed.
    """
    names = sorted(path.name for path in folder.iterdir())
    others = [name for name in names if not name.startswith((".", "writer-"))]
    # After the listing, because another rank may be writing the first files.
    found = read_manifest(folder)
    if found is not None:
        check_same(folder, found, wanted)
        if "columns" in found:
            must_be_names(wanted["reduce"], found["columns"])
    elif others:
        raise OtherRun(
            f"cannot write to {folder}, which holds other files ({others[0]}); name a new folder"
        )


def about_run(features: Any, loader: Any, options: Options) -> dict[str, Any]:
    """Return a run's description as known before it begins; a run that continues needs the same description."""
    version = options.version
    model = {"type": name_of(features)}
    functions = {}
    if isinstance(features, nn.Module):
        kind = type(getattr(features, "model", features))
        model = {"type": kind.__qualname__, "digest": weights(features)}
    else:
        functions["features"] = identity(features, version)

    sites = {}
    wanted = getattr(features, "wanted", None)
    if wanted is not None:
        for text, change in zip(wanted.texts, wanted.transforms, strict=True):
            sites[text] = "as they are"
            if change is not None:
                sites[text] = f"through {name_of(change)}"
                if isinstance(features, nn.Module):
                    functions[text] = identity(change, version)
        for name, new in sorted(wanted.rename.items()):
            sites[f"{name}, renamed"] = f"to {new!r}"
        if wanted.dtype is not None:
            sites["all"] = f"kept as {type_name(wanted.dtype)}"

    keys = "the samples' places"
    if callable(options.keys):
        keys = identity(options.keys, version)
    elif isinstance(options.keys, str):
        keys = repr(options.keys)
    elif options.keys is not None:
        keys = listed(texts(options.keys))

    fields = {}
    for name, field in options.stored_fields.items():
        entry = entry_of(field)
        fields[name] = f"the entry {entry!r}"
        if callable(entry):
            fields[name] = identity(entry, version)

    length = BatchSource(loader).length
    data: dict[str, Any] = {"type": "stream"} if length is None else {"samples": length}
    collate = {}
    if is_loader(loader):
        collate["collate"] = identity(loader.collate_fn, version)
        if is_stream(loader):
            data["workers"] = max(1, loader.num_workers)

    reduce = {}
    for name, reducers in options.reducers.items():
        reduce[name] = list(map(_shown_reducer, reducers))

    return {
        "files": options.format,
        "model": model,
        "sites": sites,
        "functions": functions,
        "keys": keys,
        "batch": identity(options.batch, version),
        "fields": fields,
        "version": "none" if version is None else repr(version),
        **collate,
        "data": data,
        "reduce": reduce,
    }


def _shown_reducer(reducer: Reducer) -> str:
    """Return a reducer's class and settings; the class alone of the user's own."""
    return repr(reducer) if hasattr(reducer, "settings") else type(reducer).__qualname__


def about_content(columns: Columns) -> dict[str, dict[str, list[Any]]]:
    """Return what is known with the first batch: the types of the sites' values, and of the fields."""
    both = sorted(columns.fields.keys() & columns.values.keys())
    if both:
        raise ExtractionFailed(
            f"{both[0]!r} is the name of a site and of a field (labels= is the field "
            "'labels'); rename the site"
        )
    return {"columns": types_of(columns.values), "field_types": types_of(columns.fields)}


def about_pooling(features: Any) -> dict[str, dict[str, str]]:
    """Return what was done with pooled values in the first batch, by name; later batches may have other sizes."""
    work = getattr(features, "work", None)
    described = getattr(work, "described", {})
    return {"pooled": dict(described)} if described else {}


def types_of(values: Mapping[str, FieldValues]) -> dict[str, list[Any]]:
    """Return the description of sites or fields: the dtype and a sample's number of dimensions, or that they hold texts."""
    types: dict[str, list[Any]] = {}
    for name, value in values.items():
        types[name] = [TEXT]
        if isinstance(value, Tensor):
            types[name] = [type_name(value.dtype), f"{value.ndim - 1}-dimensional"]
    return types


def shown_type(about: Sequence[Any]) -> str:
    """Return the type of a field, as in a sentence."""
    return "texts" if list(about) == [TEXT] else " ".join(map(str, about))
