"""Small data sets and a small network for the tests of whole data sets."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from kedge.features.dataset.folder.files import about_shard, entries
from kedge.features.extract import extract

SITES = ("1", "4")


class Images(Dataset):
    """Images that are made from their index, with a label."""

    def __init__(self, length=50):
        self.length = length
        self.loaded = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if not 0 <= index < self.length:
            raise IndexError(index)
        self.loaded.append(index)
        return image(index), index % 3


class Stream(IterableDataset):
    """The same images, one after the other."""

    def __init__(self, length=50):
        self.length = length

    def __iter__(self):
        return ((image(index), index % 3) for index in range(self.length))


class Dicts(Images):
    """The same images, as keyword arguments."""

    def __getitem__(self, index):
        return {"x": image(index), "twice": torch.tensor(index % 2 == 1)}


class Doubling(nn.Module):
    """Takes keyword arguments."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(48, 5)

    def forward(self, x, twice):
        return self.linear(x.flatten(1)) * torch.where(twice, 2.0, 1.0)[:, None]


def image(index):
    """Make an image that no other index has."""
    return torch.sin(torch.arange(48.0) * (index + 1) * 0.37).reshape(3, 4, 4)


def net():
    """A network in evaluation mode, the same each time."""
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    ).eval()


def features(sites=SITES, **options):
    """What takes the network's features."""
    return extract(net(), list(sites), **options)


def in_memory(loader, taken=None):
    """Take the features in a loop that keeps everything, as one would write it by hand."""
    kept = {}
    with torch.no_grad():
        for batch, *_ in loader:
            for name, value in (taken or features())(batch).items():
                kept.setdefault(name, []).append(value)
    return {name: torch.cat(values) for name, values in kept.items()}


def batches_of(dataset, size=8, **options):
    """A loader."""
    return DataLoader(dataset, size, **options)


def assert_equal(found, wanted):
    """Every site has the values that are wanted, to the last bit."""
    assert sorted(found) == sorted(wanted)
    for name, values in wanted.items():
        assert torch.equal(found[name].tensor(), values), name


def written(folder):
    """The keys in the shards that count, as they lie there."""
    return [
        key
        for entry in entries(Path(folder))
        for key in about_shard(Path(folder) / entry.name)["keys"]
    ]


def change_manifest(folder, **changes):
    """Write something else into the manifest."""
    path = Path(folder) / "features.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
