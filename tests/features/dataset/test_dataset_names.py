"""Reducers stand for values that there are: no name counts nothing without a word."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kedge.errors import ExtractionFailed
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.extract import extract
from kedge.features.reduce import Mean
from tests.features.dataset.imagesets import (
    Images,
    batches_of,
    change_manifest,
    features,
    in_memory,
)


class Steps(nn.Module):
    """Runs its module twice; three times for a batch that is short."""

    def __init__(self, short=0):
        super().__init__()
        self.step, self.short = nn.Linear(48, 48), short

    def forward(self, x):
        x = self.step(self.step(x.flatten(1)))
        return self.step(x) if len(x) < self.short else x


@pytest.mark.parametrize(
    ("taken", "name", "message"),
    [
        (features(), "typo", r"no value has the name 'typo'; the names are '1', '4': name one of these"),
        (features(rename={"4": "l"}), "4", r"the name '4', as it was renamed to 'l'; the names are '1', 'l'"),
        (extract(Steps(), ["step"]), "step#x", "no value has the name 'step#x'"),
    ],
)  # fmt: skip
def test_a_name_that_cannot_be_is_refused_before_anything_is_loaded(tmp_path, taken, name, message):
    """What no value can be called is an error with the names there are, and no folder is made."""
    data = Images()
    with pytest.raises(ExtractionFailed, match=message):
        extract_dataset(taken, batches_of(data), tmp_path / "out", Options(reduce={name: Mean()}))

    assert data.loaded == []
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("taken", "name", "there"),
    [
        (features(["1", "4:out"]), "4", "'1', '4:out'"),
        (extract(Steps(), ["step"]), "step", "'step#0', 'step#1'"),
        (lambda x: {"sum": x.sum((2, 3))}, "mean", "'sum'"),
    ],
)
def test_a_name_that_turns_out_to_be_none_is_refused_at_the_first_batch(
    tmp_path, taken, name, there
):
    """Where only a batch tells the names, nothing is written before they are known."""
    data = Images()
    with pytest.raises(ExtractionFailed, match=f"the name '{name}'; the names are {there}"):
        extract_dataset(taken, batches_of(data), tmp_path / "out", Options(reduce={name: Mean()}))

    assert len(data.loaded) == 8
    assert list((tmp_path / "out").glob("[sf]*")) == []
    name = there.rpartition("'")[0].rpartition("'")[2]
    found = extract_dataset(
        taken, batches_of(data), tmp_path / "out", Options(reduce={name: Mean()})
    )
    assert found.reduced[name][0].result()["n"] == 50


@pytest.mark.parametrize("reduce", [{}, {"step#1": Mean()}])
def test_names_that_change_on_the_way_are_an_error(tmp_path, reduce):
    """When a later batch has other names, what came before is written and the message says which those are."""
    taken = extract(Steps(short=5), ["step"], early_stop=False)
    with pytest.raises(
        ExtractionFailed,
        match="the values have the names step#0, step#1, step#2 from sample '48' on, and step#0, step#1 before",
    ):
        extract_dataset(
            taken, batches_of(Images()), tmp_path / "out", Options(reduce=reduce, keep=list(reduce))
        )

    assert len(open_features(tmp_path / "out").samples) == 48


def test_a_folder_that_was_let_pass_is_refused_when_it_goes_on(tmp_path):
    """Where an earlier run had a reducer for nothing, the next one says so although all samples are done."""
    extract_dataset(
        features(["4"]), batches_of(Images()), tmp_path / "out", Options(reduce={"4": Mean()})
    )
    change_manifest(tmp_path / "out", columns={"5": ["float32", "1-dimensional"]})

    with pytest.raises(ExtractionFailed, match="no value has the name '4'; the names are '5'"):
        extract_dataset(
            features(["4"]), batches_of(Images()), tmp_path / "out", Options(reduce={"4": Mean()})
        )


@pytest.mark.parametrize(
    ("device", "reason"), [("cuda:63", ""), ("nonsense", "nonsense"), (torch.device("meta"), "")]
)
def test_a_device_that_there_is_not_is_said_as_such(tmp_path, device, reason):
    """A device on which nothing can be computed is an error about the device, before a sample is loaded."""
    data = Images()
    with pytest.raises(
        ExtractionFailed,
        match=f"device='{device}' cannot be used: .*{reason}.*one of this machine: cpu",
    ):
        extract_dataset(features(), batches_of(data), tmp_path / "out", Options(device=device))

    assert data.loaded == []


def test_keys_may_come_from_an_iterator(tmp_path):
    """What can be gone through once is enough, for the keys and for the note of what run it is."""
    found = extract_dataset(
        features(), batches_of(Images()), tmp_path / "out", Options(keys=map(hex, range(50)))
    )

    assert found.samples == tuple(map(hex, range(50)))
    torch.testing.assert_close(found.sample(hex(31))["4"], in_memory(batches_of(Images()))["4"][31])
