"""Loaders that do not batch, and reducers that would take positions for channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)

import kedge
from kedge.errors import ExtractionFailed, InTrainingMode
from kedge.features.pooling import Pool
from kedge.features.reduce import Covariance, Histogram, Mean
from tests.features.dataset.imagesets import Images, batches_of, features, in_memory

NUMBERS = torch.arange(640.0).reshape(40, 16)


class Stream(IterableDataset):
    """Items of one shape."""

    def __init__(self, *shape):
        self.shape = shape

    def __iter__(self):
        return (torch.full(self.shape, float(i)) for i in range(6))


def test_an_item_that_may_be_a_sample_or_a_batch_is_an_error(tmp_path):
    """One sample of 16 numbers is not 16 samples; which it is can be said."""
    features, loader = (
        kedge.extract(nn.Identity(), [":out"]),
        DataLoader(TensorDataset(NUMBERS), batch_size=None),
    )
    with pytest.raises(
        ExtractionFailed, match="may be a sample or a batch.*items='samples' or items='batches'"
    ):
        features.dataset(loader, tmp_path / "neither")
    assert torch.equal(
        features.dataset(loader, tmp_path / "samples", items="samples")[":out"].tensor(), NUMBERS
    )
    batches = DataLoader(TensorDataset(NUMBERS.reshape(5, 8, 16)), batch_size=None)
    assert torch.equal(
        features.dataset(batches, tmp_path / "batches", items="batches")[":out"].tensor(), NUMBERS
    )
    with pytest.raises(ExtractionFailed, match="this loader is another"):
        features.dataset(DataLoader(TensorDataset(NUMBERS)), tmp_path / "other", items="samples")


def test_items_that_show_what_they_are_need_no_word(tmp_path):
    """A label that is a number belongs to one sample, and a sampler of lists makes batches."""
    labelled = features().dataset(
        DataLoader(Images(), batch_size=None), tmp_path / "samples", labels=1
    )
    assert torch.equal(labelled["4"].tensor(), in_memory(batches_of(Images(), 1))["4"])
    assert labelled.labels.tensor().tolist() == [index % 3 for index in range(50)]
    data = TensorDataset(NUMBERS)
    lists = DataLoader(
        data, sampler=BatchSampler(SequentialSampler(data), 8, drop_last=False), batch_size=None
    )
    taken = kedge.extract(nn.Identity(), [":out"]).dataset(lists, tmp_path / "lists")
    assert torch.equal(taken[":out"].tensor(), NUMBERS)


def test_a_stream_of_rows_is_no_stream_of_batches(tmp_path):
    """Tensors of one dimension are refused; with several they are batches, as without a loader."""
    taken = kedge.extract(nn.Identity(), [":out"])
    with pytest.raises(ExtractionFailed, match=r"shape \[16\], looks like one sample"):
        taken.dataset(DataLoader(Stream(16), batch_size=None), tmp_path / "rows")
    assert (
        len(
            taken.dataset(
                DataLoader(Stream(16), batch_size=None), tmp_path / "said", items="samples"
            ).samples
        )
        == 6
    )
    assert (
        len(taken.dataset(DataLoader(Stream(4, 16), batch_size=None), tmp_path / "batches").samples)
        == 24
    )


def test_a_reducer_of_another_layout_is_an_error(tmp_path):
    """Channels of tokens are last; a reducer that takes dimension 1 would reduce the tokens."""
    taken = kedge.extract(nn.Linear(16, 4), [":out"])
    loader = DataLoader(TensorDataset(NUMBERS.reshape(8, 5, 16)), batch_size=4)
    with pytest.raises(
        ExtractionFailed,
        match="takes dimension 1 for the channels, and the model has them in dimension 2.*channel=-1",
    ):
        taken.dataset(loader, tmp_path / "wrong", reduce={":out": Covariance(positions="mean")})
    right = {":out": [Mean(positions="samples", channel=-1), Histogram()]}
    stored = taken.dataset(loader, tmp_path / "right", reduce=right)
    assert stored.reduced[":out"][0].result()["mean"].shape == (4,)


def test_a_data_set_in_training_mode_is_said(tmp_path):
    """So a second run that differs is no surprise."""
    model = nn.Sequential(nn.Linear(16, 4), nn.Dropout())
    with pytest.warns(InTrainingMode, match="Dropout 1"):
        kedge.extract(model, ["1"]).dataset(DataLoader(TensorDataset(NUMBERS), 8), tmp_path / "out")


def test_what_was_pooled_is_in_the_folder(tmp_path):
    """The description has positions and channels."""
    loader = DataLoader(TensorDataset(NUMBERS.reshape(8, 5, 16)), batch_size=4)
    taken = kedge.extract(nn.Linear(16, 4), {":out": Pool("mean")}).dataset(
        loader, tmp_path / "out"
    )
    assert taken.manifest["pooled"] == {":out": "mean over 5 positions of 4 channels"}
    assert repr(taken).endswith("float32 [4]  mean over 5 positions of 4 channels")
