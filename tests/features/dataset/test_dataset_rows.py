"""Rows of stored columns, and the shards that stay open between reads."""

from __future__ import annotations

import gc
import os
import pickle
import shutil
import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from kedge.errors import NoSuchKey, NotFeatures
from kedge.features.dataset import Options, extract_dataset, open_features
from kedge.features.dataset.folder import formats, stored_shard
from kedge.features.dataset.folder.samples import StoredSamples
from kedge.features.dataset.folder.stored_shard import PackedTexts

pytestmark = pytest.mark.usefixtures("no_threads_of_zarr")
FORMATS = ["safetensors", "zarr", "parquet"]
ROWS, LENGTH = 12, 100


@pytest.fixture(autouse=True)
def no_trust(monkeypatch):
    """Check at each read whether the file has changed."""
    monkeypatch.setattr(stored_shard, "TRUSTED", -1)


def values(length=LENGTH, dtype=torch.float32):
    """Rows that no other row equals."""
    return torch.arange(length * 3).reshape(length, 3).to(dtype)


def written(folder, rows=None, **options):
    """Write rows in shards of twelve, in an order that is not that of the data."""
    rows = values() if rows is None else rows
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)).tolist()
    data = [(rows[place], place) for place in range(len(rows))]
    loader = DataLoader(data, batch_size=ROWS, sampler=order)
    return extract_dataset(lambda x: {"f": x}, loader, folder, Options(shard_seconds=0, **options))


@pytest.fixture
def counted(monkeypatch):
    """Count how often each shard is opened."""
    opened = Counter()
    begin = formats.MappedShard.__init__

    def counting(self, path):
        opened[path.name] += 1
        begin(self, path)

    monkeypatch.setattr(formats.MappedShard, "__init__", counting)
    return opened


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_rows_are_chosen_as_of_a_tensor(tmp_path, form, dtype):
    """By number, slice, list, tensor and mask, forwards, backwards and empty, within a shard and across all of them."""
    whole = (values() % 200).to(dtype)
    column = written(tmp_path / "out", whole, format=form)["f"]
    mask = whole[:, 0].int() % 2 == 0
    chosen = [
        slice(None), slice(3, 40), slice(90, 200), slice(50, 3, -4), slice(-5, None), slice(7, 7), slice(60, 20),
        [], [5], [99, 0, 17, 17, -1], np.array([4, -100]), np.arange(0), torch.tensor([8, 3]), range(20, 26),
        mask, mask.numpy(), mask.tolist(), torch.zeros(LENGTH, dtype=torch.bool),
    ]  # fmt: skip

    for which in chosen:
        wanted = (
            whole.numpy(force=True)[which]
            if isinstance(which, slice) and dtype != torch.bfloat16
            else None
        )
        numbers = np.arange(LENGTH)[which] if isinstance(which, slice) else np.asarray(which)
        numbers = np.flatnonzero(numbers) if numbers.dtype == bool else numbers.astype(int)
        assert torch.equal(column[which], whole[torch.from_numpy(numbers)]), which
        assert wanted is None or np.array_equal(column[which].numpy(), wanted)
    for one in (0, 99, -1, -100, np.int32(7), torch.tensor(-3), np.array(5)):
        assert torch.equal(column[one], whole[int(one)])
    assert torch.equal(torch.stack(list(column)), whole)
    assert torch.equal(torch.stack(column.__getitems__([3, 90, 3])), whole[[3, 90, 3]])
    column[0].zero_()
    column[:].zero_()
    assert torch.equal(column.tensor(), whole), "what is returned belongs to the caller"


@pytest.mark.parametrize(
    "which",
    [
        100,
        -101,
        [100],
        [-101],
        np.ones(99, bool),
        [1.5],
        (3, 0),
        None,
        "3",
        ...,
        [[1, 2]],
        torch.ones(2, 2).long(),
        True,
        np.False_,
    ],
)
def test_rows_that_cannot_be_chosen_are_named(tmp_path, which):
    """The message names the column, and what it takes."""
    column = written(tmp_path / "out")["f"]

    with pytest.raises(
        IndexError,
        match=r"'f' has the values of 100 samples; there is no|samples of 'f' are chosen by a number",
    ):
        column[which]


