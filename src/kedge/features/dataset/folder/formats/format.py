"""What a format of shards has to do, and which there are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from kedge.errors import MissingExtra

#: The files of the formats: the module, the suffix of a shard, and the package that it needs.
_FILES = {
    "safetensors": (".safetensors", "safetensors"),
    "zarr": (".zarr", "zarr"),
    "parquet": (".parquet", "pyarrow"),
}

#: Numbers that only PyTorch has; other formats hold them as float32, which has them all.
WIDENED = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Shard:
    """What one file holds.

    Attributes:
        about: What is known of it: keys, places, samples that were left out; as JSON holds it.
        columns: For each site its values, in pieces that follow each other.
    """

    about: Mapping[str, Any]
    columns: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """How many samples there are."""
        return len(self.about["keys"])


class Format(Protocol):
    """Writes and reads shards; a class has no state."""

    suffix: str

    def write(self, path: Path, shard: Shard) -> None:
        """Write a shard to a path where nothing is."""

    def about(self, path: Path) -> dict[str, Any]:
        """Read what is known of a shard, without its values."""

    def read(self, path: Path, site: str, rows: slice) -> Tensor:
        """Read consecutive rows of a site."""


def format_of(name: str) -> Format:
    """Return a format.

    Raises:
        MissingExtra: It needs a package that is not installed.
    """
    suffix, package = _FILES[name]
    try:
        made: Format = import_module(f"kedge.features.dataset.folder.formats.{name}").FORMAT
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtra(
            f"shards in the format {name} need the package {package}, which is not installed: pip install 'kedge[{name}]'"
        ) from error
    assert made.suffix == suffix  # noqa: S101 - or what is looked for in a folder would not be what is written
    return made


def format_name(path: Path) -> str | None:
    """Name the format of a shard by its suffix."""
    return next((name for name, (suffix, _) in _FILES.items() if path.suffix == suffix), None)


def numpy_pieces(pieces: Sequence[Tensor]) -> list[Any]:
    """Return values as arrays; see `WIDENED`."""
    return [(piece.float() if piece.dtype in WIDENED else piece).numpy() for piece in pieces]


def as_written(values: Any, dtype: str) -> Tensor:
    """Return values that were read as an array in the dtype with which they were written."""
    return torch.from_numpy(values).to(getattr(torch, dtype))
