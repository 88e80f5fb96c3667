"""Several ranks into one folder: each takes its part, and together they have everything once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data.distributed import DistributedSampler

from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.dataset.options import SharingRank
from kedge.features.reduce import Mean
from tests import forked
from tests.features.dataset.imagesets import (
    Images,
    Stream,
    assert_equal,
    batches_of,
    features,
    in_memory,
    written,
)

pytestmark = pytest.mark.timing

PROGRAM = """
import sys, torch
import torch.distributed as dist
from tests.features.dataset.imagesets import Images, batches_of, features
from kedge.features.dataset import Options, extract_dataset
from kedge.features.reduce import Mean

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
loader = batches_of(Images(), shuffle=len(sys.argv) > 2)
found = extract_dataset(features(), loader, sys.argv[1], Options(shard_seconds=0, reduce={"4": Mean()}, keep=["4"]))
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(folder, *words):
    """Run the program at two ranks."""
    (folder / "program.py").write_text(PROGRAM)
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        str(folder / "program.py"),
        *words,
    ]
    done = forked.run([sys.executable, *command], env=environment, timeout=120, forks=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("order", ["", "shuffled"])
def test_two_ranks_under_torchrun_read_as_one(tmp_path, order):
    """Each of two processes writes its own shards, and reading gives what one process computes, sums included."""
    torchrun(tmp_path, str(tmp_path / "out"), *filter(None, [order]))
    found, wanted = open_features(tmp_path / "out"), in_memory(batches_of(Images()))

    assert {path.name.split("-")[1] for path in (tmp_path / "out").glob("shard-*")} == {"0", "1"}
    assert sorted(map(int, written(tmp_path / "out"))) == list(range(50))
    if order:
        torch.testing.assert_close(found["1"].tensor(), wanted["1"])
    else:
        assert_equal(found, wanted)
    mean = found.reduced["4"][0].result()
    assert mean["n"] == 50
    torch.testing.assert_close(mean["mean"], wanted["4"].double().mean(0), rtol=1e-5, atol=1e-6)


def at(rank, world, **options):
    """The options of a rank."""
    return Options(rank=SharingRank(rank, world), shard_seconds=0, **options)


def test_another_number_of_ranks_goes_on(tmp_path):
    """What one of two ranks has done is not done again by the three of the next run."""
    extract_dataset(features(), batches_of(Images()), tmp_path, at(1, 2))
    assert 0 < len(written(tmp_path)) < 50
    for rank in range(3):
        extract_dataset(features(), batches_of(Images()), tmp_path, at(rank, 3))

    assert sorted(map(int, written(tmp_path))) == list(range(50))
    torch.testing.assert_close(
        open_features(tmp_path)["1"].tensor(), in_memory(batches_of(Images()))["1"]
    )


@pytest.mark.parametrize("length", [48, 50, 51])
def test_a_distributed_sampler_keeps_its_part(tmp_path, length):
    """A loader with a DistributedSampler is not split again, and what it repeats for evenness is taken once."""
    for rank in range(4):
        sampler = DistributedSampler(Images(length), 4, rank, seed=3)
        extract_dataset(
            features(),
            batches_of(Images(length), sampler=sampler),
            tmp_path,
            at(rank, 4, reduce={"4": Mean()}),
        )

    assert sorted(map(int, written(tmp_path))) == list(range(length))
    assert open_features(tmp_path).reduced["4"][0].result()["n"] == length


@pytest.mark.parametrize("split", [True, False])
def test_streams_are_split_or_each_ranks_own(tmp_path, split):
    """A stream that every rank reads is split between them; with split=False each rank's stream is its own."""
    for rank in range(2):
        extract_dataset(features(), batches_of(Stream(20)), tmp_path, at(rank, 2, split=split))
    keys = open_features(tmp_path).samples

    own = [f"{rank}/{number}" for rank in range(2) for number in range(20)]
    assert sorted(keys) == sorted(map(str, range(20)) if split else own)


def test_a_rank_is_what_its_launcher_says(monkeypatch):
    """The launcher's environment tells rank and world; without it, or with nonsense in it, a process is alone."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert SharingRank.here() == SharingRank(2, 4)
    monkeypatch.setenv("RANK", "4")
    assert SharingRank.here() == SharingRank(0, 1)
