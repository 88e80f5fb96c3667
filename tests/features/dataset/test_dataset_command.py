"""``kedge extract``: a whole data set from the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from kedge.cli.main import main
from kedge.features.dataset import open_features
from tests import forked
from tests.features.dataset.imagesets import Images, batches_of, features, in_memory

pytestmark = pytest.mark.timing

PARTS = """
import os, time
import torch
from tests.features.dataset.imagesets import Dicts, Images, Stream, batches_of, net
from kedge.features.reduce import TopK

model = net()
def data(): return Images()
def loader(): return batches_of(Images(), 4)
def number(): return 3
def needs(n): return net()
def fails(*batch): raise KeyError("weights")
def unkeyed(batch): return 3
calls = []
def fails_later(batch):
    calls.append(1)
    if len(calls) > 3: raise KeyError("later")
    return [f"{len(calls)} {i}" for i in range(len(batch[1]))]
def halved(batch): return batch[0] / 2
def named(batch): return [f"p{x[0, 0, 1]:.6f}" for x in batch[0]]
class Slow(Images):
    def __getitem__(self, index):
        if os.environ.get("RANK") == "1": time.sleep(0.1)
        return super().__getitem__(index)
def absolute(values): return values.abs()
def most(): return TopK(3)
class Bad(Images):
    def __getitem__(self, index):
        if index % 7 == 3: raise ValueError("no image")
        return super().__getitem__(index)
