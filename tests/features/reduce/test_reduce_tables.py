"""Tables of features: a linear probe learns from them what the network's own last layer knows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from kedge.errors import BadSample, TableError
from kedge.features.dataset import Options, extract_dataset
from kedge.features.extract import extract
from kedge.features.tables import feature_table, stored_table

TEST = 360


class Net(nn.Module):
    """Two convolutions and two linear layers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.hidden = nn.Sequential(nn.Linear(32 * 16, 64), nn.ReLU())
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.hidden(self.conv(x).flatten(1)))


@pytest.fixture(scope="module")
def digits():
    """The handwritten digits, shuffled: images and labels."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    return images[order], torch.tensor(found.target)[order]


@pytest.fixture(scope="module")
def trained(digits):
    """A small network that has learnt them."""
    torch.manual_seed(0)
    images, labels = (part[TEST:] for part in digits)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(12):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
            optimizer.step()
    return net.eval()


def loader(digits, some, **settings):
    """Load some of the digits in batches."""
    return DataLoader(
        Subset(TensorDataset(*digits), range(len(digits[0]))[some]), batch_size=50, **settings
    )


def test_a_linear_probe_reaches_the_network_s_accuracy(digits, trained):
    """Logistic regression on the last hidden layer's features gets as many unseen digits right as the network does."""
    features = extract(trained, ["hidden"])
    train = feature_table(features, loader(digits, slice(TEST, None), shuffle=True))
    test = feature_table(features, loader(digits, slice(TEST)))
    classifier = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)).fit(
        train.X, train.y
    )
    reached = classifier.score(test.X, test.y)
    with torch.no_grad():
        own = float((trained(digits[0][:TEST]).argmax(1) == digits[1][:TEST]).float().mean())
    pixels = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    untrained = feature_table(
        extract(trained, ["conv.0"]), loader(digits, slice(TEST)), positions="mean"
    )

    assert own > 0.95
    assert reached >= own - 0.01
    assert (
        pixels.fit(untrained.X, untrained.y).score(untrained.X, untrained.y) < own
    )  # 16 means of strokes do not do


def test_rows_keys_and_columns_belong_together(digits, trained):
    """Each row holds its sample's features under the names of the columns, in the loader's own order."""
    features = extract(trained, ["conv", "head"], rename={"head": "logits"})
    table = feature_table(
        features, loader(digits, slice(100), shuffle=True), positions="max", dtype=torch.float64
    )
    rows = [int(key) for key in table.keys]
    with torch.no_grad():
        inner = trained.conv(digits[0][:100]).amax((2, 3)).double().numpy()
        logits = trained(digits[0][:100]).double().numpy()

    assert rows != sorted(rows)
    assert table.columns == [f"conv[{i}]" for i in range(32)] + [f"logits[{i}]" for i in range(10)]
    np.testing.assert_allclose(
        table.X, np.concatenate([inner, logits], 1)[rows], rtol=1e-5, atol=1e-6
    )
    assert table.y.tolist() == digits[1][rows].tolist()


def test_a_table_of_what_lies_in_a_folder_is_the_same(digits, trained, tmp_path):
    """What was written for a data set gives the table that computing it gives, in the data set's order."""
    features = extract(trained, ["conv", "head"])
    given = loader(digits, slice(100))
    stored = extract_dataset(
        features, given, tmp_path / "out", Options(progress=False, shard_bytes=20_000)
    )
    computed = feature_table(features, given, positions="mean")
    labels = {str(i): int(digits[1][i]) for i in range(100)}
    for source, known in ((stored, labels), (tmp_path / "out", labels.__getitem__)):
        read = stored_table(source, labels=known, positions="mean")
        assert read.X.tobytes() == computed.X.tobytes()
        assert read.y.tolist() == computed.y.tolist()
        assert (read.keys, read.columns) == (computed.keys, computed.columns)
    assert stored_table(stored, positions="mean").y is None


class Shaped(nn.Module):
    """Gives features of many shapes."""

    def forward(self, x):
        return {
            "number": x[:, 0, 0],
            "vector": x[:, :, 0].to(torch.bfloat16),
            "map": x[:, :, :, None].expand(-1, -1, -1, 2),
            "one": x[:, :1, :1, None],
            "flag": x[:, :, 0] > 0,
        }


