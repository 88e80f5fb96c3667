"""The features of a whole data set: the right values under the right keys, whatever the loader."""

from __future__ import annotations

import itertools
import pickle
import re
import time
import weakref

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from kedge.errors import ExtractionFailed
from kedge.features.dataset import Options, compute, engine, extract_dataset, open_features
from kedge.features.dataset.batch import SampleBatch
from kedge.features.dataset.folder import writing
from kedge.features.dataset.folder.files import entries
from kedge.features.dataset.folder.formats import Safetensors
from kedge.features.dataset.folder.manifest import settle, types_of
from kedge.features.dataset.folder.writing import Shards
from kedge.features.dataset.options import SharingRank
from kedge.features.extract import extract
from kedge.stderr import SpacedLines
from tests.features.dataset.imagesets import (
    Dicts,
    Doubling,
    Images,
    Stream,
    assert_equal,
    batches_of,
    features,
    image,
    in_memory,
    net,
    written,
)

SMALL = Options(shard_bytes=5_000)


@pytest.mark.parametrize("workers", [0, 2])
def test_values_are_those_of_a_loop_in_memory(tmp_path, workers):
    """Every site has the bits that a loop over the same loader keeps; the last batch is a short one."""
    loader = batches_of(Images(), num_workers=workers)
    found = extract_dataset(features(), loader, tmp_path / "out", SMALL)

    assert len(list((tmp_path / "out").glob("shard-*"))) > 2
    assert len(Images()) % loader.batch_size
    assert found.samples == tuple(map(str, range(50)))
    assert_equal(found, in_memory(loader))
    assert_equal(open_features(tmp_path / "out"), in_memory(loader))


@pytest.mark.parametrize(
    ("source", "total"), [(Images(), " of 50"), (Stream(), "")], ids=["data set", "stream"]
)
def test_a_log_tells_how_far_a_long_extraction_is(tmp_path, capfd, monkeypatch, source, total):
    """Where no progress bar is shown there are lines, unless nothing is to be shown or another rank tells of it."""
    now = itertools.count(0.0, 8.0)
    monkeypatch.setattr(engine, "SpacedLines", lambda: SpacedLines(clock=lambda: next(now)))
    extract_dataset(features(), batches_of(source), tmp_path / "a")

    told = capfd.readouterr().err.splitlines()
    assert len(told) > 1
    line = rf"\[kedge\] features: (\d+){total} samples(, [\d,]+/s)?(, [\d.]+ \w+ left)?"
    counts = [int(re.fullmatch(line, one)[1]) for one in told]
    assert counts == sorted(set(counts))

    extract_dataset(features(), batches_of(source), tmp_path / "b", Options(progress=False))
    extract_dataset(features(), batches_of(source), tmp_path / "c", Options(rank=SharingRank(1, 2)))
    assert capfd.readouterr() == ("", "")


def test_a_plain_function_will_do(tmp_path):
    """What is called like a model and returns tensors by name has its values written."""
    model = net()
    found = extract_dataset(lambda x: {"logits": model(x)}, batches_of(Images()), tmp_path / "out")

    assert_equal(found, {"logits": torch.cat([model(x) for x, _ in batches_of(Images())]).detach()})


def test_the_samples_of_a_shuffled_loader_keep_their_keys(tmp_path):
    """Whatever order a sampler draws, a key is the data set's index, and reading is in the data set's order."""
    found = extract_dataset(features(), batches_of(Images(), shuffle=True), tmp_path / "out", SMALL)
    wanted = in_memory(batches_of(Images()))

    assert written(tmp_path / "out") != sorted(written(tmp_path / "out"), key=int)
    assert found.samples == tuple(map(str, range(50)))
    for name, values in wanted.items():
        torch.testing.assert_close(found[name].tensor(), values)
        torch.testing.assert_close(found.sample(17)[name], values[17])


