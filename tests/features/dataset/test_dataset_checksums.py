"""Checksums: what is read of a folder of features is what was written, or an error names the shard and the sample."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kedge
from kedge.errors import NotFeatures
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.dataset.folder import formats
from kedge.features.reduce import Mean

pytestmark = pytest.mark.usefixtures("no_threads_of_zarr")
FORMATS = ["safetensors", "zarr", "parquet"]


def _extract(folder: Path, form: str = "safetensors", **options) -> Path:
    """Write the features of 40 samples in five shards of eight."""
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 1)).eval()
    loader = DataLoader(TensorDataset(torch.rand(40, 3)), batch_size=8)
    extract_dataset(
        kedge.extract(model, {"0": None}),
        loader,
        folder,
        Options(format=form, shard_bytes=100, **options),
    )
    return folder


def _flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


def test_a_flipped_byte_is_an_error_that_names_its_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One changed bit of a value is reported with the shard and the key; the other samples can still be read."""
    monkeypatch.setattr(formats, "BLOCK", 1)  # a checksum for each sample
    folder = _extract(tmp_path / "out", keys=[f"image {i}" for i in range(40)])
    sound = open_features(folder)["0"].tensor()
    _flip(
        folder / "shard-0-00001.safetensors", -6 * 4 * 2 - 1
    )  # the last byte of the sixth of eight
    column = open_features(folder)["0"]

    with pytest.raises(
        NotFeatures,
        match=r"shard-0-00001\.safetensors is damaged: the values of '0' of the sample 'image 13' have changed",
    ):
        column.tensor()
    with pytest.raises(NotFeatures, match="image 13"):
        open_features(folder).sample("image 13")
    with pytest.raises(NotFeatures, match="image 13"):
        list(open_features(folder).shards())
    assert torch.equal(column[:13], sound[:13])
    assert torch.equal(column[14:], sound[14:])