def test_columns_are_named_by_their_place():
    """A number goes by its site, a vector's by their channels, and with positions='elements' all by their indices."""
    x = torch.randn(6, 3, 4)
    table = feature_table(Shaped(), [x[:4], x[4:]], positions="elements")

    assert table.columns[:5] == ["number", "vector[0]", "vector[1]", "vector[2]", "map[0,0,0]"]
    assert table.columns[-5:] == ["map[2,3,1]", "one[0]", "flag[0]", "flag[1]", "flag[2]"]
    assert table.X.dtype == np.float32
    assert table.X[:, 0].tolist() == x[:, 0, 0].tolist()
    assert table.X[:, table.columns.index("map[2,1,1]")].tolist() == x[:, 2, 1].tolist()
    assert table.X[:, -1].tolist() == (x[:, 2, 0] > 0).float().tolist()
    assert table.y is None
    assert table.keys == list("012345")


def test_tokens_have_their_channels_last():
    """With channel=-1 the tokens are what is averaged."""
    x = torch.randn(6, 3, 4)
    table = feature_table(lambda x: {"h": x}, [x], positions="mean", channel=-1)

    assert table.columns == ["h[0]", "h[1]", "h[2]", "h[3]"]
    np.testing.assert_allclose(table.X, x.mean(1), rtol=1e-5, atol=1e-6)


def test_batches_of_any_kind_can_be_told_apart():
    """What the model is called with, and where labels are, can be said by functions of the batch."""
    batches = [{"a": torch.randn(4, 2), "b": torch.arange(4), "name": list("wxyz")}]
    table = feature_table(
        lambda a: {"double": 2 * a},
        batches,
        batch=lambda data: {"a": data["a"]},
        labels=lambda data: data["name"],
    )

    assert table.y.tolist() == list("wxyz")
    np.testing.assert_array_equal(table.X, 2 * batches[0]["a"])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: feature_table(Shaped(), [], positions="mean"), "at least one sample"),
        (
            lambda: feature_table(lambda x: {"f": x}, [torch.ones(2, 2)], positions="samples"),
            "one row for each sample",
        ),
        (
            lambda: feature_table(lambda x: {"f": x}, [(torch.ones(2, 2), torch.ones(3))]),
            "2 samples came with labels of shape [3]",
        ),
        (
            lambda: feature_table(lambda x: {"f": x}, [torch.ones(2, 2), torch.ones(2, 3)]),
            "2 columns for some samples and 3 for others",
        ),
        (
            lambda: feature_table(
                lambda x: {"f": x}, [(torch.ones(2, 2), torch.ones(2)), torch.ones(2, 2)]
            ),
            "4 samples have 4 rows of features and 2 labels",
        ),
        (
            lambda: feature_table(
                lambda x: {"a": x} | ({"b": x} if x.any() else {}),
                [torch.ones(2, 3), torch.zeros(2, 3)],
            ),
            "'a' 4, 'b' 2",
        ),
    ],
)
def test_what_makes_no_table_is_refused(make, said):
    """Rows without a sample, samples without a label and sites without a sample are an error that says which."""
    with pytest.raises(TableError) as raised:
        make()
    assert said in str(raised.value)


def test_a_key_without_a_label_is_named(tmp_path):
    """A sample in the folder that the labels do not know is an error with its key."""
    out = tmp_path / "out"
    extract_dataset(lambda x: {"f": x}, [torch.ones(3, 2)], out, Options(progress=False))
    with pytest.raises(TableError, match="2 of 3 samples have no label, the first is '1'"):
        stored_table(out, labels={"0": 1})


def test_a_sample_that_cannot_be_loaded_is_an_error():
    """A table has no gaps: a bad sample is raised with its key."""

    class Broken(TensorDataset):
        def __getitem__(self, index):
            if index == 3:
                raise OSError("truncated file")
            return super().__getitem__(index)

    with pytest.raises(BadSample, match="'3'.*truncated file"):
        feature_table(
            lambda x: {"f": x}, DataLoader(Broken(torch.ones(6, 2), torch.ones(6)), batch_size=2)
        )
