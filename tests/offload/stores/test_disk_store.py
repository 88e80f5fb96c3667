"""The disk store: bytes in, the same bytes out, in memory while there is room and past it when there is none."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch

from kedge.errors import StoreError
from kedge.files.pressure import Pressure
from kedge.offload.stores import disk
from kedge.offload.stores.disk import DiskStore
from kedge.offload.stores.mapped import LIBC
from kedge.offload.stores.memory_window import JobThread
from kedge.offload.stores.unnamed_file import UnnamedFile
from tests.marks import DEVICE, needs_device

pytestmark = pytest.mark.timing

MB = 1 << 20
WINDOWED = pytest.mark.skipif(not hasattr(LIBC, "sync_file_range"), reason="needs sync_file_range")


def piece(seed, nbytes=MB):
    """Return bytes that tell which piece they are."""
    return ((torch.arange(nbytes, dtype=torch.int32) * (seed + 1)) % 251).to(torch.uint8)


@pytest.fixture(params=[None, True, False], ids=["adaptive", "uncached", "cached"])
def store(request, tmp_path, monkeypatch):
    """A store of each kind, with a small window."""
    monkeypatch.setattr(disk, "WINDOW", 3 * MB)
    store = DiskStore(tmp_path, uncached=request.param)
    yield store
    store.close()


def test_bytes_come_back_in_any_order_and_again(store):
    """Read last first, first first, twice, or after a hint: always what was put."""
    pieces = [piece(seed, 200_000 + 4097 * seed) for seed in range(30)]
    slots = [store.put(data) for data in pieces]
    for order in (reversed(range(30)), range(30), random.Random(0).sample(range(30), 30)):
        for k in order:
            slots[(k * 7) % 30].prefetch()
            got = slots[k].get()
            assert got.dtype == torch.uint8
            assert torch.equal(got, pieces[k])
            assert slots[k].nbytes == pieces[k].numel()
    del got
    for slot in slots:
        slot.free()

    store._files.window.end()  # its threads hold a piece while they work on it
    assert store._files.used == 0


def test_a_tensor_may_be_changed_right_after_the_put(store):
    """The bytes of the time of the put are kept, also past the version counter, and also when they are written in the background."""
    slots = []
    data = torch.empty(MB, dtype=torch.uint8)
    for seed in range(20):
        data.data.fill_(seed)
        slots.append(store.put(data))
    data.zero_()

    assert [int(slot.get().unique()) for slot in slots] == list(range(20))
    for slot in slots:
        slot.free()


def test_what_a_backward_function_changes_is_its_own(store):
    """What is read can be changed in place, and the next read gives what was put."""
    slot = store.put(piece(3))
    slot.get().mul_(2)

    assert torch.equal(slot.get(), piece(3))
    slot.free()


def test_slots_outlive_the_store(store):
    """A graph that outlives the block can still be run backward."""
    slots = [store.put(piece(seed)) for seed in range(8)]
    store.close()
    store.close()

    assert all(torch.equal(slot.get(), piece(seed)) for seed, slot in enumerate(slots))
    with pytest.raises(StoreError, match="closed"):
        store.put(piece(1))
    for slot in slots:
        slot.free()


def test_all_threads_may_use_it(store):
    """Puts, reads, hints and frees of several threads do not disturb one another."""
    wrong = []

    def work(seed):
        for turn in range(12):
            data = torch.full((300_000,), seed * 16 + turn, dtype=torch.uint8)
            slots = [store.put(data) for _ in range(4)]
            slots[0].prefetch()
            wrong.extend(turn for slot in reversed(slots) if not torch.equal(slot.get(), data))
            for slot in slots:
                slot.free()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    store._files.window.end()  # its threads hold a piece while they work on it
    assert store._files.used == 0


def test_what_has_no_bytes_is_not_taken(store):
    """A tensor on the meta device has nothing to move; CPU and accelerators have."""
    assert not store.takes(torch.device("meta"))
    assert store.takes(torch.device("cpu"))
    assert store.takes(torch.device("cuda", 0))


@WINDOWED
def test_only_the_window_stays_in_memory(tmp_path, monkeypatch):
    """Uncached, all but the last bytes put are written out; the last are not, since they are read first."""
    monkeypatch.setattr(disk, "WINDOW", 3 * MB)
    store = DiskStore(tmp_path, uncached=True)
    slots = [store.put(piece(seed)) for seed in range(20)]
    store._files.window._writer.end()  # when it has done what it was asked

    assert [slot.piece.out for slot in slots] == [True] * 17 + [False] * 3
    assert store._files.window.out == 17 * MB
    for slot in slots:
        slot.free()
    store.close()


@WINDOWED
def test_what_is_freed_first_is_not_written(tmp_path, monkeypatch):
    """A slot that nobody needs any more takes none of the disk's time."""
    monkeypatch.setattr(disk, "WINDOW", 3 * MB)
    synced, gate = [], threading.Event()

    def sync(file, piece):
        synced.append(piece.number)
        gate.wait()

    monkeypatch.setattr(UnnamedFile, "sync", sync)
    store = DiskStore(tmp_path, uncached=True)
    slots = [
        store.put(piece(seed)) for seed in range(6)
    ]  # 3 to be written out, of which the first is being written
    for slot in slots:
        slot.free()
    gate.set()
    store._files.window._writer.end()

    assert len(synced) <= 1
    store.close()


