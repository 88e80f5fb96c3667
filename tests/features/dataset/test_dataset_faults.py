"""What can go wrong on the way: each is said clearly, and what is written stays readable."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kedge.errors import (
    BadSample,
    BeingWritten,
    ExtractionFailed,
    MissingExtra,
    NewerFormat,
    NotFeatures,
    OtherRun,
    RecordingError,
)
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.dataset.folder import formats
from kedge.features.dataset.folder.files import only_writer
from kedge.features.extract import extract
from kedge.features.reduce import Mean
from tests.features.dataset.imagesets import (
    Dicts,
    Images,
    Stream,
    batches_of,
    change_manifest,
    features,
    in_memory,
    net,
    written,
)

SMALL = Options(shard_bytes=2_000)
SKIP = Options(on_bad="skip")


class Broken(Images):
    """Image 13 cannot be read, and image 21 has another size."""

    def __getitem__(self, index):
        if index == 13:
            raise OSError("truncated file")
        found, label = super().__getitem__(index)
        return (found[:, :3] if index == 21 else found), label


class Picky(nn.Module):
    """A model that refuses what has a negative sum, where image 3 is the only one."""

    def __init__(self, refused):
        super().__init__()
        self.inner, self.refused = net(), refused

    def forward(self, x):
        for index in self.refused:
            if (x == Images()[index][0]).flatten(1).all(1).any():
                raise ValueError("cannot take this image")
        return self.inner(x)


def assert_is_a_part(folder, least=1):
    """What is in a folder is right as far as it goes."""
    found = open_features(folder)
    assert len(found.samples) >= least
    wanted = in_memory(batches_of(Images()))
    for name in found:
        rows = [int(key) for key in found.samples]
        torch.testing.assert_close(found[name].tensor(), wanted[name][rows])
    return found


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_named_by_its_key(tmp_path, workers):
    """The error names the key and the reason; its neighbours in the batch are written all the same."""
    options = Options(keys=[f"image {i}" for i in range(50)])
    with pytest.raises(
        BadSample, match="no features of sample 'image 13': OSError: truncated file; fix it"
    ) as raised:
        extract_dataset(
            features(), batches_of(Broken(), num_workers=workers), tmp_path / "out", options
        )

    assert "in __getitem__" in "".join(raised.value.__notes__)
    assert open_features(tmp_path / "out").samples == tuple(
        f"image {i}" for i in range(16) if i != 13
    )


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_samples_are_left_out_and_listed(tmp_path, workers):
    """With on_bad="skip" all others are there, the bad ones are listed with the reason, and are not tried again."""
    found = extract_dataset(
        features(), batches_of(Broken(), num_workers=workers), tmp_path / "out", SKIP
    )

    assert set(found.bad) == {"13", "21"}
    assert found.bad["13"] == "OSError: truncated file"
    assert found.bad["21"].startswith("RuntimeError: ")
    assert found.samples == tuple(str(i) for i in range(50) if i not in (13, 21))
    torch.testing.assert_close(found.sample(22)["4"], in_memory(batches_of(Images()))["4"][22])
    with pytest.raises(
        LookupError, match="no features of a sample '13'; it was left out: OSError: truncated file"
    ):
        found.sample(13)
    again = Broken()
    extract_dataset(features(), batches_of(again), tmp_path / "out", SKIP)
    assert again.loaded == []


@pytest.mark.parametrize("way", ["sort", "pop"])
def test_samples_may_be_put_together_by_a_function_that_changes_its_list(tmp_path, way):
    """The one that does not fit in is found all the same, and no other is left out for it."""

    def collate(some):
        if way == "sort":
            some.sort(key=lambda value: -float(value.sum()))
            return torch.stack(some)
        return torch.stack([some.pop(0) for _ in range(len(some))])

    data = [torch.full((4,), float(i)) for i in range(10)]
    data[7] = torch.zeros(3)
    loader = torch.utils.data.DataLoader(data, batch_size=10, collate_fn=collate)
    found = extract_dataset(
        extract(nn.Sequential(nn.Linear(4, 4)), "0"), loader, tmp_path / "out", SKIP
    )
    assert list(found.bad) == ["7"]
    assert len(found.samples) == 9


def test_reducers_do_not_count_what_is_left_out(tmp_path):
    """A summary is over the samples that have features."""
    options = Options(on_bad="skip", reduce={"4": Mean()})
    found = extract_dataset(features(["4"]), batches_of(Broken()), tmp_path / "out", options)

    assert found.reduced["4"][0].result()["n"] == 48
    assert len(found) == 0


def test_a_sample_that_the_model_cannot_take_is_found(tmp_path):
    """When the model fails on a batch, the samples at fault are found one by one and named."""
    taken = extract(Picky([3, 5]), ["inner.4"])
    with pytest.raises(
        BadSample,
        match=r"sample '3' \(and 1 more of its batch\): ValueError: cannot take this image",
    ):
        extract_dataset(taken, batches_of(Images()), tmp_path / "out")
    found = extract_dataset(taken, batches_of(Images()), tmp_path / "out", SKIP)

    assert found.bad == dict.fromkeys(("3", "5"), "ValueError: cannot take this image")
    assert len(found.samples) == 48
    rows = [i for i in range(50) if i not in (3, 5)]
    torch.testing.assert_close(
        found["inner.4"].tensor(), in_memory(batches_of(Images()))["4"][rows]
    )


@pytest.mark.parametrize("size", [1, 8])
def test_a_model_that_takes_nothing_is_not_a_bad_sample(tmp_path, size):
    """When every sample of a batch fails the model's error is raised, whatever is to be skipped."""
    taken = extract(nn.Linear(7, 7), [":out"])
    with pytest.raises(
        ExtractionFailed,
        match=rf"cannot take a batch of {size} samples.*it cannot take any sample alone either",
    ) as raised:
        extract_dataset(taken, batches_of(Images(), size), tmp_path / "out", SKIP)

    assert not isinstance(raised.value, BadSample)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_stream_ends_at_a_bad_sample(tmp_path):
    """A generator that raised has no next sample, so the error is raised even where others are skipped."""

    class Ending(Stream):
        def __iter__(self):
            yield from list(super().__iter__())[:11]
            raise OSError("no more")

    with pytest.raises(BadSample, match="sample '11': OSError: no more; a stream cannot continue"):
        extract_dataset(features(), batches_of(Ending()), tmp_path / "out", SKIP)
    assert open_features(tmp_path / "out").samples == tuple(map(str, range(11)))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_workers_death_keeps_what_is_written(tmp_path):
    """When a loader's worker is killed the error says so, and the same run goes on from there."""

    class Deadly(Images):
        def __getitem__(self, index):
            if index == 37:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().__getitem__(index)

    with pytest.raises(
        ExtractionFailed,
        match=r"the loader failed after \d+ samples: .*worker.*exited unexpectedly",
    ):
        extract_dataset(
            features(), batches_of(Deadly(), num_workers=1, prefetch_factor=1), tmp_path / "out"
        )
    assert_is_a_part(tmp_path / "out")
    found = extract_dataset(features(), batches_of(Images(), num_workers=1), tmp_path / "out")
    assert sorted(map(int, written(tmp_path / "out"))) == list(range(50))
    assert len(found.samples) == 50