"""


@pytest.fixture
def kedge(tmp_path):
    """Run `kedge extract` in a folder with a module of models and data sets."""
    (tmp_path / "parts.py").write_text(PARTS)

    def run(*words, code=0, launcher=("-m", "kedge"), **variables):
        paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
            **variables,
        }
        command = [sys.executable, *launcher, "extract", *words, "--out", "out"]
        done = forked.run(command, cwd=tmp_path, env=environment, forks=True)
        assert done.returncode == code, done.stderr
        return done

    return run


@pytest.fixture
def typed(tmp_path, monkeypatch, capsys):
    """Run `kedge extract` in this process, which is started already."""
    (tmp_path / "parts.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "parts", raising=False)

    def run(*words, code=0):
        ended = main(["extract", *words, "--out", "out"])
        said = capsys.readouterr()
        assert ended == code, said.err
        return said

    return run


def test_a_data_set_is_extracted_by_name(kedge, tmp_path):
    """The folder has the bits of a loop in memory, the command says what is in it, and again there is nothing to do."""
    done = kedge(
        "parts:net",
        "--data",
        "parts:data",
        "--sites",
        "1",
        "4",
        "--batch-size",
        "8",
        "--rename",
        "4=logits",
    )
    found, wanted = open_features(tmp_path / "out"), in_memory(batches_of(Images()))

    assert torch.equal(found["1"].tensor(), wanted["1"])
    assert torch.equal(found["logits"].tensor(), wanted["4"])
    assert done.stdout.splitlines() == [
        "out: 50 samples",
        "  1  float32 [6, 4, 4]",
        "  logits  float32 [4]",
    ]
    assert done.stderr == ""
    again = kedge(
        "parts:net",
        "--data",
        "parts:data",
        "--sites",
        "1",
        "4",
        "--batch-size",
        "8",
        "--rename",
        "4=logits",
    )
    assert again.stdout == done.stdout


def test_transforms_types_reducers_and_formats(kedge, tmp_path):
    """Every option reaches the engine."""
    kedge(
        "parts.py:model", "--data", "parts:loader", "--sites", "1", "4", "--transform", "1=mean", "4=parts:absolute",
        "--dtype", "float16", "--format", "parquet", "--reduce", "4=parts:most",
    )  # fmt: skip
    found, wanted = open_features(tmp_path / "out"), in_memory(batches_of(Images()))

    torch.testing.assert_close(
        found["1"].tensor(), wanted["1"].mean((2, 3)).half(), rtol=1e-3, atol=1e-3
    )
    assert found.reduced["4"][0].result()["n"] == 50
    assert list((tmp_path / "out").glob("*.parquet"))


def test_samples_are_called_as_a_file_or_a_function_says(typed, tmp_path):
    """Keys come from the lines of a file, or from a name; --batch makes what the model is given."""
    names = [f"image {i}\u2028.png" for i in range(50)]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    net = ("parts:net", "--data", "parts:data", "--sites", "4", "--batch-size", "8")
    typed(*net, "--keys", "names.txt", "--batch", "parts:halved")
    found = open_features(tmp_path / "out")
    wanted = in_memory((x / 2,) for x, _ in batches_of(Images()))

    assert found.samples == tuple(names)
    assert torch.equal(found["4"].tensor(), wanted["4"])
    assert (
        "there version= is none, here 'halved'"
        in typed(*net, "--keys", "names.txt", "--version", "halved", code=2).err
    )
    again = typed(*net, "--keys", "parts:named", "--batch", "parts:halved", code=2)
    assert "there the keys are 50 given, " in again.err
    (tmp_path / "out").rename(tmp_path / "before")
    typed(*net, "--keys", "parts:named")
    assert open_features(tmp_path / "out").samples[0].startswith("p0.")


def test_labels_and_fields_are_stored(typed, tmp_path):
    """--labels alone stores the second entry of a batch; an index, and a function by name, store others."""
    net = ("parts:net", "--data", "parts:data", "--sites", "4")
    done = typed(*net, "--labels", "--fields", "name=parts:named", "again=-1")
    found = open_features(tmp_path / "out")

    assert (
        found.labels[:].tolist()
        == found.fields["again"][:].tolist()
        == [number % 3 for number in range(50)]
    )
    assert found.fields["name"][0].startswith("p0.")
    assert "  labels  int64 [] (field)\n  name  text (field)\n" in done.out
    (tmp_path / "out").rename(tmp_path / "before")
    for word, said in [
        ("y", "labels='y': a batch has no such entry"),
        ("parts:net", "labels=net failed"),
        ("3", "labels=3"),
    ]:
        assert said in typed(*net, "--labels", word, code=2).err


def test_several_reducers_with_arguments_and_what_is_kept(typed, tmp_path):
    """One name may have several reducers, each with arguments; --keep keeps the values; shards are as large as asked."""
    done = typed(
        "parts:net", "--data", "parts:data", "--sites", "1", "4", "--keep", "4", "--shard-bytes", "300", "--shard-seconds", "9",
        "--reduce", "4=mean", "4=topk(3, largest=False)", "1=covariance(positions=mean)", "4=quantiles([0.5], per='whole')",
    )  # fmt: skip
    found, values = open_features(tmp_path / "out"), in_memory(batches_of(Images(), 64))
    mean, least, spread = (one.result() for one in found.reduced["4"])

    assert list(found) == ["4"]
    torch.testing.assert_close(mean["mean"], values["4"].double().mean(0), rtol=1e-5, atol=1e-6)
    assert least["values"].shape == (4, 3)
    torch.testing.assert_close(least["values"][:, 0], values["4"].amin(0).to(least["values"]))
    assert found.reduced["1"][0].result()["covariance"].shape == (6, 6)
    assert "Covariance(ddof=1, nonfinite='keep', positions='mean', channel=1)" in done.out
    assert spread["quantiles"][0] == values["4"].flatten().sort().values[99]


def test_under_torchrun_the_first_process_tells_when_all_are_through(kedge, tmp_path):
    """Two processes write a data set, and the total is of both, although one is slower; bad samples are reported once."""
    torchrun = (
        "-W",
        "ignore",
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "kedge",
    )
    words = ("parts:net", "--data", "parts:Slow", "--sites", "4", "--batch-size", "8")
    done = kedge(*words, launcher=torchrun, PYTHONWARNINGS="ignore")

    assert done.stdout.splitlines() == ["out: 50 samples", "  4  float32 [4]"]
    assert {path.name.split("-")[1] for path in (tmp_path / "out").glob("shard-*")} == {"0", "1"}


def test_a_rank_that_cannot_wait_says_what_it_has_written(kedge):
    """Under a launcher without a store there is no total, only this process's part and of how many it is."""
    words = ("parts:net", "--data", "parts:data", "--sites", "4", "--batch-size", "8")
    done = kedge(*words, RANK="1", WORLD_SIZE="2")

    assert done.stdout == "out: 24 samples by rank 1 of 2; other ranks may still be writing\n"