def test_a_compared_column_is_no_mask(tmp_path):
    """Python compares a column with a number as objects, to False, which is not the number of a row; its values make a mask."""
    found = written(tmp_path / "out", labels=True)

    with pytest.raises(
        IndexError,
        match=r"False is none of these; compare values, not a column: column\[labels\.numpy\(\) == 3",
    ):
        found["f"][found.labels == 3]
    assert torch.equal(found["f"][found.labels.numpy() == 3], values()[3:4])


def test_shards_stay_open_between_reads(tmp_path, counted):
    """A thousand rows, singly and together, of two sites and a field open each shard once; closing opens them once more."""
    found = written(tmp_path / "out", labels=True)
    for number in np.random.default_rng(0).integers(0, LENGTH, 1000):
        assert torch.equal(found["f"][int(number)], values()[int(number)])
    assert torch.equal(found["f"][:], values())
    assert found.labels[:].tolist() == list(range(LENGTH))
    assert set(counted.values()) == {1}
    assert len(counted) == 9
    found.close()
    assert torch.equal(found["f"][:], values())
    assert set(counted.values()) == {2}


def test_a_batch_does_not_count_all_samples(tmp_path, monkeypatch):
    """A loader's batch costs as much in a data set of millions: which shards have samples is found once."""
    column = written(tmp_path / "out")["f"]
    column.__getitems__([1, 2])
    lengths, count = [], np.bincount
    monkeypatch.setattr(np, "bincount", lambda array: lengths.append(len(array)) or count(array))

    assert torch.equal(torch.stack(column.__getitems__([3, 90, 3])), values()[[3, 90, 3]])
    assert lengths == [3]


def test_few_shards_are_open_at_once(tmp_path, counted, monkeypatch):
    """Beyond a number of open shards the oldest is closed; all rows are still right."""
    monkeypatch.setattr(formats.Safetensors, "most_open", 2)
    found = written(tmp_path / "out")
    shards = found._samples.shards
    for _ in range(2):
        assert torch.equal(found["f"][:], values())
        assert sum(one._opened is not None for one in shards) == 2
    assert max(counted.values()) == 2


def test_open_shards_end_with_their_data_set(tmp_path):
    """Without any reference to the features nothing is mapped any more; and no file descriptor is held meanwhile."""
    process = Path("/proc/self")
    before = len([*(process / "fd").iterdir()])
    found = written(tmp_path / "out")
    found["f"][:]
    assert len([*(process / "fd").iterdir()]) == before
    assert str(tmp_path) in (process / "maps").read_text()
    del found
    gc.collect()
    assert str(tmp_path) not in (process / "maps").read_text()


def test_the_file_system_is_asked_now_and_then(tmp_path, monkeypatch):
    """Reads that follow each other at once trust the open file, later ones look whether it is still the same."""
    monkeypatch.setattr(stored_shard, "TRUSTED", 100)
    found = written(tmp_path / "out")
    found["f"][0]
    shutil.rmtree(tmp_path / "out")

    assert torch.equal(found["f"][0], values()[0])
    monkeypatch.setattr(stored_shard, "TRUSTED", -1)
    with pytest.raises(NotFeatures, match="cannot be read any more"):
        found["f"][0]


def test_blocks_are_compared_once(tmp_path, monkeypatch):
    """A row that was read again costs no second checksum, a changed file does."""
    found = written(tmp_path / "out")
    found["f"][:]
    with monkeypatch.context() as patch:
        patch.setattr("zlib.crc32", lambda data: pytest.fail("compared again"))
        assert torch.equal(found["f"][:], values())
        assert torch.equal(found["f"][17], values()[17])
    path = tmp_path / "out" / "shard-0-00003.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(
        NotFeatures,
        match=r"shard-0-00003\.safetensors is damaged: the values of 'f' of the samples",
    ):
        found["f"][:]


