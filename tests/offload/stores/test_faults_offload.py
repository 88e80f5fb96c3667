"""What goes wrong around the disk store: processes that end, disks that fail, threads that are left."""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import re
import signal
import sys
import threading
from pathlib import Path

import pytest
import torch

import kedge
from kedge.errors import ChecksumMismatch, DiskFull, KedgeError, StoreError
from kedge.offload.stores.disk import DiskStore
from kedge.offload.stores.mapped import LIBC
from kedge.offload.stores.unnamed_file import UnnamedFile
from tests import forked

pytestmark = pytest.mark.timing

ENDS = """
import os, signal, sys, torch
from kedge.offload.stores.disk import DiskStore

store = DiskStore(sys.argv[1], uncached=True)
slots = [store.put(torch.ones(1 << 20, dtype=torch.uint8)) for _ in range(150)]
shown = slots[3].get()
assert os.listdir(sys.argv[1]) == []
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os._exit(3)", 3),
        ("raise ValueError('of the program')", 1),
        (
            "class Holder:\n    def __init__(self, slot): self.slot = slot\n    def __del__(self): self.slot.free()\nholders = [Holder(slot) for slot in slots]",
            0,
        ),
    ],
)
def test_no_file_is_left_however_a_process_ends(tmp_path, end, code):
    """Killed, left without cleaning up, with an error, with slots freed at the very end: the folder is empty, and nothing is said."""
    ended = forked.run([sys.executable, "-c", ENDS.format(end=end), str(tmp_path)], timeout=100)

    assert ended.returncode == code, ended.stderr
    assert list(tmp_path.iterdir()) == []
    assert [
        line
        for line in ended.stderr.splitlines()
        if line and not line.startswith((" ", "Traceback", "ValueError: of"))
    ] == []


MB = 1 << 20


def piece(seed, nbytes=MB):
    """Return bytes that tell which piece they are."""
    return torch.full((nbytes,), seed % 256, dtype=torch.uint8)


def names():
    """Name the threads of stores that live."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("kedge-")}


def test_a_checksum_finds_a_changed_byte(tmp_path):
    """One byte that the disk changed is an error at the read, with both sums; other tensors are not affected."""
    store = DiskStore(tmp_path, checksum=True)
    good, bad = store.put(piece(1)), store.put(piece(2))
    assert torch.equal(bad.get(), piece(2))
    with pathlib.Path(f"/proc/self/fd/{bad.piece.filling.file.fileno()}").open(
        "r+b", buffering=0
    ) as file:
        file.seek(bad.piece.start + 77)
        file.write(b"\xff")
    with pytest.raises(
        ChecksumMismatch,
        match=r"1,048,576 bytes came back from .* with CRC-32 [0-9a-f]{8} and was written with",
    ):
        bad.get()

    assert torch.equal(good.get(), piece(1))
    for slot in (good, bad):
        slot.free()
    store.close()


def test_the_cost_of_checksums_is_reported(tmp_path):
    """Whoever asks for checksums sees what they took."""
    store = DiskStore(tmp_path, checksum=True)
    slot = store.put(piece(1))
    slot.get()

    assert "1,048,576 bytes written, 1,048,576 bytes read" in str(store)
    assert str(store).endswith("s for checksums")
    slot.free()
    store.close()