def test_a_full_disk_keeps_what_is_written(tmp_path, monkeypatch):
    """When the disk is full the error says so, no half shard stays, and the run goes on when there is room."""
    usual, calls = formats.write_all, []

    def full(file, content):
        calls.append(len(content))
        if len(calls) > 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(file, content)

    with monkeypatch.context() as patch:
        patch.setattr(formats, "write_all", full)
        with pytest.raises(
            RecordingError,
            match="cannot write .*shard-0-.*: No space left on device; free some space",
        ) as e:
            extract_dataset(features(), batches_of(Images()), tmp_path / "out", SMALL)
    assert str(e.value).endswith("; then run it again, which keeps what is written")
    assert_is_a_part(tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir() if path.name.endswith(".part")] == []
    found = extract_dataset(features(), batches_of(Images()), tmp_path / "out", SMALL)
    assert len(found.samples) == len(written(tmp_path / "out")) == 50


def test_a_limit_of_file_sizes_is_named(tmp_path):
    """What the system refuses in earnest reaches the user as one message."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(RecordingError, match="cannot write .*shard-0-00000"):
            extract_dataset(features(), batches_of(Images()), tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert open_features(tmp_path / "out").samples == ()


def test_an_error_of_a_reducer_is_raised_where_batches_are_computed(tmp_path):
    """What fails in the thread that writes ends the run with that error."""

    class Failing(Mean):
        def update(self, values, keys=None):
            raise ZeroDivisionError("as asked")

    with pytest.raises(
        ExtractionFailed,
        match="the reducer Failing of '4' failed at the batch of .*ZeroDivisionError: as asked",
    ):
        extract_dataset(
            features(), batches_of(Images()), tmp_path / "out", Options(reduce={"4": Failing()})
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda: (features(["1"]), Images(), SMALL), "there the sites are 1 as they are, 4 as they are, here 1 as they are"),
        (lambda: (features(), Images(49), SMALL), "there the data set is samples 50, here samples 49"),
        (lambda: (extract(trained(), ["1", "4"]), Images(), SMALL), "there the model is type Sequential, digest"),
        (lambda: (extract(net(), {"1": torch.abs, "4": None}), Images(), SMALL), "1 through abs"),
        (lambda: (features(dtype=torch.float16), Images(), SMALL), "all kept as float16"),
        (lambda: (features(rename={"4": "x"}), Images(), SMALL), "4, renamed to 'x'"),
        (lambda: (features(), Images(), Options(format="parquet")), "there the shards are safetensors, here parquet"),
        (lambda: (features(), Images(), Options(reduce={"4": Mean()})), "there the reducers are none, here 4 Mean"),
        (lambda: (features(), Stream(50), SMALL), "there the data set is samples 50, here type stream"),
    ],
)  # fmt: skip
def test_a_folder_of_another_run_is_refused(tmp_path, change, message):
    """Other sites, model, transforms, numbers, format, reducers or data are named, and nothing is changed."""
    extract_dataset(features(), batches_of(Images()), tmp_path / "out", SMALL)
    before = sorted(written(tmp_path / "out"))
    taken, data, options = change()
    with pytest.raises(
        OtherRun, match="which holds the features of another run: .*name another folder"
    ) as raised:
        extract_dataset(taken, batches_of(data), tmp_path / "out", options)
    assert message in str(raised.value)
    assert sorted(written(tmp_path / "out")) == before


def test_samples_put_together_otherwise_are_another_run(tmp_path):
    """What a loader's own function does to the samples is in the values, so another one is refused."""
    extract_dataset(features(), batches_of(Images()), tmp_path / "out", SMALL)

    def halved(samples):
        return torch.stack(samples) / 2

    with pytest.raises(
        OtherRun, match="there samples are collated by default_collate, here halved code"
    ):
        extract_dataset(
            features(), batches_of(Images(), collate_fn=halved), tmp_path / "out", SMALL
        )


