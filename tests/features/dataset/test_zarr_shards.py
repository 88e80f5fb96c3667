"""Shards in zarr whose files are not as Kedge wrote them: zarr itself would wait or read for ever."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from kedge.features.dataset.folder.formats import Shard

FORMAT = pytest.importorskip("kedge.features.dataset.folder.zarr").FORMAT

pytestmark = pytest.mark.usefixtures("no_threads_of_zarr")


@pytest.fixture
def shard(tmp_path: Path, no_threads_of_zarr: None) -> Path:
    """Write a shard of two samples."""
    path = tmp_path / "0.zarr"
    FORMAT.write(path, Shard({"keys": ["a", "b"], "shapes": {"x": [3]}}, {"x": [torch.ones(2, 3)]}))
    assert FORMAT.open(path).values("x").rows(0, 2).tolist() == [[1, 1, 1], [1, 1, 1]]
    return path


def test_what_is_no_file_is_refused(shard: Path) -> None:
    """A FIFO in place of a chunk."""
    chunk = next(
        file for file in (shard / "site0").rglob("*") if file.is_file() and file.name != "zarr.json"
    )
    chunk.unlink()
    os.mkfifo(chunk)
    with pytest.raises(ValueError, match="is not a file"):
        FORMAT.open(shard).values("x").rows(0, 2)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("chunk_grid", "configuration", "chunk_shape"), [1, 1]),
        (("shape",), [1 << 40, 3]),
        (("shape",), [2, 4]),
    ],
)
def test_another_description_of_an_array_is_refused(
    shard: Path, keys: tuple[str, ...], value: list[int]
) -> None:
    """Other chunks, more rows, or larger samples."""
    file = shard / "site0" / "zarr.json"
    described = json.loads(file.read_text(encoding="utf-8"))
    inner = described
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    file.write_text(json.dumps(described), encoding="utf-8")
    with pytest.raises(ValueError, match=r"as written|samples of the shape"):
        FORMAT.open(shard).values("x").rows(0, 2)
