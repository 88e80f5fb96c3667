"""Labels and other fields: what comes with a sample is stored with its features, in its own type."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch.utils.data import DataLoader, StackDataset, TensorDataset

from kedge.errors import ExtractionFailed, NoSuchSite, NotFeatures, OtherRun
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.extract import extract
from kedge.features.reduce import Mean
from kedge.features.tables import stored_table
from tests.features.dataset.imagesets import (
    Dicts,
    Doubling,
    Images,
    Stream,
    batches_of,
    change_manifest,
    features,
    image,
)

pytestmark = pytest.mark.usefixtures("no_threads_of_zarr")
FORMATS = ["safetensors", "zarr", "parquet"]
LABELS = [number % 3 for number in range(50)]


class Named(Images):
    """Images with a path, and one in seven that is none."""

    def __getitem__(self, index):
        if index % 7 == 3:
            raise ValueError("no image")
        return *super().__getitem__(index), Path(f"images/{index}.png"), np.float16(index)


def paths(batch):
    """Return paths, as a function of a batch does that is named in options."""
    return [str(path) for path in batch[2]]


def collated(samples):
    """Collate what PyTorch does not, such as paths."""
    x, y, where, weights = zip(*samples, strict=True)
    return torch.stack(x), torch.tensor(y, dtype=torch.uint8), where, list(weights)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("workers", [0, 2])
def test_labels_stay_with_their_samples(tmp_path, form, workers):
    """Types are exact; shuffled, with workers, skipped samples and several shards, each sample has its own fields."""
    loader = batches_of(Named(), shuffle=True, num_workers=workers, collate_fn=collated)
    options = Options(
        labels=1, fields={"path": paths, "weight": 3}, on_bad="skip", format=form, shard_bytes=500
    )
    found = extract_dataset(features(), loader, tmp_path / "out", options)
    there = [number for number in range(50) if number % 7 != 3]

    assert len(list((tmp_path / "out").glob("shard-*"))) > 1
    assert list(found.fields) == ["labels", "path", "weight"]
    assert (found.labels.dtype, found.fields["weight"].dtype) == (torch.uint8, torch.float16)
    assert found.labels[:].tolist() == [number % 3 for number in there]
    assert found.fields["weight"].numpy().tolist() == there
    assert list(found.fields["path"]) == [f"images/{number}.png" for number in there]
    assert found.fields["path"][[-1, 0]] == ["images/49.png", "images/0.png"]
    assert found.fields["path"].numpy()[2] == found.fields["path"][2] == "images/2.png"
    assert list(found) == ["1", "4"]
    assert ("4" in found, "labels" in found, "labels" in found.fields, "4" in found.fields) == (
        True,
        False,
        True,
        False,
    )


def test_labels_of_samples_that_the_model_refuses_are_left_out_with_them(tmp_path):
    """A sample that fails in the model takes its label with it, and the others keep theirs."""

    class Choosy(torch.nn.Module):
        def forward(self, x):
            if (x[:, 0] == 4).any():
                raise ValueError("no four")
            return x * 2

    data = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10) * 11)
    model = Choosy()
    options = Options(
        labels=True, fields={"text": lambda batch: [f"t{int(y)}" for y in batch[1]]}, on_bad="skip"
    )
    found = extract_dataset(
        lambda x: {"f": model(x)}, DataLoader(data, batch_size=5), tmp_path / "out", options
    )

    assert found["f"][:].flatten().tolist() == [0, 2, 4, 6, 10, 12, 14, 16, 18]
    assert found.labels[:].tolist() == [0, 11, 22, 33, 55, 66, 77, 88, 99]
    assert list(found.fields["text"])[3:5] == ["t33", "t55"]
    assert list(found.bad) == ["4"]


def test_entries_are_named_by_index_name_or_function(tmp_path):
    """A dict's entry that is a field is no argument of the model; named tuples and streams have fields too."""

    class Pair(NamedTuple):
        x: Any
        label: Any

    linear = torch.nn.Linear(48, 2)
    taken = lambda x: {"f": linear(x.flatten(1))}
    named = extract_dataset(
        taken,
        [Pair(torch.stack([image(0), image(1)]), [5, 6])],
        tmp_path / "a",
        Options(labels="label"),
    )
    stream = extract_dataset(
        taken, batches_of(Stream(), num_workers=2), tmp_path / "b", Options(labels=-1)
    )

    class Labelled(Dicts):
        def __getitem__(self, index):
            return {**super().__getitem__(index), "label": f"class {index % 3}"}

    dicts = extract_dataset(
        extract(Doubling(), "linear"),
        batches_of(Labelled()),
        tmp_path / "c",
        Options(labels="label", reduce={"linear": Mean()}),
    )
    assert named.labels[:].tolist() == [5, 6]
    assert stream.labels[:].tolist() == LABELS * 2
    assert list(dicts.labels) == [f"class {number}" for number in LABELS]
    assert (list(dicts), list(open_features(tmp_path / "c").labels)) == ([], list(dicts.labels))


