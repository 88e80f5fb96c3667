"""The file that holds saved bytes: which ranges are free, who holds them, and what it leaves behind."""

from __future__ import annotations

import errno
import gc
import os
import pathlib
import random
import resource
import threading
from pathlib import Path

import pytest
import torch

from kedge.errors import DiskFull, DiskIsMemory, StoreError
from kedge.offload.stores import scratch
from kedge.offload.stores.file_ranges import GROWTH, PAGE, RangeFile
from kedge.offload.stores.free_ranges import FreeRanges
from kedge.offload.stores.mapped import can_map

MAPS = pytest.mark.skipif(not can_map(), reason="needs mapped reads, which Linux has since 5.14")


def ramp(nbytes, start=0):
    """Return bytes that differ from their neighbours."""
    return ((torch.arange(nbytes) + start) % 251).to(torch.uint8)


def files():
    """Count the descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def ranges(tmp_path):
    """Ranges in an empty folder."""
    ranges = RangeFile(tmp_path)
    yield ranges
    ranges.close()


def test_ranges_never_overlap_and_all_room_comes_back():
    """Whatever is taken and given in whatever order, no byte has two owners, and in the end one free range is left."""
    rng = random.Random(1)
    extents, taken = FreeRanges(), []
    for _ in range(3000):
        if taken and rng.random() < 0.5:
            extents.release(*taken.pop(rng.randrange(len(taken))))
            continue
        size = rng.randrange(1, 100)
        start = extents.take(size)
        if start is None:
            extents.grow(extents.missing(size))
            start = extents.take(size)
        assert all(start + size <= other or other + length <= start for other, length in taken)
        taken.append((start, size))
        assert extents.used == sum(length for _, length in taken)
    for piece in taken:
        extents.release(*piece)

    assert extents.used == 0
    assert extents.take(extents.size) == 0


def test_the_smallest_range_that_is_large_enough_is_taken():
    """A large hole is not cut up while a smaller one will do."""
    extents = FreeRanges()
    extents.grow(100)
    pieces = [(extents.take(size), size) for size in (40, 5, 10, 5, 40)]
    for start, size in (pieces[0], pieces[2]):
        extents.release(start, size)

    assert extents.take(9) == pieces[2][0]
    assert extents.take(11) == pieces[0][0]


def test_bytes_come_back_and_each_reader_has_its_own(ranges):
    """What is changed after it was read changes neither the file nor what another read gives."""
    data = ramp(200_001)
    extent = ranges.put(data)
    first, second = ranges.read(extent), ranges.read(extent)
    first.zero_()

    assert torch.equal(second, data)
    assert torch.equal(ranges.read(extent), data)
    assert first.data_ptr() % 16 == 0
    ranges.release(extent)


def test_the_bytes_are_those_of_the_time_of_the_put(ranges):
    """A program that changes its tensor afterwards, by whichever way, changes nothing in the file."""
    data = ramp(100_000)
    before = data.clone()
    extent = ranges.put(data)
    data.data.zero_()

    assert torch.equal(ranges.read(extent), before)
    ranges.release(extent)


def test_a_step_reuses_the_room_of_the_step_before(ranges):
    """The file has the size of one step's tensors, not of all steps'."""
    pieces = [torch.ones(size, dtype=torch.uint8) for size in (9_000_000, 5_000_000, 9_000_000)]
    for _ in range(10):
        for extent in [ranges.put(piece) for piece in pieces]:
            ranges.release(extent)

    assert ranges.used == 0
    assert ranges.size == GROWTH


@MAPS
def test_a_range_is_not_reused_while_a_tensor_shows_it(ranges):
    """A tensor read from a slot that is freed keeps its bytes until it is gone itself."""
    data = ramp(300_000)
    extent = ranges.put(data)
    shown = ranges.read(extent)[1000:2000]
    ranges.release(extent)
    other = ranges.put(torch.zeros_like(data))

    assert torch.equal(shown, data[1000:2000])
    assert ranges.used == 2 * extent.room
    del shown
    assert ranges.used == extent.room
    ranges.release(other)


@MAPS
def test_what_was_read_does_not_count_as_memory_once_it_is_gone(ranges):
    """The pages of a map leave the process with the tensor."""

    def resident():
        with pathlib.Path("/proc/self/statm").open() as statm:
            return int(statm.read().split()[1]) * PAGE

    extent = ranges.put(torch.ones(32 << 20, dtype=torch.uint8))
    before = resident()
    shown = ranges.read(extent)
    during = resident()
    del shown

    assert during - before > 30 << 20
    assert resident() - before < 4 << 20
    ranges.release(extent)


def test_a_system_without_mapped_reads_gets_copies(ranges, monkeypatch):
    """Where Linux is too old, or is not there, bytes are read into memory."""
    monkeypatch.setattr("kedge.offload.stores.file_ranges.can_map", lambda: False)
    data = ramp(200_000)
    extent = ranges.put(data)
    ranges.read(extent).zero_()

    assert torch.equal(ranges.read(extent), data)
    ranges.release(extent)


def test_a_write_that_takes_a_part_is_continued(ranges, monkeypatch):
    """The system may take fewer bytes than it is given."""
    whole = os.pwritev

    def part(file, buffers, offset):
        return whole(file, [memoryview(buffers[0])[:1000]] if len(buffers[0]) else buffers, offset)

    monkeypatch.setattr(os, "pwritev", part)
    data = ramp(12_345)
    extent = ranges.put(data)

    assert torch.equal(ranges.read(extent), data)
    ranges.release(extent)


def test_nothing_at_all_can_be_put(ranges):
    """Zero bytes are a case like others."""
    extent = ranges.put(torch.empty(0, dtype=torch.uint8))

    assert ranges.read(extent).numel() == 0
    ranges.release(extent)
    assert ranges.used == 0


def test_threads_put_read_and_release_at_once(ranges):
    """No thread ever sees another's bytes."""
    wrong = []

    def work(seed):
        rng = random.Random(seed)
        held = []
        for turn in range(150):
            data = torch.full(
                (rng.randrange(1, 60_000),), (seed * 31 + turn) % 256, dtype=torch.uint8
            )
            held.append((data, ranges.put(data)))
            if rng.random() < 0.7:
                data, extent = held.pop(rng.randrange(len(held)))
                wrong.extend([seed] * (not torch.equal(ranges.read(extent), data)))
                ranges.release(extent)
        for _, extent in held:
            ranges.release(extent)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert ranges.used == 0


