"""The formats of shards, and reading: what was written comes back to the last bit."""

from __future__ import annotations

import io
import json

import duckdb
import numpy as np
import pytest
import torch
import zarr
from rich.console import Console
from safetensors.torch import load_file

from kedge.errors import ExtractionFailed, NoSuchSite
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.dataset.engine import progress_bar
from kedge.features.dataset.folder.samples import numbered, place_order
from kedge.features.reduce import Covariance, Mean, TopK
from tests.features.dataset.imagesets import Images, Stream, batches_of, features, image, in_memory

FORMATS = ["safetensors", "zarr", "parquet"]


pytestmark = pytest.mark.usefixtures("no_threads_of_zarr")
TYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("form", FORMATS)
def test_every_type_and_shape_comes_back(tmp_path, form):
    """Values of every type, with no, one and several dimensions a sample, are what they were."""
    taken = {f"{shape}": torch.randn(20, *shape) * 40 for shape in ((), (3,), (2, 3, 1), (0, 4))}
    kept = {
        f"{dtype} {name}": value.abs().to(dtype) for dtype in TYPES for name, value in taken.items()
    }

    def rows(x):
        return {name: value[x[:, 0].long()] for name, value in kept.items()}

    batches = list(torch.arange(20.0)[:, None].split(6))
    found = extract_dataset(rows, batches, tmp_path / "out", Options(format=form, shard_seconds=0))

    assert len(list((tmp_path / "out").glob(f"shard-*.{form}"))) == 4
    for name, values in kept.items():
        assert found[name].dtype == values.dtype
        assert torch.equal(found[name].tensor(), values), name
        assert torch.equal(found[name][7], values[7])


@pytest.mark.parametrize("form", FORMATS)
def test_a_run_goes_on_in_every_format(tmp_path, form):
    """Shards of any format are found, and only what is missing is taken."""
    options = Options(format=form, shard_seconds=0, reduce={"4": Mean()}, keep=["4"])
    with pytest.raises(ExtractionFailed, match="RuntimeError: stop"):
        extract_dataset(features(), stopping(20), tmp_path / "out", options)
    found = extract_dataset(features(), stopping(99), tmp_path / "out", options)

    assert torch.equal(found["1"].tensor(), in_memory(stopping(99))["1"])
    assert found.reduced["4"][0].result()["n"] == 48


def stopping(at):
    """Batches of images, with an error after so many."""

    class Batches:
        def __iter__(self):
            for start in range(0, 48, 8):
                if start >= at:
                    raise RuntimeError("stop")
                yield [torch.stack([Images()[i][0] for i in range(start, start + 8)])]

    return Batches()


def test_other_programs_read_the_shards(tmp_path):
    """Safetensors, zarr and DuckDB open the files without Kedge, keys included."""
    wanted = in_memory(batches_of(Images()))
    for form in FORMATS:
        extract_dataset(features(), batches_of(Images()), tmp_path / form, Options(format=form))
    whole = load_file(tmp_path / "safetensors" / "shard-0-00000.safetensors")
    group = zarr.open_group(tmp_path / "zarr" / "shard-0-00000.zarr", mode="r")
    rows = duckdb.sql(
        f"""SELECT key, "4" FROM '{tmp_path}/parquet/*.parquet' WHERE key = '13'"""
    ).fetchall()

    assert torch.equal(whole["1"], wanted["1"])
    arrays = {array.attrs["site"]: np.asarray(array) for _, array in group.arrays()}
    np.testing.assert_array_equal(arrays["1"], wanted["1"].numpy())
    assert group.attrs["kedge"]["keys"][13] == "13"
    assert rows == [("13", pytest.approx(wanted["4"][13].tolist()))]


def test_complex_numbers_are_read_as_they_were(tmp_path):
    """Such as those of a Fourier transform, in safetensors."""
    taken = lambda x: {"spectrum": torch.fft.rfft(x.flatten(1))}
    found = extract_dataset(taken, batches_of(Images()), tmp_path / "out")

    assert found["spectrum"].dtype == torch.complex64
    wanted = torch.fft.rfft(image(7).flatten())
    torch.testing.assert_close(found["spectrum"][7], wanted)


@pytest.mark.parametrize(
    ("form", "dtype"), [("safetensors", torch.complex128), ("parquet", torch.complex64)]
)
def test_a_type_that_a_format_cannot_hold_is_an_error_that_names_it(tmp_path, form, dtype):
    """The message names the site, and what was there before is kept."""
    taken = lambda x: {"sum": x.sum((2, 3)).to(dtype)}
    with pytest.raises(ExtractionFailed, match="sum is of torch.complex"):
        extract_dataset(taken, batches_of(Images()), tmp_path / "out", Options(format=form))
    assert open_features(tmp_path / "out").samples == ()