@pytest.mark.parametrize(
    "sampler",
    [
        lambda data: {"sampler": range(9, 31)},
        lambda data: {"sampler": [9, 30, 9, *range(9, 31)]},
        lambda data: {"batch_sampler": [[9, 11], list(range(9, 31))]},
        lambda data: {"batch_sampler": BatchSampler(range(9, 31), 4, drop_last=True)},
    ],
)
def test_each_sample_that_a_sampler_draws_is_there_once(tmp_path, sampler):
    """Subsets, repetitions, a sampler of batches and drop_last: what is drawn is there, and once."""
    found = extract_dataset(features(), DataLoader(Images(), **sampler(Images())), tmp_path / "out")

    assert found.samples == tuple(map(str, range(9, 31)))
    assert len(written(tmp_path / "out")) == 22
    torch.testing.assert_close(found["4"].tensor(), in_memory(batches_of(Images()))["4"][9:31])


def test_a_sampler_with_replacement_gives_what_it_draws(tmp_path):
    """A sample that is drawn again and again is taken once."""
    torch.manual_seed(0)
    drawn = list(WeightedRandomSampler(torch.ones(50), 40))
    found = extract_dataset(features(), batches_of(Images(), sampler=drawn), tmp_path / "out")

    assert found.samples == tuple(map(str, sorted(set(drawn))))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_stream_is_numbered(tmp_path, workers):
    """An iterable data set's samples are named by their number, and by the worker's too where several read."""
    loader = batches_of(Stream(20), num_workers=workers)
    found = extract_dataset(features(), loader, tmp_path / "out", SMALL)
    alone = in_memory(batches_of(Images(20)))

    if workers < 2:
        assert found.samples == tuple(map(str, range(20)))
        assert_equal(found, alone)
    else:
        assert sorted(found.samples) == sorted(
            f"{worker}:{number}" for worker in (0, 1) for number in range(20)
        )
        torch.testing.assert_close(found.sample("1:13")["4"], alone["4"][13])


def test_any_iterable_of_batches_will_do(tmp_path):
    """A list of tensors is numbered row by row."""
    batches = list(torch.stack([image(i) for i in range(20)]).split(6))
    found = extract_dataset(features(), batches, tmp_path / "out")

    assert found.samples == tuple(map(str, range(20)))
    assert_equal(found, in_memory([b] for b in batches))


def test_a_dict_holds_keyword_arguments(tmp_path):
    """The entries of a dict batch are the model's arguments by name."""
    model = Doubling()
    found = extract_dataset(
        extract(model, ["linear", ":out"]), batches_of(Dicts(20)), tmp_path / "out"
    )
    whole = [Dicts(20)[i] for i in range(20)]

    with torch.no_grad():
        wanted = model(
            torch.stack([d["x"] for d in whole]), torch.stack([d["twice"] for d in whole])
        )
    torch.testing.assert_close(found[":out"].tensor(), wanted)


def test_a_function_makes_arguments_and_keys_of_a_batch(tmp_path):
    """With `batch=` the model gets what it returns, and with `keys=` samples are called what it says."""
    options = Options(
        batch=lambda b: {"x": b[0], "twice": b[1] == 1},
        keys=lambda b: [f"p{x[0, 0, 1]:.6f}" for x in b[0]],
    )
    found = extract_dataset(
        extract(Doubling(), [":out"]), batches_of(Images(20)), tmp_path / "out", options
    )

    assert found.samples == tuple(f"p{image(i)[0, 0, 1]:.6f}" for i in range(20))
    assert found.number(f"p{image(5)[0, 0, 1]:.6f}") == 5


def test_a_sequence_names_the_samples(tmp_path):
    """`keys=` with a name for each sample is looked up by the data set's index, shuffled or not."""
    names = [f"image {i}.png" for i in range(50)]
    found = extract_dataset(
        features(), batches_of(Images(), shuffle=True), tmp_path / "out", Options(keys=names)
    )

    assert found.samples == tuple(names)
    torch.testing.assert_close(
        found.sample("image 7.png")["4"], in_memory(batches_of(Images()))["4"][7]
    )


@pytest.mark.parametrize(
    "keys", [["a", "b", "a", *map(str, range(47))], lambda batch: ["a"] * len(batch[0])]
)
def test_a_key_stands_for_one_sample(tmp_path, keys):
    """A key that is given twice is an error which names it and both samples."""
    with pytest.raises(
        ExtractionFailed, match="the key 'a' belongs to two samples, at 0 and at [12]"
    ):
        extract_dataset(features(), batches_of(Images()), tmp_path / "out", Options(keys=keys))


