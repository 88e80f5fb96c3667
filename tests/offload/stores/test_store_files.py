"""The files that hold saved bytes: written front to back, freed whole, and gone with the process."""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import random
import resource
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from kedge.errors import DiskFull, DiskIsMemory, StoreError
from kedge.offload.stores import disk, unnamed_file
from kedge.offload.stores.disk import StoreFiles
from kedge.offload.stores.mapped import can_map
from kedge.offload.stores.memory_window import MemoryWindow
from kedge.offload.stores.unnamed_file import GROWTH, PAGE, UnnamedFile

MAPS = pytest.mark.skipif(not can_map(), reason="needs mapped reads, which Linux has since 5.14")


def ramp(nbytes, start=0):
    """Return bytes that differ from their neighbours."""
    return ((torch.arange(nbytes) + start) % 251).to(torch.uint8)


def descriptors():
    """Count the descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def files_in(folder):
    """Return the files of a store in a folder."""
    return StoreFiles(folder, uncached=False, checksum=False)


@pytest.fixture
def files(tmp_path):
    """Return the files of a store in an empty folder."""
    files = files_in(tmp_path)
    yield files
    files.close()


def test_bytes_come_back_and_each_reader_has_its_own(files):
    """What is changed after it was read changes neither the file nor what another read gives."""
    data = ramp(200_001)
    slot = files.put(data)
    first, second = slot.get(), slot.get()
    first.zero_()

    assert torch.equal(second, data)
    assert torch.equal(slot.get(), data)
    assert first.data_ptr() % 16 == 0
    slot.free()


def test_the_bytes_are_those_of_the_time_of_the_put(files):
    """A program that changes its tensor afterwards, by whichever way, changes nothing in the file."""
    data = ramp(100_000)
    before = data.clone()
    slot = files.put(data)
    data.data.zero_()

    assert torch.equal(slot.get(), before)
    slot.free()


def test_a_step_reuses_the_room_of_the_step_before(files):
    """The file has the size of one step's tensors, not of all steps'."""
    pieces = [torch.ones(size, dtype=torch.uint8) for size in (9_000_000, 5_000_000, 9_000_000)]
    for _ in range(10):
        for slot in [files.put(piece) for piece in pieces]:
            slot.free()

    assert files.used == 0
    assert files.size == GROWTH


def test_steps_larger_than_a_file_reuse_the_room_too(files, monkeypatch):
    """However many files a step fills, the next steps fill the same ones."""
    monkeypatch.setattr(disk, "GROWTH", 1 << 20)
    monkeypatch.setattr(unnamed_file, "GROWTH", 1 << 20)
    small = StoreFiles(files._folder, uncached=False, checksum=False)
    sizes, counts = set(), set()
    for _ in range(5):
        pieces = [ramp(900_000 + 1000 * turn, turn) for turn in range(12)]
        slots = [small.put(piece) for piece in pieces]
        assert all(torch.equal(slot.get(), data) for slot, data in zip(slots, pieces, strict=True))
        for slot in reversed(slots):
            slot.free()
        sizes.add(small.size)
        counts.add(small.count)

    assert small.used == 0
    assert len(counts) == 1
    assert counts.pop() > 1
    assert len(sizes) == 1
    small.close()


def test_a_tensor_kept_for_long_holds_back_one_file(files, monkeypatch):
    """The others are written from their front again, and so is its own once it is freed."""
    monkeypatch.setattr(disk, "GROWTH", 1 << 20)
    monkeypatch.setattr(unnamed_file, "GROWTH", 1 << 20)
    small = StoreFiles(files._folder, uncached=False, checksum=False)
    kept = small.put(ramp(500_000, 7))
    for _ in range(20):
        for slot in [small.put(ramp(400_000)) for _ in range(4)]:
            slot.free()

    assert torch.equal(kept.get(), ramp(500_000, 7))
    assert small.size <= 4 << 20
    kept.free()
    assert small.used == 0
    small.close()


def test_files_too_small_for_a_tensor_leave_the_disk_when_they_are_empty(files, monkeypatch):
    """A tensor larger than all before it gets a file of its own, in place of those."""
    monkeypatch.setattr(disk, "GROWTH", 1 << 20)
    monkeypatch.setattr(unnamed_file, "GROWTH", 1 << 20)
    small = StoreFiles(files._folder, uncached=False, checksum=False)
    small.put(ramp(500_000)).free()
    slot = small.put(ramp(3_000_000))

    assert torch.equal(slot.get(), ramp(3_000_000))
    assert small.count == 1
    assert small.size == slot.piece.room
    slot.free()
    small.close()


@MAPS
def test_bytes_are_not_overwritten_while_a_tensor_shows_them(files):
    """A tensor read from a slot that is freed keeps its bytes until it is gone itself."""
    data = ramp(300_000)
    slot = files.put(data)
    shown = slot.get()[1000:2000]
    slot.free()
    other = files.put(torch.zeros_like(data))

    assert torch.equal(shown, data[1000:2000])
    assert files.used == 2 * slot.piece.room
    other.free()
    assert files.used == 2 * slot.piece.room
    del shown
    assert files.used == 0
    again = files.put(data)
    assert again.piece.start == slot.piece.start == 0
    again.free()


@MAPS
def test_what_was_read_does_not_count_as_memory_once_it_is_gone(files):
    """The pages of a map leave the process with the tensor."""

    def resident():
        with pathlib.Path("/proc/self/statm").open() as statm:
            return int(statm.read().split()[1]) * PAGE

    slot = files.put(torch.ones(32 << 20, dtype=torch.uint8))
    before = resident()
    shown = slot.get()
    during = resident()
    del shown

    assert during - before > 30 << 20
    assert resident() - before < 4 << 20
    slot.free()


def test_a_system_without_mapped_reads_gets_copies(files, monkeypatch):
    """Where Linux is too old, or is not there, bytes are read into memory."""
    monkeypatch.setattr("kedge.offload.stores.unnamed_file.can_map", lambda: False)
    data = ramp(200_000)
    slot = files.put(data)
    slot.get().zero_()

    assert torch.equal(slot.get(), data)
    slot.free()


def test_a_write_that_takes_a_part_is_continued(files, monkeypatch):
    """The system may take fewer bytes than it is given."""
    whole = os.pwritev

    def part(file, buffers, offset):
        return whole(file, [memoryview(buffers[0])[:1000]] if len(buffers[0]) else buffers, offset)

    monkeypatch.setattr(os, "pwritev", part)
    data = ramp(12_345)
    slot = files.put(data)

    assert torch.equal(slot.get(), data)
    slot.free()


def test_nothing_at_all_can_be_put(files):
    """Zero bytes are a case like others."""
    slot = files.put(torch.empty(0, dtype=torch.uint8))

    assert slot.get().numel() == 0
    slot.free()
    assert files.used == 0


def test_threads_put_read_and_release_at_once(files):
    """No thread ever sees another's bytes."""
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        held = []
        for turn in range(150):
            data = torch.full(
                (rng.randrange(1, 60_000),), (seed * 31 + turn) % 256, dtype=torch.uint8
            )
            held.append((data, files.put(data)))
            if rng.random() < 0.7:
                data, slot = held.pop(rng.randrange(len(held)))
                wrong.extend([seed] * (not torch.equal(slot.get(), data)))
                slot.free()
        for _, slot in held:
            slot.free()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert files.used == 0