def test_a_run_goes_on_with_its_fields_alone(tmp_path):
    """A stopped run continues with the same labels, of which half a batch is left; with others, or none, it is another run."""

    class Stops(Images):
        def __getitem__(self, index):
            if index == 20:
                raise ValueError("stop")
            return super().__getitem__(index)[0], f"name {index}"

    class Whole(Images):
        def __getitem__(self, index):
            return super().__getitem__(index)[0], f"name {index}"

    out, options = tmp_path / "out", Options(labels=True)
    with pytest.raises(ExtractionFailed):
        extract_dataset(features(), list_of(Stops(), 5), out, options)
    for other in (
        Options(),
        Options(labels=False),
        Options(labels=0),
        Options(labels=True, fields={"more": 1}),
    ):
        with pytest.raises(OtherRun, match="labels= and fields= are labels the entry 1, here"):
            extract_dataset(features(), list_of(Whole(), 7), out, other)
    found = extract_dataset(features(), list_of(Whole(), 7), out, options)

    assert list(found.labels) == [f"name {number}" for number in range(50)]


def test_labels_may_be_the_first_entry(tmp_path):
    """An index of 0 is an entry, not the absence of labels."""

    class Reversed(Images):
        def __getitem__(self, index):
            return super().__getitem__(index)[::-1]

    options = Options(labels=0, batch=lambda batch: batch[1])
    assert (
        extract_dataset(features(), batches_of(Reversed()), tmp_path / "out", options)
        .labels[:]
        .tolist()
        == LABELS
    )


def test_fields_are_shown_and_found_by_who_looks_among_the_sites(tmp_path):
    """The fields print as the columns that they are; a field that is taken for a site is named with the way to read it."""
    options = Options(labels=1, fields={"again": 1})
    found = extract_dataset(features(), batches_of(Images()), tmp_path / "out", options)

    assert repr(found.fields).startswith(
        "{'labels': Column('labels', 50 samples, int64), 'again': Column("
    )
    with pytest.raises(
        NoSuchSite,
        match=r"has no site 'labels'; it has '1', '4'; 'labels' is a field, which \.labels reads$",
    ):
        found["labels"]
    with pytest.raises(
        NoSuchSite,
        match=r"has no site 'again'; .*; 'again' is a field, which \.fields\['again'\] reads$",
    ):
        found["again"]


def list_of(dataset, size):
    """Batches that a loader without indices yields: finished samples are cut out of a batch."""

    class Batches:
        def __iter__(self):
            return iter(DataLoader(dataset, size))

    return Batches()


def test_an_old_folder_does_not_get_labels(tmp_path):
    """A folder of an earlier version continues without labels; with labels it is another run."""
    extract_dataset(features(), batches_of(Images()), tmp_path / "out")
    manifest = tmp_path / "out" / "features.json"
    manifest.write_text(
        manifest.read_text().replace('"fields": {},', "").replace('"field_types": {}', '"later": 3')
    )

    assert len(extract_dataset(features(), batches_of(Images()), tmp_path / "out").samples) == 50
    with pytest.raises(OtherRun, match="labels= and fields= are none, here labels the entry 1"):
        extract_dataset(features(), batches_of(Images()), tmp_path / "out", Options(labels=True))
    with pytest.raises(
        NoSuchSite,
        match=r"has no labels; its fields: none; extract the features with labels= \(--labels\)",
    ):
        open_features(tmp_path / "out").labels
    extract_dataset(features(), batches_of(Images()), tmp_path / "new", Options(labels=True))
    change_manifest(tmp_path / "new", field_types={})
    with pytest.raises(
        NotFeatures,
        match=r"features\.json does not describe 'labels', which shard-0-00000\.safetensors has",
    ):
        open_features(tmp_path / "new")["4"]
    change_manifest(tmp_path / "out", field_types={"labels": ["int64", "0-dimensional"]})
    with pytest.raises(NotFeatures, match="has no values of 'labels'"):
        open_features(tmp_path / "out").labels[0]