@pytest.mark.parametrize("form", FORMATS)
def test_any_rows_are_read_whatever_the_blocks(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With blocks of a few rows, single rows, slices and lists are those of the whole column."""
    monkeypatch.setattr(formats, "BLOCK", 6 * 4 * 3)
    column = open_features(_extract(tmp_path / "out", form))["0"]
    whole = column.tensor()

    assert torch.equal(torch.stack(list(column)), whole)
    assert all(torch.equal(column[i], whole[i]) for i in range(40))
    for which in (slice(3, 9), slice(6, 7), [39, 0, 17, 17], slice(0, 40, 7), slice(4, 4)):
        assert torch.equal(column[which], whole[which])


def test_numbers_that_a_format_widens_are_summed_as_they_are_read(tmp_path: Path) -> None:
    """A NaN of any bits in bfloat16, which zarr and Parquet hold as float32, is no false alarm."""
    values = torch.tensor([0x7FC0, 0x7F81, 0xFFC1 - 0x10000, 0x3F80], dtype=torch.int16).view(
        torch.bfloat16
    )[:, None]
    for form in FORMATS:
        extract_dataset(
            lambda x: {"v": x},
            DataLoader(TensorDataset(values), batch_size=2),
            tmp_path / form,
            Options(format=form, device="cpu"),
        )
        found = open_features(tmp_path / form)["v"].tensor()
        assert found.isnan().flatten().tolist() == [True, True, True, False]


@pytest.mark.parametrize("form", FORMATS)
def test_a_shard_in_the_place_of_another_is_noticed(tmp_path: Path, form: str) -> None:
    """A copy of another shard, or the same shard of another run, is an error and not its samples twice."""
    folder = _extract(tmp_path / "out", form)
    other = _extract(tmp_path / "other", form, keys=[f"k{i}" for i in range(40)])
    place = folder / f"shard-0-00002.{form}"
    for source, words in (
        (folder / f"shard-0-00001.{form}", "is a copy of the shard with the number 1 of rank 0"),
        (other / place.name, r"is not the shard that index-0\.jsonl describes"),
    ):
        shutil.rmtree(place) if place.is_dir() else place.unlink()
        (shutil.copytree if source.is_dir() else shutil.copy)(source, place)
        with pytest.raises(NotFeatures, match=words):
            open_features(folder)["0"].tensor()


def test_shards_of_earlier_versions_are_read_and_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checksums everything is read as before, with one line that says so; a shard that is too short is an error."""
    with monkeypatch.context() as patch:
        patch.setattr("kedge.features.dataset.folder.writing.checked", lambda shard, widened: shard)
        folder = _extract(tmp_path / "out")
    index = folder / "index-0.jsonl"
    lines = [json.loads(line) for line in index.read_text().splitlines()]
    index.write_text(
        "".join(
            json.dumps({k: v for k, v in line.items() if k != "check"}) + "\n" for line in lines
        )
    )
    capsys.readouterr()
    found = open_features(folder)

    assert found["0"].tensor().shape == (40, 6)
    assert found["0"][7].shape == (6,)
    assert capsys.readouterr().err.count("without checksums") == 1


def test_a_changed_description_is_noticed(tmp_path: Path) -> None:
    """A key that has become another one in the shard's header is an error."""
    folder = _extract(tmp_path / "out", keys=[f"image {i}" for i in range(40)])
    shard = folder / "shard-0-00003.safetensors"
    shard.write_bytes(shard.read_bytes().replace(b"image 25", b"image 75"))

    with pytest.raises(
        NotFeatures, match=r"shard-0-00003\.safetensors is damaged: its description has changed"
    ):
        open_features(folder).samples


def test_a_changed_state_of_a_reducer_is_noticed(tmp_path: Path) -> None:
    """A flipped byte in what a reducer has summed up is an error."""
    folder = _extract(tmp_path / "out", reduce={"0": Mean()})
    _flip(folder / "state-0.safetensors", -3)

    with pytest.raises(
        NotFeatures, match=r"state-0\.safetensors is damaged \(its values have changed\)"
    ):
        open_features(folder).reduced


BAD_LINES = [
    "7",
    "null",
    "[" * 100_000,
    '{"name": 3}',
    '{"name": "../../etc/passwd", "rank": 0, "number": 0}',
    "\0" * 30,
]


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_of_the_index_is_rebuilt_from_the_shards(tmp_path: Path, line: str) -> None:
    """Wrong types, deep JSON and foreign names in the index: the shards themselves say what they hold."""
    folder = _extract(tmp_path / "out")
    index = folder / "index-0.jsonl"
    index.write_text(line + "\n" + index.read_text())

    assert open_features(folder)["0"].tensor().shape == (40, 6)


MANIFESTS = [
    ("[" * 100_000, "more than 50 levels"),
    ("7", "it is 7 but must be an object"),
    ('{"format": "1"}', "format is '1' but must be a whole number"),
    (
        '{"format": 1, "columns": {"0": ["seed", "1-dimensional"]}}',
        r"columns\.0\[0\] is no type of numbers",
    ),
    ('{"format": 1, "columns": []}', "columns is a list but must be an object"),
]


@pytest.mark.parametrize(("content", "words"), MANIFESTS)
def test_a_manifest_of_wrong_types_is_one_error(tmp_path: Path, content: str, words: str) -> None:
    """What is wrong is named with its place."""
    folder = _extract(tmp_path / "out")
    (folder / "features.json").write_text(content)

    with pytest.raises(NotFeatures, match=words):
        open_features(folder)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    """Each file of the folder may be a pipe: reading ends with an error that names it."""
    folder = _extract(tmp_path / "out", reduce={"0": Mean()}, keep=["0"])
    for name in (
        "features.json",
        "index-0.jsonl",
        "state-0.safetensors",
        "shard-0-00001.safetensors",
    ):
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(NotFeatures, match=name):
            open_features(folder).samples
        (folder / name).unlink()
        (folder / name).write_bytes(content)