def test_keys_must_be_as_many_as_samples(tmp_path):
    """A sequence of keys that is too short is refused before anything is computed."""
    with pytest.raises(ExtractionFailed, match="3 entries and the data set 50 samples"):
        extract_dataset(features(), batches_of(Images()), tmp_path / "out", Options(keys="abc"))


def test_a_value_without_the_samples_dimension_is_refused(tmp_path):
    """What has no row for each sample cannot be written, and the message says how to make it so."""
    taken = extract(net(), {"4": lambda v: v.mean()})

    with pytest.raises(ExtractionFailed, match=r"'4' has shape \(\) for a batch of 8 samples"):
        extract_dataset(taken, batches_of(Images()), tmp_path / "out")


def test_samples_of_different_sizes_are_kept_apart(tmp_path):
    """Where a value's shape changes a new shard begins; samples are read one by one then."""
    batches = [torch.ones(4, 3, size, size) for size in (4, 4, 6)]
    found = extract_dataset(features(["1"]), batches, tmp_path / "out")

    assert found["1"].shapes == {(6, 4, 4), (6, 6, 6)}
    assert found["1"][3].shape == (6, 4, 4)
    assert found["1"][8:].shape == (4, 6, 6, 6)
    with pytest.raises(LookupError, match="2 shapes"):
        found["1"].tensor()


def test_what_is_done_is_not_loaded_again(tmp_path):
    """A second run of the same loads nothing and changes no file."""
    extract_dataset(features(), batches_of(Images()), tmp_path / "out", SMALL)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("[si]*-*")}
    again = Images()
    found = extract_dataset(features(), batches_of(again), tmp_path / "out", SMALL)

    assert again.loaded == []
    assert {
        name: (tmp_path / "out" / name).stat().st_mtime_ns
        for name in before
        if name.startswith("s")
    } == {name: time for name, time in before.items() if name.startswith("s")}
    assert found.samples == tuple(map(str, range(50)))


@pytest.mark.parametrize("sampler", [SequentialSampler, RandomSampler])
def test_a_run_that_goes_on_takes_what_is_left(tmp_path, sampler):
    """After an interruption only what is missing is loaded, in whole batches."""
    first, second = Images(), Images()

    class Stopping(Images):
        def __getitem__(self, index):
            if len(first.loaded) == 30:
                raise KeyboardInterrupt
            return first[index]

    with pytest.raises(KeyboardInterrupt):
        extract_dataset(
            features(), batches_of(Stopping(), sampler=sampler(first)), tmp_path / "out", SMALL
        )
    done = set(written(tmp_path / "out"))
    assert len(done) == 24
    found = extract_dataset(
        features(), batches_of(second, sampler=sampler(second)), tmp_path / "out", SMALL
    )

    assert sorted(second.loaded) == sorted(set(range(50)) - set(map(int, done)))
    assert sorted(map(int, written(tmp_path / "out"))) == list(range(50))
    torch.testing.assert_close(found["1"].tensor(), in_memory(batches_of(Images()))["1"])


def test_memory_is_bounded_however_slow_the_disk(tmp_path, monkeypatch):
    """While a slow disk writes, no more values are alive than one shard and what may wait; no batch is lost."""
    alive: list[weakref.ref] = []
    most = 0
    own, write = compute._own, Safetensors.write

    def counted(name, value, size):
        nonlocal most
        kept, arrival = own(name, value, size)
        alive.append(weakref.ref(kept))
        most = max(most, sum(tensor.nbytes for ref in alive if (tensor := ref()) is not None))
        return kept, arrival

    monkeypatch.setattr(compute, "_own", counted)
    monkeypatch.setattr(Safetensors, "write", lambda *args: (time.sleep(0.005), write(*args)))
    found = extract_dataset(
        features(["1"]), batches_of(Images(400)), tmp_path / "out", Options(shard_bytes=8_000)
    )
    batch = 8 * 6 * 4 * 4 * 4
    total = 400 * 6 * 4 * 4 * 4

    assert total > 5 * most
    assert most <= 2 * 8_000 + 3 * batch
    assert [ref for ref in alive if ref() is not None] == []
    assert len(found.samples) == 400


