"""What run the features in a folder are of, so that no other run adds to them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from secrets import token_hex
from typing import Any

from torch import Tensor, nn

from kedge.atomic_write import told
from kedge.errors import NewerFormat, NotFeatures, OtherRun
from kedge.features.dataset.fingerprint import alike, identity, listed, name_of, weights
from kedge.features.dataset.keys import texts
from kedge.features.reduce.reducer import Reducer

MANIFEST = "features.json"
#: The number of the format, which grows when an older Kedge can no longer read what is written.
FORMAT = 1

_WHAT = {
    "files": "the shards are {}",
    "model": "the model is {}",
    "data": "the data set is {}",
    "sites": "the sites are {}",
    "functions": "the functions are {}",
    "keys": "the keys are {}",
    "batch": "batch= is {}",
    "collate": "samples are put together by {}",
    "reduce": "the reducers are {}",
    "columns": "the values are {}",
}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Read what run a folder is of; None if there is no manifest.

    Raises:
        NotFeatures: It cannot be read as one.
        NewerFormat: A later Kedge wrote it.
    """
    path = folder / MANIFEST
    try:
        with told(f"read {path}"):
            found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if found is None:
            return None
        version = int(found["format"])
    except (ValueError, KeyError, TypeError) as error:
        raise NotFeatures(f"{path} cannot be read ({error!r}); it is not what an extraction writes") from error
    if version > FORMAT:
        raise NewerFormat(
            f"{folder} is of format {version}, and this Kedge knows formats up to {FORMAT}; "
            f"it was written by Kedge {found.get('kedge')}, install that or a later one"
        )
    return dict(found)


def settle(folder: Path, wanted: Mapping[str, Any]) -> None:
    """Write down what run a folder is of, if no other process has; then see that it is the same run.

    Raises:
        OtherRun: It is another.
        RecordingError: The folder cannot be written to.
    """
    temporary = folder / f".{MANIFEST}.{token_hex(4)}"
    if read_manifest(folder) is None:
        with told(f"write {folder / MANIFEST}"):
            try:
                with temporary.open("w", encoding="utf-8") as file:
                    file.write(
                        json.dumps({"format": FORMAT, "kedge": metadata.version("kedge"), **wanted}, indent=2) + "\n"
                    )
                    file.flush()
                    os.fsync(file.fileno())
                _put(temporary, folder / MANIFEST)
            finally:
                temporary.unlink(missing_ok=True)
    check_same(folder, read_manifest(folder) or {}, wanted)


def _put(temporary: Path, path: Path) -> None:
    """Give a file its name, unless another process did so first."""
    try:
        path.hardlink_to(temporary)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not path.exists():
            temporary.replace(path)


def check_same(folder: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """See that a folder is of the run that is wanted, as far as both say.

    Raises:
        OtherRun: It is not.
    """
    wanted = json.loads(json.dumps(wanted))  # as the file would give it back
    unlike = [name for name in _WHAT if name in found and name in wanted and not alike(found[name], wanted[name])]
    if unlike:
        said = "; ".join(
            f"there {_WHAT[name].format(_shown(found[name]))}, here {_shown(wanted[name])}" for name in unlike
        )
        drawn = ", or load or seed the weights if each process draws its own" if "model" in unlike else ""
        raise OtherRun(
            f"cannot add to {folder}, which holds the features of another run: {said}; name another folder{drawn}"
        )


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_shown(each)}" for name, each in value.items()) or "none"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " ".join(map(str, value))
    return str(value)


def about_model(features: Any) -> dict[str, Any]:
    """Describe a model: its class, and a digest of what it has learnt."""
    if not isinstance(features, nn.Module):
        return {"type": name_of(features)}
    return {"type": type(getattr(features, "model", features)).__qualname__, "digest": weights(features)}


def about_sites(features: Any) -> dict[str, Any]:
    """Describe which sites' values are taken, and what they go through, as far as features of Kedge say."""
    wanted = getattr(features, "wanted", None)
    if wanted is None:
        return {}
    sites = {
        text: "as they are" if change is None else f"through {name_of(change)}" for text, change in _taken(features)
    }
    renamed = {f"{name}, renamed": f"to {new!r}" for name, new in sorted(wanted.rename.items())}
    kept = {} if wanted.dtype is None else {"all": f"kept as {str(wanted.dtype).removeprefix('torch.')}"}
    return sites | renamed | kept


def about_functions(features: Any) -> dict[str, str]:
    """Describe what computes features, where that is no model, or what sites' values go through."""
    if not isinstance(features, nn.Module):
        return {"features": identity(features)}
    return {text: identity(change) for text, change in _taken(features) if change is not None}


def about_keys(keys: Any) -> str:
    """Describe what samples are called: not at all, by a column, by a function, or by a list."""
    if keys is None:
        return "the samples' places"
    if callable(keys):
        return identity(keys)
    return repr(keys) if isinstance(keys, str) else listed(texts(keys))


def _taken(features: Any) -> list[tuple[str, Any]]:
    wanted = getattr(features, "wanted", None)
    return [] if wanted is None else list(zip(wanted.texts, wanted.transforms, strict=True))


def about_reducers(reducers: Mapping[str, Sequence[Reducer]]) -> dict[str, list[str]]:
    """Describe reducers by how they were made."""
    return {name: [_reducer(one) for one in some] for name, some in reducers.items()}


def _reducer(reducer: Any) -> str:
    return repr(reducer) if hasattr(reducer, "settings") else type(reducer).__qualname__


def about_columns(values: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    """Describe sites by the type of their numbers and by how many dimensions a sample has."""
    return dict(_columns(values))


def _columns(values: Mapping[str, Tensor]) -> Iterator[tuple[str, list[Any]]]:
    for name, value in values.items():
        yield name, [str(value.dtype).removeprefix("torch."), f"{value.ndim - 1}-dimensional"]
