"""For all damage to a folder of features: the values that are read are those that were written, or an error names the file."""

from __future__ import annotations

import atexit
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge.errors import KedgeError
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.reduce import Mean
from tests.properties.profiles import fuzzed
from tests.properties.spoiling import fresh, spoil, spoilers

FORMATS = ["safetensors", "parquet", "zarr"]
FILES = [
    "features.json",
    "index-0.jsonl",
    "state-0.safetensors",
    *(f"shard-0-0000{i}" for i in range(3)),
]
INSIDE = ["", "/zarr.json", "/site0/zarr.json", "/site0/c/0/0", "/site1/c/0"]

Values = dict[str, dict[str, torch.Tensor]]


@cache
def workplace() -> tuple[tempfile.TemporaryDirectory[str], dict[str, Values]]:
    """Return a folder with features in each format, and their values by sample and site."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1), nn.Flatten(0)).eval()
    loader = DataLoader(TensorDataset(torch.rand(40, 3), torch.arange(40)), batch_size=8)
    texts = lambda batch: [f"label {int(y)}" for y in batch[1]]
    held: dict[str, Values] = {}
    for name in FORMATS:
        features = kedge.extract(model, {"0": None, "2": None})
        options = Options(
            format=name,
            shard_bytes=200,
            reduce={"0": [Mean()]},
            keep=["0"],
            labels=True,
            fields={"text": texts},
        )
        extract_dataset(features, loader, Path(made.name) / name, options)
        held[name] = _read(Path(made.name) / name)
    return made, held


def _read(folder: Path) -> Values:
    """Read everything in a folder: each sample, each column, each shard, and what was reduced."""
    found = open_features(folder)
    values: Values = {key: {} for key in found.samples}
    for site, column in found.items():
        for key, value in zip(found.samples, column, strict=True):
            values[key][site] = value
        assert torch.equal(
            column.tensor(), torch.stack([values[key][site] for key in found.samples])
        )
    for key, label, text in zip(
        found.samples, found.fields["labels"], found.fields["text"], strict=True
    ):
        values[key] |= {"labels": label, "text": torch.tensor(int(text.removeprefix("label ")))}
    for keys, columns in found.shards():
        for site, column in columns.items():
            assert all(
                torch.equal(values[key][site], value)
                for key, value in zip(keys, column, strict=True)
            )
    values["reduced"] = {
        f"{site} {part}": value
        for site, some in found.reduced.items()
        for part, value in some[0].state().items()
    }
    return values


@pytest.mark.usefixtures("no_threads_of_zarr")
@fuzzed
@given(
    st.sampled_from(FORMATS).flatmap(
        lambda name: st.tuples(
            st.just(name),
            spoilers(
                st.sampled_from(FILES).flatmap(
                    lambda file: st.sampled_from(
                        [
                            file if not file.startswith("shard") else f"{file}.{name}{inside}"
                            for inside in INSIDE
                        ]
                        if name == "zarr"
                        else [file if not file.startswith("shard") else f"{file}.{name}"]
                    )
                )
            ),
        )
    )
)
def test_a_damaged_data_set_is_read_right_or_refused(case: tuple[str, list[Any]]) -> None:
    """Whatever is in its files, no wrong value is read: what is left is right, or an error of Kedge's names a file."""
    made, held = workplace()
    name, changes = case
    folder = fresh(Path(made.name) / name, Path(made.name) / "damaged")
    spoil(folder, changes)
    try:
        found = _read(folder)
    except KedgeError as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert str(folder) in told or "manifest" in told
        return
    expected = held[name]
    reduced = found.pop("reduced")
    for key, values in found.items():
        assert values.keys() <= expected[key].keys()
        assert all(torch.equal(value, expected[key][site]) for site, value in values.items())
    assert all(torch.equal(value, expected["reduced"][part]) for part, value in reduced.items())