@pytest.mark.parametrize("form", FORMATS)
def test_a_shard_that_was_replaced_is_read_anew(tmp_path, form):
    """The same content in another file is read; another shard, or none, is an error that names it."""
    found = written(tmp_path / "out", format=form)
    other = written(
        tmp_path / "other", values() + 1, format=form, keys=[f"k{i}" for i in range(LENGTH)]
    )
    found["f"][:]
    path = tmp_path / "out" / f"shard-0-00003.{form}"
    aside, source = tmp_path / f"aside.{form}", other.path / path.name
    path.rename(aside)
    with pytest.raises(NotFeatures, match=rf"shard-0-00003\.{form} cannot be read any more"):
        found["f"][:]
    (shutil.copytree if aside.is_dir() else shutil.copy)(aside, path)
    assert torch.equal(found["f"][:], values())
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    (shutil.copytree if source.is_dir() else shutil.copy)(source, path)
    with pytest.raises(
        NotFeatures,
        match=rf"shard-0-00003\.{form} was changed or replaced since the folder was opened",
    ):
        found["f"][:]


@pytest.mark.parametrize("left", [0, 5, 200, -30])
def test_a_shard_that_was_cut_off_is_noticed(tmp_path, left):
    """Before it is opened and while it is open: an error with its name, and not the end of the process."""
    found = written(tmp_path / "out")
    path = tmp_path / "out" / "shard-0-00002.safetensors"
    found["f"][:]
    os.truncate(path, left % path.stat().st_size)

    for features in (found, open_features(tmp_path / "out")):
        with pytest.raises(NotFeatures, match=r"shard-0-00002\.safetensors"):
            features["f"][:]


def test_a_folder_that_was_moved_is_opened_where_it_is(tmp_path):
    """Nothing in a folder refers to its place."""
    found = written(tmp_path / "out", labels=True)
    found["f"][:]
    (tmp_path / "out").rename(tmp_path / "moved")

    with pytest.raises(NotFeatures, match="open the folder where it is now"):
        found["f"][0]
    moved = open_features(tmp_path / "moved")
    assert torch.equal(moved["f"][:], values())
    assert moved.number("7") == 7


def test_open_columns_are_sent_to_other_processes(tmp_path, counted):
    """A pickle has no open shards and no hashes, which are another process's; a fork reads on in the same memory."""
    found = written(tmp_path / "out", keys=[f"key {i}" for i in range(LENGTH)], labels=True)
    assert (found.number("key 31"), found["f"][31].tolist()) == (31, values()[31].tolist())
    sent = pickle.dumps((found, found["f"], found.labels))
    assert b"_by_hash" not in sent
    again, column, labels = pickle.loads(sent)

    assert torch.equal(column[:], values())
    assert labels[5].item() == 5
    assert again.number("key 31") == 31
    assert again.samples == found.samples
    before = sum(counted.values())
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(column[:], values()) and sum(counted.values()) == before else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_threads_read_one_data_set_together(tmp_path, monkeypatch):
    """Eight threads, of which each opens and closes shards for the others, read what one does."""
    monkeypatch.setattr(formats.Safetensors, "most_open", 1)
    found, wrong = written(tmp_path / "out"), []

    def read(seed):
        numbers = [
            [number, 3] for number in np.random.default_rng(seed).integers(0, LENGTH, 100).tolist()
        ]
        wrong.extend(some for some in numbers if not torch.equal(found["f"][some], values()[some]))

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_keys_are_found_without_an_object_for_each(tmp_path, monkeypatch):
    """A key is compared as text, also where hashes are equal; one that is not there is an error."""
    monkeypatch.setattr(
        "kedge.features.dataset.folder.samples.hash", lambda key: len(key), raising=False
    )
    keys = [f"{'ä' if i % 2 else ''}key {i}" for i in range(LENGTH)]
    found = written(tmp_path / "out", keys=keys)

    assert [found.number(key) for key in keys] == list(range(LENGTH))
    assert found.samples == tuple(keys)
    assert "keys" in vars(found._samples)
    with pytest.raises(NoSuchKey, match="there are 100 others"):
        found.number("key 1")
    assert isinstance(found._samples, StoredSamples)


def test_packed_texts_are_a_sequence():
    """Empty texts, other scripts and negative numbers: as in a list."""
    texts = ["", "a", "ä€", "", "\ud800", "x" * 50, ""]
    packed = PackedTexts(texts)

    assert (list(packed), len(packed)) == (texts, 7)
    assert [packed[number] for number in range(-7, 7)] == [*texts, *texts]
    assert packed[1:6:2] == texts[1:6:2]
    assert list(PackedTexts([])) == []
    with pytest.raises(IndexError):
        packed[7]
