"""``kedge extract``: a whole data set from the command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from imagesets import Images, batches_of, features, in_memory

from kedge.recipes.dataset import open_features

PARTS = """
import torch
from imagesets import Dicts, Images, Stream, batches_of, net
from kedge.recipes.reduce import TopK

model = net()
def data(): return Images()
def loader(): return batches_of(Images(), 4)
def number(): return 3
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

    def run(*words, code=0):
        paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "kedge", "extract", *words, "--out", "out"]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done

    return run


def test_a_data_set_is_extracted_by_name(kedge, tmp_path):
    """The folder has the bits of a loop in memory, the command says what is in it, and again there is nothing to do."""
    done = kedge("parts:net", "--data", "parts:data", "--sites", "1", "4", "--batch-size", "8", "--rename", "4=logits")
    found, wanted = open_features(tmp_path / "out"), in_memory(batches_of(Images()))

    assert torch.equal(found["1"].tensor(), wanted["1"])
    assert torch.equal(found["logits"].tensor(), wanted["4"])
    assert done.stdout.splitlines() == ["out: 50 samples", "  1  float32 [6, 4, 4]", "  logits  float32 [4]"]
    assert done.stderr == ""
    again = kedge("parts:net", "--data", "parts:data", "--sites", "1", "4", "--batch-size", "8", "--rename", "4=logits")
    assert again.stdout == done.stdout


def test_transforms_types_reducers_and_formats(kedge, tmp_path):
    """Every option reaches the engine."""
    kedge(
        "parts.py:model", "--data", "parts:loader", "--sites", "1", "4", "--transform", "1=mean", "4=parts:absolute",
        "--dtype", "float16", "--format", "parquet", "--reduce", "4=parts:most",
    )  # fmt: skip
    found, wanted = open_features(tmp_path / "out"), in_memory(batches_of(Images()))

    torch.testing.assert_close(found["1"].tensor(), wanted["1"].mean((2, 3)).half(), rtol=1e-3, atol=1e-3)
    assert found.reduced["4"][0].result()["n"] == 50
    assert list((tmp_path / "out").glob("*.parquet"))


def test_bad_samples_are_listed(kedge, tmp_path):
    """What is left out is told, and without --on-bad skip it is an error with the key."""
    done = kedge("parts:net", "--data", "parts:Bad", "--sites", "4", code=2)
    assert "kedge: no features of sample '3' (and 6 more of its batch): ValueError: no image" in done.stderr
    done = kedge("parts:net", "--data", "parts:Bad", "--sites", "4", "--on-bad", "skip", "--workers", "1")

    assert done.stderr.splitlines()[0] == "left out: 3: ValueError: no image"
    assert done.stderr.splitlines()[-1] == "left out: 2 more"
    assert len(open_features(tmp_path / "out").bad) == 7


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["parts:nothing", "--data", "parts:data", "--sites", "4"], "parts has no 'nothing'; it has "),
        (["part:net", "--data", "parts:data", "--sites", "4"], "no module part is found"),
        (["parts", "--data", "parts:data", "--sites", "4"], "it is to be MODULE:NAME or FILE.py:NAME"),
        (["no.py:net", "--data", "parts:data", "--sites", "4"], "there is no file no.py"),
        (["parts:number", "--data", "parts:data", "--sites", "4"], "gave a value of type int, not a model"),
        (["parts:net", "--data", "parts:number", "--sites", "4"], "gave a value of type int; name a data set"),
        (["parts:net", "--data", "parts:loader", "--sites", "4", "--workers", "1"], "leave --workers out"),
        (["parts:net", "--data", "parts:data", "--sites", "9"], "9"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--transform", "median"], "there is mean, max, tokens"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--transform", "1=mean"], "1 is not among the sites 4"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--dtype", "float12"], "PyTorch has no such type"),
        (["parts:net", "--data", "parts:data", "--sites", "4", "--reduce", "4"], "it is to be NAME=VALUE"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said(kedge, words, message):
    """Each mistake is one line that says what was found and what there is."""
    done = kedge(*words, code=2)

    assert done.stderr.startswith("kedge: ")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_library_gives_the_same(kedge, tmp_path):
    """The command writes what the method of the same name writes."""
    kedge("parts:net", "--data", "parts:data", "--sites", "1", "4")

    assert torch.equal(
        open_features(tmp_path / "out")["4"].tensor(), in_memory(batches_of(Images(), 64), features())["4"]
    )