def test_columns_are_read_by_number_slice_key_and_as_arrays(tmp_path):
    """A column reads what is asked for, across the borders of shards."""
    extract_dataset(
        features(), batches_of(Images(), shuffle=True), tmp_path / "out", Options(shard_seconds=0)
    )
    found, wanted = open_features(tmp_path / "out"), in_memory(batches_of(Images()))["4"]
    column = found["4"]

    assert list(found) == ["1", "4"]
    assert column.shape == (50, 4)
    for which in (slice(3, 19), slice(None, None, 7), [5, 1, 5], slice(0, 0)):
        torch.testing.assert_close(column[which], wanted[which])
    torch.testing.assert_close(column[-1], wanted[-1])
    np.testing.assert_allclose(np.asarray(column), wanted.numpy(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(torch.stack(list(column)), wanted)
    torch.testing.assert_close(found.sample(9)["4"], wanted[9])
    pieces = {
        key: value
        for keys, values in found.shards()
        for key, value in zip(keys, values["4"], strict=True)
    }
    torch.testing.assert_close(torch.stack([pieces[str(i)] for i in range(50)]), wanted)
    with pytest.raises(IndexError, match="50 samples; there is no 50"):
        column[50]
    with pytest.raises(NoSuchSite, match="no site 'fc'; it has '1', '4'"):
        found["fc"]


def test_bfloat16_becomes_an_array(tmp_path):
    """NumPy has no bfloat16: an array holds the same numbers as float32."""
    found = extract_dataset(features(dtype=torch.bfloat16), batches_of(Images()), tmp_path / "out")

    assert found["4"].numpy().dtype == np.float32
    np.testing.assert_array_equal(found["4"].numpy(), found["4"].tensor().float().numpy())


def order(*shards):
    """Sort the places of shards."""
    return place_order(shards, [numbered(places) for places in shards])


def test_samples_are_in_the_order_of_the_data():
    """Indices count as numbers, streams rank by rank and worker by worker, names as text; the first of two counts."""
    assert order(["10", "9", "0", "9"]).tolist() == [2, 1, 0]
    assert order(["1:0", "0:11", "0:2"]).tolist() == [2, 1, 0]
    assert order(["1/0", "0/3"]).tolist() == [1, 0]
    assert order(["b", "a", "10", "b"]).tolist() == [2, 1, 0]
    assert order([]).tolist() == []


def test_reducers_stand_for_tensors(tmp_path):
    """A site with reducers has no tensors on the disk, and its summaries are those of all samples."""
    options = Options(
        reduce={"4": [Covariance(), TopK(2)], "1": Mean(positions="samples")}, shard_seconds=0
    )
    found = extract_dataset(features(), batches_of(Images()), tmp_path / "out", options)
    wanted = in_memory(batches_of(Images()))
    covariance, most = (reducer.result() for reducer in found.reduced["4"])

    assert list(found) == []
    torch.testing.assert_close(covariance["covariance"], wanted["4"].double().T.cov())
    assert found.reduced["1"][0].result()["n"] == 50 * 16
    torch.testing.assert_close(
        torch.as_tensor(most["values"]).flatten().double().max(), wanted["4"].double().max()
    )
    assert len(found.samples) == 50
    assert "Covariance(" in repr(found)


def test_progress_is_for_terminals_only(capfd, monkeypatch):
    """On a terminal there are the count, the rate and the time left; elsewhere, and in ``CI``, there is nothing."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    with progress_bar(None, Console(file=screen, force_terminal=True, width=100)) as bar:
        task = bar.add_task("features", total=40)
        for _ in range(4):
            bar.advance(task, 10)
    quiet = io.StringIO()
    with progress_bar(None, Console(file=quiet)) as bar:
        bar.advance(bar.add_task("features", total=40), 10)
    monkeypatch.setenv("CI", "true")
    with progress_bar(None, Console(file=quiet, force_terminal=True)) as bar:
        bar.advance(bar.add_task("features", total=40), 10)

    assert "40/40" in screen.getvalue()
    assert "/s" in screen.getvalue()
    assert "0:00:00" in screen.getvalue()
    assert quiet.getvalue() == ""


def test_an_extraction_says_nothing_where_nobody_looks(tmp_path, capfd):
    """Without a terminal, and with progress=False, neither stream gets a letter."""
    extract_dataset(features(), batches_of(Images()), tmp_path / "a")
    extract_dataset(
        features(), batches_of(Stream(), num_workers=1), tmp_path / "b", Options(progress=False)
    )

    assert capfd.readouterr() == ("", "")


def test_the_folder_says_what_it_is(tmp_path):
    """The manifest is JSON with the format's number, the sites and the model's digest; printing tells the rest."""
    found = extract_dataset(features(), batches_of(Images()), tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "features.json").read_text())

    assert manifest["format"] == 1
    assert manifest["columns"] == {
        "1": ["float32", "3-dimensional"],
        "4": ["float32", "1-dimensional"],
    }
    assert manifest["model"]["type"] == "Sequential"
    assert repr(found).splitlines() == [
        f"{tmp_path / 'out'}: 50 samples",
        "  1  float32 [6, 4, 4]",
        "  4  float32 [4]",
    ]