def test_the_first_shards_are_smaller(tmp_path, monkeypatch):
    """Each is as large as all before it, up to the size that was asked for, so that little is left to write at the end."""
    monkeypatch.setattr(writing, "_FIRST_BYTES", 4 * 3072)
    given = DataLoader(Images(400), batch_size=4)
    extract_dataset(features(["1"]), given, tmp_path / "out", Options(shard_bytes=16 * 3072))

    assert [entry.samples for entry in entries(tmp_path / "out")] == [32, 32, 64, 128, 128, 16]


def test_a_shard_has_no_more_text_than_its_header_holds(tmp_path, monkeypatch):
    """Keys and texts fill a shard, too, so that its header stays below the limit of safetensors."""
    monkeypatch.setattr(writing, "_MOST_CHARACTERS", 100)
    captions = lambda batch: [f"caption {int(label):02}" for label in batch[1]]
    given = DataLoader(Images(40), batch_size=4)
    extract_dataset(features(["1"]), given, tmp_path / "out", Options(fields={"caption": captions}))

    assert [entry.samples for entry in entries(tmp_path / "out")] == [12, 12, 12, 4]


def test_values_are_not_those_that_the_model_overwrites(tmp_path):
    """A model that gives the same memory again and again has its values kept as they were."""
    kept = torch.empty(8, 2)
    taken = lambda x: {"sum": kept[: len(x)].copy_(x.sum((1, 2, 3))[:, None].expand(-1, 2))}
    found = extract_dataset(taken, batches_of(Images()), tmp_path / "out")

    torch.testing.assert_close(
        found["sum"].tensor()[:, 0], torch.stack([image(i).sum() for i in range(50)])
    )


def test_a_slice_does_not_keep_what_it_is_cut_from(tmp_path, monkeypatch):
    """What waits to be written is as large as the value, not as the tensor it is a part of."""
    sizes = []
    monkeypatch.setattr(
        compute, "_own", lambda *args, own=compute._own: sizes.append(own(*args)) or sizes[-1]
    )
    extract_dataset(lambda x: {"part": x[:, :1, :1, :1]}, batches_of(Images()), tmp_path / "out")

    assert {value.untyped_storage().nbytes() // len(value) for value, _ in sizes} == {4}


def test_an_empty_data_set_has_no_features(tmp_path):
    """Nothing to take is no error: the folder opens and holds nothing."""
    found = extract_dataset(
        features(), batches_of(Images(0), sampler=SequentialSampler([])), tmp_path / "out"
    )

    assert (found.samples, len(found), found.bad) == ((), 0, {})
    assert "0 samples" in repr(open_features(tmp_path / "out"))


def test_options_say_what_there_is():
    """A word that is not known is refused with those that are."""
    with pytest.raises(ExtractionFailed, match="on_bad='ignore': use one of 'raise', 'skip'"):
        Options(on_bad="ignore")
    with pytest.raises(ExtractionFailed, match="only sites of reduce="):
        Options(keep=["4"])


def test_the_work_on_a_batch_can_be_sent_elsewhere(tmp_path):
    """What computes a batch is a value that can be pickled, and what writes shards takes its result anywhere."""
    there = pickle.loads(pickle.dumps(compute.BatchComputer(features())))
    options = pickle.loads(pickle.dumps(Options(rank=SharingRank(3, 4))))
    x = torch.stack([image(i) for i in range(5)])
    columns = pickle.loads(pickle.dumps(there(SampleBatch(list("01234"), list("abcde"), x, []))))
    settle(tmp_path, {"columns": types_of(columns.values)})
    shelf = Shards(tmp_path, 3, options)
    shelf.add(columns)
    shelf.write()

    assert open_features(tmp_path).samples == tuple("abcde")
    assert_equal(open_features(tmp_path), in_memory([[x]]))