def test_the_printed_account_ends_with_what_checksums_took(tmp_path):
    """The store is the block's own; what it did is in the account."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh())
    disk = kedge.Disk(tmp_path, checksum=True, rebuild=False)
    with kedge.offload(model, to=disk, min_bytes=0) as account:
        model(torch.randn(32, 64)).sum().backward()

    last = str(account).splitlines()[-1]
    assert f"in {tmp_path}" in last
    assert re.search(r"\d\.\d{3} s for checksums$", last)


def test_a_full_disk_is_both_ours_and_the_systems_error(tmp_path, monkeypatch):
    """The engine catches an OSError and keeps the tensor; a user catches a KedgeError.

    Nothing leaks.
    """
    store = DiskStore(tmp_path)

    def full(file, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskFull) as caught:
        store.put(piece(1))

    assert isinstance(caught.value, OSError)
    assert isinstance(caught.value, KedgeError)
    assert store._files.used == 0
    store.close()


def test_a_write_that_fails_gives_its_room_back(tmp_path, monkeypatch):
    """An error of the disk in the middle of a put leaves the store as it was."""
    store = DiskStore(tmp_path)

    def broken(*arguments):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", broken)
        with pytest.raises(StoreError, match="cannot be written in .*: Input/output error"):
            store.put(piece(1))
    assert store._files.used == 0

    slot = store.put(piece(2))
    assert torch.equal(slot.get(), piece(2))
    slot.free()
    store.close()


@pytest.mark.skipif(not hasattr(LIBC, "sync_file_range"), reason="needs sync_file_range")
def test_a_disk_that_fails_in_the_background_loses_nothing(tmp_path, monkeypatch):
    """What could not be written out stays readable in memory, and the next put says that the disk failed."""

    def broken(file, piece):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("kedge.offload.stores.disk.WINDOW", 2 * MB)
    monkeypatch.setattr(UnnamedFile, "sync", broken)
    store = DiskStore(tmp_path, uncached=True)
    slots = []
    with pytest.raises(
        StoreError, match="failed to write an earlier saved tensor: .*Input/output error"
    ):
        slots.extend(store.put(piece(seed)) for seed in range(50))

    assert len(slots) >= 3
    assert all(torch.equal(slot.get(), piece(seed)) for seed, slot in enumerate(slots))
    for slot in slots:
        slot.free()
    store.close()


def test_no_thread_is_left(tmp_path, monkeypatch):
    """Closing ends the threads, with slots still there; they go on working without."""
    monkeypatch.setattr("kedge.offload.stores.disk.WINDOW", 2 * MB)
    store = DiskStore(tmp_path, uncached=True)
    slots = [store.put(piece(seed)) for seed in range(20)]
    slots[-1].get()
    assert "kedge-writes-out" in names()
    store.close()
    assert names() == set()

    assert all(torch.equal(slot.get(), piece(seed)) for seed, slot in enumerate(slots))
    assert names() == set()
    for slot in slots:
        slot.free()


def test_a_store_that_nobody_closes_goes_with_its_last_slot(tmp_path, monkeypatch):
    """An abandoned graph leaves no thread, no descriptor, no file."""
    monkeypatch.setattr("kedge.offload.stores.disk.WINDOW", 2 * MB)
    gc.collect()  # or what other tests have left behind is closed in between
    before = sorted(path.name for path in Path("/proc/self/fd").iterdir())
    store = DiskStore(tmp_path, uncached=True)
    slots = [store.put(piece(seed)) for seed in range(20)]
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("kedge-")]
    assert threads
    del store, slots
    gc.collect()
    for thread in threads:
        thread.join(60)

    assert names() == set()
    assert sorted(path.name for path in Path("/proc/self/fd").iterdir()) == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("uncached", [True, False])
def test_a_forked_child_offloads_into_a_file_of_its_own(tmp_path, monkeypatch, uncached):
    """Threads do not survive a fork and the parent's file is not the child's: the child gets both anew."""
    monkeypatch.setattr("kedge.offload.stores.disk.WINDOW", 2 * MB)
    store = DiskStore(tmp_path, uncached=uncached)
    ours = [store.put(piece(seed)) for seed in range(20)]
    files = [slot.piece.filling.file for slot in ours]
    child = os.fork()
    if not child:
        for slot in ours:
            slot.prefetch()
            slot.free()
        theirs = [store.put(piece(100 + seed)) for seed in range(20)]
        right = all(torch.equal(slot.get(), piece(100 + seed)) for seed, slot in enumerate(theirs))
        for slot in theirs:
            slot.free()
        store.close()
        os._exit(0 if right and all(file.closed for file in files) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    assert all(torch.equal(slot.get(), piece(seed)) for seed, slot in enumerate(ours))
    for slot in ours:
        slot.free()
    store.close()