def test_what_makes_the_arguments_is_named_when_it_fails(tmp_path):
    """An error in `batch=` is not told as one of the model."""

    def images_of(batch):
        return batch["image"]

    with pytest.raises(
        ExtractionFailed, match=r"^batch= \(images_of\) cannot take a batch of 8 samples"
    ):
        extract_dataset(
            features(), batches_of(Images()), tmp_path / "out", Options(batch=images_of)
        )


def trained():
    """The network after a step of training."""
    model = net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01)
    return model


def test_a_folder_with_something_else_in_it_is_refused(tmp_path):
    """Shards are not put among other files."""
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(OtherRun, match="holds other files \\(thesis.tex\\); name a new folder"):
        extract_dataset(features(), batches_of(Images()), tmp_path)


def test_a_newer_format_is_refused(tmp_path):
    """What a later Kedge wrote is neither read nor added to."""
    extract_dataset(features(), batches_of(Images()), tmp_path / "out")
    change_manifest(tmp_path / "out", format=99)

    for use in (
        lambda: open_features(tmp_path / "out"),
        lambda: extract_dataset(features(), [], tmp_path / "out"),
    ):
        with pytest.raises(NewerFormat, match="of format 99, and this Kedge knows formats up to 1"):
            use()


def test_what_is_no_folder_of_features_is_refused(tmp_path):
    """A folder that is missing, empty or damaged is named, with what to do."""
    with pytest.raises(NotFeatures, match="no such folder"):
        open_features(tmp_path / "nothing")
    with pytest.raises(NotFeatures, match="it has no manifest"):
        open_features(tmp_path)
    extract_dataset(features(), batches_of(Images()), tmp_path / "out")
    shard = tmp_path / "out" / "shard-0-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-9])
    with pytest.raises(NotFeatures, match="shard-0-00000.safetensors is damaged"):
        open_features(tmp_path / "out")["4"].tensor()
    (tmp_path / "out" / "features.json").write_text("{")
    with pytest.raises(NotFeatures, match="cannot be read"):
        open_features(tmp_path / "out")