def test_bad_samples_are_listed(kedge, tmp_path):
    """What is left out is reported, and without --on-bad skip it is an error with the key."""
    done = kedge("parts:net", "--data", "parts:Bad", "--sites", "4", code=2)
    assert (
        "kedge: no features of sample '3' (and 6 more of its batch): ValueError: no image"
        in done.stderr
    )
    assert "leave such samples out with on_bad='skip' (--on-bad skip)" in done.stderr
    done = kedge(
        "parts:net", "--data", "parts:Bad", "--sites", "4", "--on-bad", "skip", "--workers", "1"
    )

    assert done.stderr.splitlines()[0] == "left out: 3: ValueError: no image"
    assert done.stderr.splitlines()[-1] == "left out: 2 more"
    assert done.stdout.splitlines()[-1] == "  left out: 7 samples"
    assert len(open_features(tmp_path / "out").bad) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parts:nothing", "--data", "parts:data", "--sites", "4"], "parts has no 'nothing'; it has "),
        (["part:net", "--data", "parts:data", "--sites", "4"], "there is no module part"),
        (["parts", "--data", "parts:data", "--sites", "4"], "write MODULE:NAME or FILE.py:NAME"),
        (["no.py:net", "--data", "parts:data", "--sites", "4"], "there is no file no.py"),
        (["parts:number", "--data", "parts:data", "--sites", "4"], "is a value of type int, not a model"),
        (["parts:net", "--data", "parts:number", "--sites", "4"], "is a value of type int; name a data set"),
        (["parts:net", "--data", "parts:loader", "--sites", "4", "--workers", "1"], "leave --workers out"),
        (["parts:net", "--data", "parts:data", "--sites", "9"], "9"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--transform", "median"], "use mean, max, tokens"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--transform", "1=mean"], "1 is not among the sites 4"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--dtype", "float12"], "PyTorch has no such type"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4"], "write NAME=HOW"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--rename", "4=l", "--reduce", "4=mean"], "the names are 'l'"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4=mean(1"], "such as topk(5)"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4=mean(a b)"], "(a b) cannot be read"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4=mean(most=1)"], "argument 'most'; fix"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4=mean(positions=up)"], "use one of 'samples'"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4=parts:data"], "not a reducer"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4=median"], "quantiles, topk, or MODULE:NAME"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--keep", "4"], "these values are kept in any case"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--keys", "no.txt"], "there is no such file"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--batch", "parts:torch.pi"], "name a function"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--device", "cuda:63"], "device='cuda:63' cannot be used"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--device", "nonsense"], "one of this machine: cpu"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--workers", "-1"], "it must be at least 0"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--batch-size", "0"], "it must be at least 1"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--shard-bytes", "0"], "it must be at least 1"),
        (["parts:needs", "--data", "parts:data", "--sites", "4"], "called without arguments: missing a required argument: 'n'"),
        (["parts:net", "--data", "parts:needs", "--sites", "4"], "parts:needs cannot be called without arguments"),
        (["parts:fails", "--data", "parts:data", "--sites", "4"], "parts:fails raised KeyError: 'weights' ("),
        (["parts:net", "--data", "parts:fails", "--sites", "4"], "parts.py, line "),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--transform", "parts:torch.pi"], "this is a value of type float"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4=parts:fails()"], "parts:fails raised KeyError"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--keys", "parts:fails"], "keys= failed for the batch that begins with sample 0"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--keys", "parts:unkeyed"], "unkeyed returned a int"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(typed, words, message):
    """Each mistake is one line that says what was found and what there is."""
    said = typed(*words, code=2)

    assert said.err.startswith("kedge: ")
    assert said.err.count("\n") == 1
    assert message in said.err
    assert said.out == ""


def test_what_was_written_before_a_function_failed_can_be_read(typed, tmp_path):
    """The error names the function and the sample at which it failed, and the batches before are there."""
    words = ("parts:net", "--data", "parts:data", "--sites", "4", "--batch-size", "8")
    said = typed(*words, "--keys", "parts:fails_later", code=2)

    assert (
        "that begins with sample 24 of the data set: fails_later raised KeyError: 'later'"
        in said.err
    )
    assert torch.equal(
        open_features(tmp_path / "out")["4"].tensor(), in_memory(batches_of(Images()))["4"][:24]
    )


def test_the_library_gives_the_same(kedge, tmp_path):
    """The command writes what the method of the same name writes."""
    kedge("parts:net", "--data", "parts:data", "--sites", "1", "4")

    assert torch.equal(
        open_features(tmp_path / "out")["4"].tensor(),
        in_memory(batches_of(Images(), 64), features())["4"],
    )
