"""Runs that are killed at any moment, and go on: no sample is lost, none is there twice."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from kedge.errors import NotFeatures
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.dataset.folder import files
from kedge.features.dataset.folder.writing import StoredReducers
from kedge.features.reduce import Mean, TopK
from tests import forked
from tests.features.dataset.imagesets import Images, batches_of, features, in_memory, written
from tests.marks import full

pytestmark = pytest.mark.timing

KILLS = 12
LENGTH = 300
#: Forks a process for each attempt, so that torch is imported once, and kills it after a random
#: time.
PROGRAM = f"""
import json, os, random, signal, sys, time
from contextlib import suppress
import torch
from tests.features.dataset.imagesets import Images, batches_of, features, net
from kedge.features.dataset import Options, extract_dataset
from kedge.features.reduce import Histogram, Mean

out, workers, reduces, form, most = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "True", sys.argv[4], int(sys.argv[5])
torch.set_num_threads(1)
reduce = {{"4": [Mean(), Histogram(edges=[-9, -1, 0, 1, 9])]}} if reduces else {{}}

class Slow(Images):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)

def named(batch):
    return [f"number {{int(y)}}" for y in batch[1]]

def attempt(folder):
    loader = batches_of(Slow({LENGTH}), num_workers=workers, shuffle=reduces)
    options = Options(
        shard_bytes=4_000, reduce=reduce, keep=list(reduce), format=form, labels=True, fields={{"name": named}}
    )
    extract_dataset(features(), loader, folder, options)

def forked(folder, seconds):
    child = os.fork()
    if not child:
        os.setsid()
        torch.manual_seed(os.getpid())
        attempt(folder)
        os._exit(0)
    time.sleep(seconds)
    os.kill(child, signal.SIGKILL)
    killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
    with suppress(ProcessLookupError):  # a loader's worker that had just begun does not see that its parent is gone
        os.killpg(child, signal.SIGKILL)
    return killed

chance = random.Random(workers * 2 + reduces)
start = time.monotonic()
attempt(out + "/measured")
whole, kills, folders = time.monotonic() - start, 0, 0
while kills < most:
    folders += 1
    patience = whole / 3  # it grows, or a run that takes long to start would never come to anything
    while forked(f"{{out}}/{{folders}}", chance.uniform(0, patience)):
        kills, patience = kills + 1, patience * 1.1
print(json.dumps([kills, folders]))
"""


@pytest.mark.parametrize(
    ("workers", "reduces", "form", "most"),
    [
        pytest.param(0, False, "safetensors", KILLS, id="tensors"),
        full(2, False, "safetensors", KILLS, id="tensors-2"),
        full(0, True, "safetensors", KILLS, id="reducers"),
        pytest.param(2, True, "safetensors", KILLS, id="reducers-2"),
        pytest.param(0, True, "zarr", 3, id="zarr"),
        full(0, True, "parquet", 3, id="parquet"),
    ],
)
@pytest.mark.usefixtures("no_threads_of_zarr")
def test_kills_lose_and_double_no_sample(tmp_path, workers, reduces, form, most):
    """After kills at random moments all samples are there once, with their values, and were summed up once."""
    path = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    words = [str(tmp_path), str(workers), str(reduces), form, str(most)]
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, *words]
    done = forked.run(command, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    kills, folders = json.loads(done.stdout)
    wanted = in_memory(batches_of(Images(LENGTH)))

    assert kills >= most
    for folder in ["measured", *range(1, folders + 1)]:
        found = open_features(tmp_path / str(folder))
        assert sorted(map(int, written(found.path))) == list(range(LENGTH))
        assert found.labels[:].tolist() == [number % 3 for number in range(LENGTH)]
        assert list(found.fields["name"]) == [f"number {number % 3}" for number in range(LENGTH)]
        for name, values in wanted.items():
            if not reduces:
                assert torch.equal(found[name].tensor(), values)
            torch.testing.assert_close(found[name].tensor(), values)
        if reduces:
            mean, histogram = (reducer.result() for reducer in found.reduced["4"])
            assert mean["n"] == LENGTH
            torch.testing.assert_close(
                mean["mean"], wanted["4"].double().mean(0), rtol=1e-5, atol=1e-6
            )
            assert histogram["counts"].sum().item() == LENGTH * 4


@pytest.mark.parametrize("moment", ["before the state", "before the index"])
def test_a_shard_that_reducers_have_not_counted_is_taken_again(tmp_path, monkeypatch, moment):
    """A kill between a shard and its reducers' state, or the index, counts each of its samples once all the same."""
    options = Options(shard_seconds=0, reduce={"4": [Mean(), TopK(3)]}, keep=["4"])
    write = StoredReducers.write

    class Killed(BaseException):
        pass

    def dies(self, through):
        if through < 3 or moment == "before the index":
            write(self, through)
        if through == 3:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(StoredReducers, "write", dies)
        with pytest.raises(Killed):
            extract_dataset(features(["4"]), batches_of(Images()), tmp_path / "out", options)
    assert (tmp_path / "out" / "shard-0-00003.safetensors").exists()
    between = open_features(tmp_path / "out")
    assert (
        between.reduced["4"][0].result()["n"]
        == len(between.samples)
        == len(written(tmp_path / "out"))
    )
    found = extract_dataset(features(["4"]), batches_of(Images()), tmp_path / "out", options)
    once = extract_dataset(features(["4"]), batches_of(Images()), tmp_path / "once", options)

    assert sorted(map(int, written(tmp_path / "out"))) == list(range(50))
    assert torch.equal(found["4"].tensor(), once["4"].tensor())
    for mine, other in zip(found.reduced["4"], once.reduced["4"], strict=True):
        assert repr(mine.result()) == repr(other.result())