def test_two_writers_in_one_folder_are_refused(tmp_path):
    """While a process writes, another one is refused with its name; afterwards it is not."""
    with only_writer(tmp_path, 0):
        program = "import sys; from pathlib import Path; from kedge.features.dataset.folder.files import only_writer\n"
        program += "with only_writer(Path(sys.argv[1]), 0): pass"
        other = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert f"process {os.getpid()} on" in other.stderr
        assert "is writing there; wait for it to end" in other.stderr
        with pytest.raises(BeingWritten):
            extract_dataset(features(), batches_of(Images()), tmp_path)
    extract_dataset(features(), batches_of(Images()), tmp_path)


@pytest.mark.skipif(
    os.geteuid() == 0 and not Path("/proc").exists(), reason="root may write everywhere"
)
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    """A place where no folder can be made is an error that says what to do, before anything is computed."""
    place = Path("/proc/features") if os.geteuid() == 0 else tmp_path / "closed" / "out"
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
    data = Images()
    with pytest.raises(RecordingError, match=f"cannot make the folder {place}: .*; .* place"):
        extract_dataset(features(), batches_of(data), place)
    assert data.loaded == []


def test_a_format_without_its_package_says_what_to_install(tmp_path, monkeypatch):
    """The message says what to install."""
    monkeypatch.setitem(sys.modules, "zarr", None)
    monkeypatch.delitem(sys.modules, "kedge.features.dataset.folder.zarr", raising=False)
    with pytest.raises(
        MissingExtra, match=r"zarr need the package zarr.*pip install 'kedge\[zarr\]'"
    ):
        extract_dataset(features(), batches_of(Images()), tmp_path / "out", Options(format="zarr"))


def test_what_a_model_wants_otherwise_is_not_a_samples_fault(tmp_path):
    """A site that a model does not have is that error, not a bad sample."""
    with pytest.raises(LookupError, match="nowhere"):
        extract_dataset(extract(net(), ["nowhere"]), batches_of(Dicts()), tmp_path / "out", SKIP)


def test_a_model_that_breaks_on_the_way_makes_no_bad_samples(tmp_path):
    """When the model no longer takes what it took before, the error is raised and no sample is blamed."""
    calls = []

    def breaking(x):
        calls.append(len(x))
        if len(calls) > 3:
            raise RuntimeError("the device is gone")
        return {"sum": x.sum((2, 3))}

    with pytest.raises(
        ExtractionFailed, match="the device is gone; it cannot take any sample alone either"
    ):
        extract_dataset(breaking, batches_of(Images()), tmp_path / "out", SKIP)
    assert open_features(tmp_path / "out").bad == {}
    assert len(open_features(tmp_path / "out").samples) == 24
