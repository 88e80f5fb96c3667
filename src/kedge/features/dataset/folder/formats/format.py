"""The interface of shard formats, and their list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.errors import required

#: The formats by module name: the suffix of a shard, and the package that the module needs.
_FILES = {
    "safetensors": (".safetensors", "safetensors"),
    "zarr": (".zarr", "zarr"),
    "parquet": (".parquet", "pyarrow"),
}

#: Types that only PyTorch has; other formats store them as float32, which contains all their numbers.
WIDENED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Shard:
    """The contents of one file.

    Attributes:
        about: Its description, of JSON types: keys, places, skipped samples.
        columns: For each site its values, in consecutive pieces.
    """

    about: Mapping[str, Any]
    columns: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """The number of samples with features."""
        return len(self.about["keys"])


class Format(Protocol):
    """Writing and reading of shards; a format has no state."""

    suffix: str
    #: Whether the types in `WIDENED` are stored as wider ones.
    widens: bool

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard to a path that does not exist yet."""

    def about(self, path: Path) -> dict[str, Any]:
        """Return a shard's description, without reading its values."""

    def read(self, path: Path, site: str, rows: slice) -> Tensor:
        """Return consecutive rows of a site."""


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


def numpy_pieces(pieces: Sequence[Tensor]) -> list[Any]:
    """Return values as arrays; see `WIDENED`."""
    return [(piece.float() if piece.dtype in WIDENED else piece).numpy() for piece in pieces]


def as_written(values: Any, dtype: str) -> Tensor:
    """Return an array from a file as a tensor of the original dtype."""
    return torch.from_numpy(values).to(getattr(torch, dtype))