def test_the_index_is_made_again_from_the_shards(tmp_path):
    """Without an index, or with half a line of it, all shards are found; the next run writes it anew."""
    options = Options(shard_seconds=0)
    first = extract_dataset(features(["4"]), batches_of(Images()), tmp_path / "out", options)
    index = tmp_path / "out" / "index-0.jsonl"
    whole = index.read_text()
    for torn in ("", whole[: len(whole) // 2], "[1]\n" + whole):
        index.write_text(torn)
        again = open_features(tmp_path / "out")
        assert again.samples == first.samples
        assert torch.equal(again["4"].tensor(), first["4"].tensor())
        extract_dataset(features(["4"]), batches_of(Images()), tmp_path / "out", options)
        assert index.read_text() == whole
    index.unlink()
    assert open_features(tmp_path / "out").samples == first.samples


def test_a_shard_appears_when_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """A shard is written under another name, brought to the disk, and then renamed."""
    steps = []
    monkeypatch.setattr(
        files, "_sync", lambda path: steps.append((path.name, sorted(tmp_path.glob("out/shard-*"))))
    )
    extract_dataset(features(), batches_of(Images(8)), tmp_path / "out")

    assert [name for name, _ in steps] == [".shard-0-00000.safetensors.part", "out"]
    assert [[path.name for path in there] for _, there in steps] == [
        [],
        ["shard-0-00000.safetensors"],
    ]


def test_what_a_killed_writer_left_is_removed(tmp_path):
    """Half-written files of this rank go with the next run, those of others stay."""
    extract_dataset(features(), batches_of(Images(8)), tmp_path / "out")
    mine, others = (tmp_path / "out" / f".shard-{rank}-00007.safetensors.part" for rank in (0, 1))
    mine.write_bytes(b"half")
    others.write_bytes(b"half")
    extract_dataset(features(), batches_of(Images(8)), tmp_path / "out")

    assert not mine.exists()
    assert others.exists()


def test_a_lost_shard_is_taken_again(tmp_path):
    """Where a shard is missing reading says so, and the next run takes its samples again."""
    options = Options(shard_bytes=2_000)
    extract_dataset(features(["1"]), batches_of(Images()), tmp_path / "out", options)
    (tmp_path / "out" / "shard-0-00001.safetensors").unlink()

    with pytest.raises(
        NotFeatures, match="lacks shard-0-00001.safetensors; run the extraction again"
    ):
        open_features(tmp_path / "out")
    found = extract_dataset(features(["1"]), batches_of(Images()), tmp_path / "out", options)
    assert torch.equal(found["1"].tensor(), in_memory(batches_of(Images()), features(["1"]))["1"])


def test_a_lost_shard_that_was_summed_up_is_an_error(tmp_path):
    """Reducers cannot forget samples, so a run with reducers does not go on without one of its shards."""
    options = Options(shard_bytes=2_000, reduce={"4": Mean()}, keep=["4"], shard_seconds=0)
    extract_dataset(features(["4"]), batches_of(Images()), tmp_path / "out", options)
    (tmp_path / "out" / "shard-0-00001.safetensors").unlink()

    with pytest.raises(NotFeatures, match="reducers have counted those samples already"):
        extract_dataset(features(["4"]), batches_of(Images()), tmp_path / "out", options)