def test_a_classifier_and_a_loader_take_features_and_labels(tmp_path):
    """Three lines for scikit-learn; a loader with workers gives features beside labels and texts, whole batches at once."""
    options = Options(
        labels=True,
        fields={"name": lambda batch: [f"n{int(y)}" for y in batch[1]]},
        shard_bytes=300,
    )
    found = extract_dataset(features(), batches_of(Images()), tmp_path / "out", options)
    table = stored_table(found, positions="mean")

    assert LogisticRegression().fit(found["4"].numpy(), found.labels.numpy()).classes_.tolist() == [
        0,
        1,
        2,
    ]
    assert LogisticRegression().fit(found["4"], found.labels).n_features_in_ == 4
    assert table.y.tolist() == LABELS
    together = StackDataset(found["4"], found.labels, found.fields["name"])
    for x, y, names in DataLoader(together, batch_size=16, shuffle=True, num_workers=2):
        assert x.shape == (len(y), 4)
        assert list(names) == [f"n{int(label)}" for label in y]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"labels": "y"},
            r"labels='y': a batch has no such entry: it has 2 entries, from 0 to 1; name an entry",
        ),
        ({"labels": 2}, r"labels=2: a batch has no such entry"),
        (
            {"labels": list(range(50))},
            r"labels=\[0, 1, .*\.\.\.\]: give the index or .* labels\[int\(key\)\] is",
        ),
        (
            {"labels": torch.arange(50)},
            r"labels=tensor\(.*: give the index or the name of the entry",
        ),
        (
            {"fields": ["path"]},
            r"fields= is a list; give a name to each entry of the batch: fields=\{'path': 2\}",
        ),
        (
            {"labels": lambda batch: 1 / 0},
            "labels=<lambda> failed for the batch that begins with sample 0 .*ZeroDivisionError",
        ),
        (
            {"labels": lambda batch: batch[1][:3]},
            r"labels=<lambda> gave \[3\] for a batch of 8 samples: each needs one",
        ),
        ({"labels": lambda batch: 3}, r"gave one int for a batch of 8 samples"),
        ({"labels": lambda batch: "12345678"}, r"gave one str for a batch of 8 samples"),
        (
            {"fields": {"f": lambda batch: [[1]] * 7 + [[1, 2]]}},
            r"fields=\{'f': <lambda>\} gave list that are neither texts nor",
        ),
        (
            {"fields": {"f": lambda batch: [None] * 8}},
            "gave NoneType that are neither texts nor numbers of one shape",
        ),
        ({"fields": {"4": 1}}, "'4' is the name of a site and of a field"),
        ({"labels": 1, "fields": {"labels": 1}}, "both give the field 'labels'"),
        ({"fields": {"f": 1.5}}, r"fields=\{'f': 1.5\}: give a name"),
        (
            {"labels": lambda b: b[1] if b[0][0, 0, 0, 1] > 0.2 else b[1].float()},
            "'labels' holds float32 .* int64 .* before",
        ),
    ],
)
def test_a_field_that_cannot_be_stored_is_named(tmp_path, options, words):
    """The message names the option, what was found, and what to do."""
    with pytest.raises(ExtractionFailed, match=words):
        extract_dataset(features(), batches_of(Images()), tmp_path / "out", Options(**options))


def test_a_parquet_file_has_the_fields_as_columns(tmp_path):
    """Other programs read labels and texts beside the features; a field cannot take the column of the keys."""
    duckdb = pytest.importorskip("duckdb")
    options = Options(
        labels=True,
        fields={"name": lambda batch: [f"n{int(y)}" for y in batch[1]]},
        format="parquet",
    )
    extract_dataset(features(), batches_of(Images()), tmp_path / "out", options)
    rows = duckdb.sql(
        f"SELECT key, labels, name FROM '{tmp_path}/out/*.parquet' WHERE key = '14'"
    ).fetchall()

    assert rows == [("14", 2, "n2")]
    with pytest.raises(ExtractionFailed, match="field cannot be called 'key' in Parquet"):
        extract_dataset(
            features(),
            batches_of(Images()),
            tmp_path / "b",
            Options(fields={"key": 1}, format="parquet"),
        )