def test_a_collection_inside_a_put_may_release(ranges):
    """Garbage that holds ranges may be collected while the lock is held, in the same thread."""

    class Garbage:
        def __init__(self):
            self.me, self.extent = self, ranges.put(ramp(5000))

        def __del__(self):
            ranges.release(self.extent)

    for _ in range(10):
        Garbage()
    with ranges.locked():
        gc.collect()
        held = ranges.used

    assert held == 10 * 2 * PAGE
    assert ranges.used == 0


def test_the_file_is_closed_once_nothing_holds_a_range(tmp_path):
    """Closing twice does nothing; a range that is still held works until it is released."""
    before = files()
    ranges = RangeFile(tmp_path)
    extent = ranges.put(ramp(70_000))
    ranges.close()
    ranges.close()

    assert torch.equal(ranges.read(extent), ramp(70_000))
    with pytest.raises(StoreError, match="closed"):
        ranges.put(ramp(5))
    ranges.release(extent)
    assert files() == before


def test_a_forgotten_range_file_closes_its_file(tmp_path):
    """Nobody has to close."""
    before = files()
    ranges = RangeFile(tmp_path)
    ranges.put(ramp(70_000))
    del ranges
    gc.collect()

    assert files() == before


def test_the_file_has_no_name(tmp_path, monkeypatch):
    """The folder is empty at all times, with O_TMPFILE and without."""
    for unnamed in (True, False):
        if not unnamed:
            monkeypatch.delattr(os, "O_TMPFILE", raising=False)
        ranges = RangeFile(tmp_path)
        extent = ranges.put(ramp(70_000))
        assert list(tmp_path.iterdir()) == []
        assert torch.equal(ranges.read(extent), ramp(70_000))
        ranges.release(extent)
        ranges.close()


def test_a_file_system_without_unnamed_files_gets_a_removed_one(tmp_path, monkeypatch):
    """O_TMPFILE is a matter of the file system, not of the system alone."""
    opened = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return opened(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse)
    ranges = RangeFile(tmp_path)

    assert list(tmp_path.iterdir()) == []
    ranges.close()


def test_a_folder_that_is_not_there_is_named(tmp_path):
    """The message says which folder, and what to do."""
    with pytest.raises(
        StoreError, match=r"missing, which is not a folder; create it, or name another"
    ):
        RangeFile(tmp_path / "missing")


