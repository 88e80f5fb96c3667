"""The shard formats that there are, each loaded when it is first used, since most need a package that may be missing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kedge.errors import required
from kedge.features.dataset.folder.formats.format import Format

if TYPE_CHECKING:  # so that the import contract sees what `format_of` loads
    from kedge.features.dataset.folder.formats import parquet, safetensors, zarr  # noqa: F401

#: The formats by module name: the suffix of a shard, and the package that the module needs.
_FILES = {
    "safetensors": (".safetensors", "safetensors"),
    "zarr": (".zarr", "zarr"),
    "parquet": (".parquet", "pyarrow"),
}


def format_of(name: str) -> Format:
    """Return a format by its name.

    Raises:
        MissingExtra: The format needs a package that is not installed.
    """
    suffix, package = _FILES[name]
    with required(package, name, f"shards in the format {name} need"):
        made: Format = import_module(f"kedge.features.dataset.folder.formats.{name}").FORMAT
    assert made.suffix == suffix  # noqa: S101 - otherwise readers would not find the written files
    return made


def format_name(path: Path) -> str | None:
    """Return the name of a shard's format, by its suffix; None if it is unknown."""
    return next((name for name, (suffix, _) in _FILES.items() if path.suffix == suffix), None)