@WINDOWED
def test_a_put_waits_for_a_disk_that_is_behind(tmp_path, monkeypatch):
    """No more than the window is on its way to the disk, however slow that is."""
    monkeypatch.setattr(disk, "WINDOW", 3 * MB)
    gate = threading.Event()
    most = []
    store = DiskStore(tmp_path, uncached=True)

    def sync(file, piece):
        gate.wait()
        most.append(store._files.window._leaving)

    monkeypatch.setattr(UnnamedFile, "sync", sync)
    slots = []

    def put_all():
        slots.extend(store.put(piece(seed)) for seed in range(30))

    thread = threading.Thread(target=put_all)
    thread.start()
    began = time.monotonic()
    while store._files.puts < 7 and time.monotonic() - began < 20:
        thread.join(0.05)
    thread.join(0.3)
    assert thread.is_alive()
    assert store._files.puts == 7  # three in the window, three on their way, and the one that waits
    gate.set()
    thread.join()

    assert max(most) <= 4 * MB
    for slot in slots:
        slot.free()
    store.close()


@WINDOWED
def test_the_ones_before_are_read_ahead(tmp_path, monkeypatch):
    """A backward pass asks in reverse order, so a read brings those put before it, within the window."""
    monkeypatch.setattr(disk, "WINDOW", 3 * MB)
    asked = []
    monkeypatch.setattr(
        UnnamedFile, "advise", lambda file, piece, advice: asked.append((piece.number, advice))
    )
    store = DiskStore(tmp_path, uncached=True)
    slots = [store.put(piece(seed)) for seed in range(20)]
    store._files.window._writer.end()
    asked.clear()
    slots[9].get()
    store._files.window._reader.end()
    ahead = [number for number, advice in asked if advice == os.POSIX_FADV_WILLNEED]
    assert ahead == [9, 8, 7]  # numbers begin at 1

    slots[8].get()
    slots[1].prefetch()
    store._files.window._reader.end()
    ahead = [number for number, advice in asked if advice == os.POSIX_FADV_WILLNEED]
    assert ahead == [9, 8, 7, 6]
    for slot in slots:
        slot.free()
    store.close()


def test_memory_pressure_switches_to_the_window(tmp_path, monkeypatch):
    """Asked at every few bytes put, and believed either way."""
    monkeypatch.setattr(disk, "WINDOW", 3 * MB)
    monkeypatch.setattr(disk, "_CHECK_EVERY", 4 * MB)
    tight = iter([False, True, False])
    monkeypatch.setattr(Pressure, "tight", lambda self, held: next(tight))
    store = DiskStore(tmp_path)
    states = []
    slots = []
    for seed in range(12):
        slots.append(store.put(piece(seed)))
        states.append(store._files._tight)

    assert states == [False] * 7 + [True] * 4 + [False]
    for slot in slots:
        slot.free()
    store.close()


def write(folder, **files):
    """Write files of the system; two underscores stand for a dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_limits_of_control_groups_count(tmp_path):
    """Version 2: the room is what the limit leaves when the program has its own; an outer group counts as well."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    write(proc, meminfo="MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    write(proc / "self", cgroup="0::/outer/inner\n")
    write(
        groups / "outer",
        memory__max="3000000",
        memory__current="2500000",
        memory__stat="anon 1\nfile 1500000\nshmem 100000\n",
    )
    write(
        groups / "outer/inner",
        memory__max="max",
        memory__current="2000000",
        memory__stat="file 0\nshmem 0\n",
    )
    pressure = Pressure(proc, groups)

    assert pressure.room() == 3000000 - 2500000 + 1500000 - 100000
    assert not pressure.tight(950000)
    assert pressure.tight(950001)


def test_the_first_version_of_control_groups_counts(tmp_path):
    """Version 1 has other names; a path that the container does not see means the group at the mount."""
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    write(proc, meminfo="MemAvailable: 8000 kB\n")
    write(proc / "self", cgroup="5:cpu,cpuacct:/x\n4:memory:/host/only\n0::/\n")
    write(
        groups / "memory",
        memory__limit_in_bytes="1000000",
        memory__usage_in_bytes="900000",
        memory__stat="total_cache 200000\ntotal_shmem 50000\n",
    )

    assert Pressure(proc, groups).room() == 250000


def test_tasks_that_wait_for_memory_are_pressure(tmp_path):
    """The kernel's own measure of waiting counts, whatever the limits say."""
    proc = tmp_path / "proc"
    write(proc, meminfo="MemAvailable: 8000000 kB\n")
    write(
        proc / "pressure",
        memory="some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=0.00 total=0\n",
    )
    pressure = Pressure(proc, tmp_path / "none")
    assert not pressure.tight(1)

    write(
        proc / "pressure",
        memory="some avg10=37.50 avg60=0.00 avg300=0.00 total=9\nfull avg10=0.00 total=0\n",
    )
    assert pressure.tight(1)


def test_a_system_that_says_nothing_has_no_pressure(tmp_path):
    """Where there is no /proc there is no way to know, and the usual way is taken."""
    pressure = Pressure(tmp_path / "none", tmp_path / "none")

    assert pressure.room() is None
    assert not pressure.tight(1 << 50)


def test_a_worker_starts_late_and_can_be_used_again():
    """No thread is there before the first job; after its end another job starts it anew."""
    worker, done = JobThread("kedge-test"), []
    before = threading.active_count()
    worker.end()
    for turn in range(2):
        worker.do(lambda turn=turn: done.append(turn))
        assert threading.active_count() <= before + 1
        worker.end()

    assert done == [0, 1]
    assert threading.active_count() == before


@needs_device
def test_bytes_of_an_accelerator_come_back_there(tmp_path):
    """What came from a device returns to it."""
    store = DiskStore(tmp_path)
    data = piece(5).to(DEVICE)
    slot = store.put(data)

    assert slot.get().device == data.device
    assert torch.equal(slot.get(), data)
    slot.free()
    store.close()