def test_a_collection_inside_a_put_may_release(files, monkeypatch):
    """Garbage that holds slots may be collected while a put has the locks, in the same thread."""

    class Garbage:
        def __init__(self):
            self.me, self.slot = self, files.put(ramp(5000))

        def __del__(self):
            self.slot.free()

    gc.collect()
    with without_collection():
        for _ in range(10):
            Garbage()
        held = files.used
        for owner, name in ((UnnamedFile, "take"), (MemoryWindow, "_forget_freed")):
            whole = getattr(owner, name)
            monkeypatch.setattr(
                owner, name, lambda *given, whole=whole: (gc.collect(), whole(*given))[1]
            )
        slot = files.put(ramp(5000))

    assert held == 10 * 2 * PAGE
    assert files.used == 2 * PAGE
    slot.free()
    assert files.used == 0


@contextmanager
def without_collection():
    """Run a block in which Python collects garbage only when it is told to."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_the_file_is_closed_once_nothing_holds_a_range(tmp_path):
    """Closing twice does nothing; a range that is still held works until it is released."""
    before = descriptors()
    files = files_in(tmp_path)
    slot = files.put(ramp(70_000))
    files.close()
    files.close()

    assert torch.equal(slot.get(), ramp(70_000))
    with pytest.raises(StoreError, match="closed"):
        files.put(ramp(5))
    slot.free()
    assert descriptors() == before


def test_a_forgotten_range_file_closes_its_file(tmp_path):
    """Nobody has to close."""
    before = descriptors()
    files = files_in(tmp_path)
    files.put(ramp(70_000))
    del files
    gc.collect()

    assert descriptors() == before


def test_the_file_has_no_name(tmp_path, monkeypatch):
    """The folder is empty at all times, with O_TMPFILE and without."""
    for unnamed in (True, False):
        if not unnamed:
            monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        files = files_in(tmp_path)
        slot = files.put(ramp(70_000))
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(slot.get(), ramp(70_000))
        slot.free()
        files.close()


def test_a_file_system_without_unnamed_files_gets_a_removed_one(tmp_path, monkeypatch):
    """O_TMPFILE is a matter of the file system, not of the system alone."""
    opened = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    files = files_in(tmp_path)

    assert list(tmp_path.iterdir()) == []
    files.close()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    """The message says which folder, and what to do."""
    with pytest.raises(
        StoreError, match=r"missing, which is not a folder; create it, or name another"
    ):
        files_in(tmp_path / "missing")


def test_a_folder_that_takes_no_file_is_named(tmp_path, monkeypatch):
    """The message says what the system said."""
    monkeypatch.setattr(unnamed_file, "_open", lambda folder: os.open(folder, os.O_RDWR))
    with pytest.raises(
        StoreError,
        match=r"where no file can be created: Is a directory; name a folder that you may write to",
    ):
        files_in(tmp_path)


@pytest.mark.skipif(
    os.geteuid() == 0 and not pathlib.Path("/proc/sys/kernel").exists(),
    reason="needs a folder nobody may write to",
)
def test_a_folder_that_is_not_ours_is_named():
    """A real one: not even root makes files there."""
    with pytest.raises(
        StoreError,
        match=r"saved tensors cannot go to /proc/sys/kernel, where no file can be created",
    ):
        files_in("/proc/sys/kernel")


@pytest.mark.skipif(not pathlib.Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_a_folder_in_memory_is_told_of_once(monkeypatch):
    """Tensors on a tmpfs take as much memory as before, so it is said, and the folder is used."""
    if unnamed_file.filesystem(Path("/dev/shm").stat().st_dev) != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    monkeypatch.setattr(unnamed_file, "_warned", set())
    with pytest.warns(DiskIsMemory, match="/dev/shm, which is a file system in memory"):
        files = files_in("/dev/shm")
    slot = files.put(ramp(70_000))
    assert torch.equal(slot.get(), ramp(70_000))
    slot.free()
    files.close()

    files_in("/dev/shm").close()


def test_a_full_disk_is_an_error_before_anything_is_written(files, monkeypatch):
    """The message has what was asked, what is free, where, and what to do; the files goes on working."""

    def full(file, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            DiskFull,
            match=r"need 73,728 more bytes in .*, where [\d,]+ bytes are free: No space left",
        ) as caught:
            files.put(ramp(70_000))
    assert isinstance(caught.value, OSError)
    assert "make room, name another folder" in str(caught.value)
    assert files.used == files.size == 0

    slot = files.put(ramp(70_000))
    assert torch.equal(slot.get(), ramp(70_000))
    slot.free()


def test_the_last_room_of_a_disk_is_used(files, monkeypatch):
    """Where there is no room to grow by much, the file grows by what is needed."""
    allocate = os.posix_fallocate

    def little(file, offset, size):
        if size > 1 << 20:
            raise OSError(errno.ENOSPC, "full")
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", little)
    slots = [files.put(ramp(100_000)) for _ in range(3)]

    assert files.size == 3 * slots[0].piece.room
    for slot in slots:
        slot.free()


@pytest.mark.skipif(
    not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit for the size of files"
)
def test_a_limit_for_files_is_an_error_too(files):
    """A real refusal by the system, at the second tensor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        first = files.put(ramp(700_000))
        with pytest.raises(DiskFull, match="the file would be larger than allowed"):
            files.put(ramp(700_000))
        assert torch.equal(first.get(), ramp(700_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    first.free()


@pytest.mark.parametrize("mapped", [pytest.param(True, marks=MAPS), False])
def test_a_file_that_cannot_be_read_is_an_error_and_no_signal(files, monkeypatch, mapped):
    """A page that is not there would be a SIGBUS in a map; it is an OSError that names the folder."""
    if not mapped:
        monkeypatch.setattr("kedge.offload.stores.unnamed_file.can_map", lambda: False)
    slot = files.put(ramp(70_000))
    os.ftruncate(slot.piece.filling.file.fileno(), 0)
    with pytest.raises(StoreError, match=r"70,000 bytes cannot be read back from"):
        slot.get()
    slot.free()

    assert files.used == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_keeps_what_it_shows_and_reads_no_more(files):
    """The child holds no descriptor, its maps are its own, and what it cannot have is an error, not other bytes."""
    data = ramp(200_000)
    slot = files.put(data)
    shown = slot.get() if can_map() else data
    file = slot.piece.filling.file
    going, said = os.pipe()
    written, told = os.pipe()
    child = os.fork()
    if not child:
        os.read(written, 1)  # the parent has put other bytes in the range
        verdict = [torch.equal(shown, data), file.closed]
        try:
            slot.get()
        except StoreError as error:
            verdict.append("forked after it was saved" in str(error))
        slot.free()
        os.write(said, bytes(verdict))
        os._exit(0)
    os.pwrite(file.fileno(), bytes(slot.piece.room), slot.piece.start)
    os.write(told, b"!")
    assert os.read(going, 9) == b"\1\1\1"
    os.waitpid(child, 0)
    for end in (going, said, written, told):
        os.close(end)
    del shown
    slot.free()