def test_a_folder_that_takes_no_file_is_named(tmp_path, monkeypatch):
    """The message says what the system said."""
    monkeypatch.setattr(scratch, "_open", lambda folder: os.open(folder, os.O_RDWR))
    with pytest.raises(
        StoreError,
        match=r"where no file can be created: Is a directory; name a folder that you may write to",
    ):
        RangeFile(tmp_path)


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
        RangeFile("/proc/sys/kernel")


@pytest.mark.skipif(not pathlib.Path("/dev/shm").is_dir(), reason="needs a file system in memory")
def test_a_folder_in_memory_is_reported_once(monkeypatch):
    """Tensors on a tmpfs take as much memory as before, so it is said, and the folder is used."""
    if scratch.filesystem(Path("/dev/shm").stat().st_dev) != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    monkeypatch.setattr(scratch, "_warned", set())
    with pytest.warns(DiskIsMemory, match="/dev/shm, which is a file system in memory"):
        ranges = RangeFile("/dev/shm")
    extent = ranges.put(ramp(70_000))
    assert torch.equal(ranges.read(extent), ramp(70_000))
    ranges.release(extent)
    ranges.close()

    RangeFile("/dev/shm").close()


def test_a_full_disk_is_an_error_before_anything_is_written(ranges, monkeypatch):
    """The message has what was asked, what is free, where, and what to do; the ranges goes on working."""

    def full(file, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            DiskFull,
            match=r"need 73,728 more bytes in .*, where [\d,]+ bytes are free: No space left",
        ) as caught:
            ranges.put(ramp(70_000))
    assert isinstance(caught.value, OSError)
    assert "make room, name another folder" in str(caught.value)
    assert ranges.used == ranges.size == 0

    extent = ranges.put(ramp(70_000))
    assert torch.equal(ranges.read(extent), ramp(70_000))
    ranges.release(extent)


def test_the_last_room_of_a_disk_is_used(ranges, monkeypatch):
    """Where there is no room to grow by much, the file grows by what is needed."""
    allocate = os.posix_fallocate

    def little(file, offset, size):
        if size > 1 << 20:
            raise OSError(errno.ENOSPC, "full")
        allocate(file, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", little)
    extents = [ranges.put(ramp(100_000)) for _ in range(3)]

    assert ranges.size == 3 * extents[0].room
    for extent in extents:
        ranges.release(extent)


@pytest.mark.skipif(
    not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit for the size of files"
)
def test_a_limit_for_files_is_an_error_too(ranges):
    """A real refusal by the system, at the second tensor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        first = ranges.put(ramp(700_000))
        with pytest.raises(DiskFull, match="the file would be larger than allowed"):
            ranges.put(ramp(700_000))
        assert torch.equal(ranges.read(first), ramp(700_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    ranges.release(first)


@pytest.mark.parametrize("mapped", [pytest.param(True, marks=MAPS), False])
def test_a_file_that_cannot_be_read_is_an_error_and_no_signal(ranges, monkeypatch, mapped):
    """A page that is not there would be a SIGBUS in a map; it is an OSError that names the folder."""
    if not mapped:
        monkeypatch.setattr("kedge.offload.stores.file_ranges.can_map", lambda: False)
    extent = ranges.put(ramp(70_000))
    os.ftruncate(ranges.file.descriptor, 0)
    with pytest.raises(StoreError, match=r"70,000 bytes cannot be read back from"):
        ranges.read(extent)
    ranges.release(extent)

    assert ranges.used == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_keeps_what_it_shows_and_reads_no_more(ranges):
    """The child holds no descriptor, its maps are its own, and what it cannot have is an error, not other bytes."""
    data = ramp(200_000)
    extent = ranges.put(data)
    shown = ranges.read(extent) if can_map() else data
    going, said = os.pipe()
    written, told = os.pipe()
    child = os.fork()
    if not child:
        os.read(written, 1)  # the parent has put other bytes in the range
        verdict = [torch.equal(shown, data), ranges.file.descriptor == -1]
        try:
            ranges.read(extent)
        except StoreError as error:
            verdict.append("forked after it was saved" in str(error))
        ranges.release(extent)
        os.write(said, bytes(verdict))
        os._exit(0)
    os.pwrite(ranges.file.descriptor, bytes(extent.room), extent.start)
    os.write(told, b"!")
    assert os.read(going, 9) == b"\1\1\1"
    os.waitpid(child, 0)
    for end in (going, said, written, told):
        os.close(end)
    del shown
    ranges.release(extent)
