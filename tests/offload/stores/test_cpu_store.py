"""The store of host memory on a device that is made up: streams are queues of operations that run in any allowed order."""

import ctypes
import gc
import random
import threading
import weakref

import numpy as np
import pytest
import torch

from kedge.errors import NothingGained, NotPinned
from kedge.files.pressure import Pressure
from kedge.offload.stores.cpu import CopyWindow, CpuStore, ReadOrder
from kedge.offload.stores.pinned import BusyRanges, PinnedRanges

GPU = torch.device("cpu")  # what stands for a device: its "memory" is one large array
KB = 1 << 10


class Stream:
    """A queue of operations."""

    def __init__(self, name):
        self.name, self.queue = name, []

    def __repr__(self):
        return self.name


class Event:
    """Reached, or not yet."""

    def __init__(self):
        self.reached = False


class Queues:
    """Streams, and the order in which they run, which a seed decides.

    Attributes:
        now: The stream that the program computes on.
    """

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.compute, self.other = Stream("compute"), Stream("other")
        self.side = {"out": Stream("out"), "in": Stream("in")}
        self.all = [self.compute, self.other, *self.side.values()]
        self.now = self.compute

    def step(self):
        """Run one operation of some stream that may run one; tell whether there was one."""
        ready = [
            s for s in self.all if s.queue and (s.queue[0][0] != "wait" or s.queue[0][1].reached)
        ]
        if not ready:
            return False
        kind, what = self.random.choice(ready).queue.pop(0)
        if kind == "run":
            what()
        elif kind == "event":
            what.reached = True
        return True

    def run(self, steps):
        """Run a few operations."""
        for _ in range(steps):
            self.step()

    def drain(self):
        """Run everything."""
        while self.step():
            pass
        assert not any(s.queue for s in self.all)

    def fill(self, tensor, value):
        """Queue an operation that writes on the compute stream."""
        address, nbytes = tensor.data_ptr(), tensor.numel()
        self.now.queue.append(("run", lambda: ctypes.memset(address, value, nbytes)))

    def expect(self, tensor, value, wrong):
        """Queue an operation that reads on the compute stream."""
        address, nbytes = tensor.data_ptr(), tensor.numel()

        def look():
            if ctypes.string_at(address, nbytes) != bytes([value]) * nbytes:
                wrong.append(value)

        self.now.queue.append(("run", look))


class FakeDevice(Queues):
    """A device that runs what its streams hold in an order that a seed decides, and as late as it may.

    Memory that is freed is handed out again at once to who allocates on the same stream, as
    PyTorch's allocator does.

    Args:
        seed: Decides the order.
        careless: Which wait is forgotten, to see that it is missed: "out", "in", "room", "compute",
            "busy".
    """

    def __init__(self, seed=0, careless=None, size=1 << 20):
        super().__init__(seed)
        self.careless = careless
        self.memory = np.zeros(size, dtype=np.uint8)
        self.top = 0
        self.free = {}
        self.pinned, self.unpinned, self.lent = {}, [], []
        self.waits = 0

    def gains(self, device):
        return None

    def capturing(self):
        return False

    def current(self, device):
        return self.now

    def own(self, device, way):
        return self.side[way]

    def mark(self, stream):
        event = Event()
        event.stream = stream
        stream.queue.append(("event", event))
        return event

    def after(self, stream, event):
        forgotten = {
            "out": stream is self.side["out"] and event.stream in (self.compute, self.other),
            "in": stream is self.side["in"] and event.stream is self.side["out"],
            "room": stream is self.side["in"] and event.stream in (self.compute, self.other),
            "compute": stream in (self.compute, self.other),
            "busy": stream is self.side["out"] and event.stream is self.side["in"],
        }
        if self.careless is None or not forgotten[self.careless]:
            stream.queue.append(("wait", event))

    def reached(self, event):
        return event.reached

    def wait(self, event):
        self.waits += 1
        while not event.reached:
            assert self.step(), "waits for ever"

    def room(self, nbytes, device):
        pool = self.free.setdefault((self.now, nbytes), [])
        if pool:
            start = pool.pop(self.random.randrange(len(pool)))
        else:
            start, self.top = self.top, self.top + nbytes
        assert self.top <= len(self.memory), "the device is full"
        tensor = torch.from_numpy(self.memory[start : start + nbytes])
        weakref.finalize(tensor, pool.append, start).atexit = False
        return tensor

    def copy(self, target, source, stream):
        to, start, nbytes = target.data_ptr(), source.data_ptr(), source.numel()
        assert target.numel() == nbytes
        stream.queue.append(("run", lambda: ctypes.memmove(to, start, nbytes)))

    def lend(self, tensor, stream):
        self.lent.append((tensor, stream))  # for good: as long as the test runs
        return True

    def locked(self, nbytes):
        return None

    def pin(self, address, nbytes):
        self.pinned[address] = nbytes

    def unpin(self, address):
        del self.pinned[address]
        self.unpinned.append(address)


def made(device, value, nbytes=KB):
    """Allocate on the device and fill: as a module does with its output."""
    tensor = device.room(nbytes, GPU)
    device.fill(tensor, value)
    return tensor


def train(device, seed, *, window=3 * KB, steps=3):
    """Run steps of a made-up program; returns the values that came back wrong."""
    random_ = random.Random(seed)
    store = CpuStore(device=device, most=1 << 28, window=window)
    wrong = []
    for _ in range(steps):
        slots = []
        for _ in range(random_.randrange(3, 9)):
            value, nbytes = random_.randrange(1, 256), random_.choice([KB, 2 * KB])
            tensor = made(device, value, nbytes)
            slots.append((store.put(tensor), value))
            del tensor
            made(device, 0, nbytes)  # what is computed next, perhaps in the same memory
            device.run(random_.randrange(4))
        order = (
            list(reversed(slots)) if random_.random() < 0.7 else random_.sample(slots, len(slots))
        )
        for slot, value in order:
            if random_.random() < 0.1:
                slot.prefetch()
            if random_.random() < 0.1:
                slot.free()  # an abandoned graph
                continue
            for _ in range(random_.choice([1, 1, 1, 2])):
                if random_.random() < 0.1:
                    device.now = device.other if device.now is device.compute else device.compute
                back = store.fetch(slot) if random_.random() < 0.5 else slot.get()
                device.expect(back, value, wrong)
                device.fill(back, random_.randrange(256))  # it is the caller's own
                del back
                made(device, 0)
            slot.free()
            device.run(random_.randrange(6))
    store.close()
    device.drain()
    assert not device.pinned
    return wrong


@pytest.mark.parametrize("window", [KB, 4 * KB, 1 << 20])
def test_every_byte_comes_back_in_any_order_that_the_streams_allow(window):
    """Whatever order the device chooses within its waits, each get gives what was put, and all memory is given back."""
    for seed in range(120):
        assert train(FakeDevice(seed), seed, window=window) == []


@pytest.mark.parametrize("careless", ["out", "in", "room", "compute", "busy"])
def test_each_wait_is_needed(careless):
    """With any one of the waits left out, some order of the streams gives wrong bytes: the test above can fail."""
    assert any(train(FakeDevice(seed, careless), seed) for seed in range(300))


def test_the_source_is_held_until_its_copy_is_done():
    """What is copied out is not freed before the copy, and no longer than until the store looks again."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28)
    source = made(device, 1)
    alive = weakref.ref(source)
    slot = store.put(source)
    del source
    other = store.put(made(device, 2))

    assert alive() is not None
    device.drain()
    other.get()
    assert alive() is None
    slot.free()
    other.free()
    store.close()


def test_no_more_than_the_window_is_held_for_copies():
    """A program that runs ahead of its copies waits for the oldest, and for no more than that."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28, window=3 * KB)
    held = [
        weakref.ref(source) for source in (made(device, i) for i in range(3)) if store.put(source)
    ]
    assert device.waits == 0
    assert all(ref() is not None for ref in held)
    store.put(made(device, 9))

    assert device.waits == 1
    assert [ref() is not None for ref in held] == [False, True, True]


def test_the_window_is_a_share_of_a_step():
    """Of what the step before has put, or of what this one has put so far; a quarter, within limits of its own."""
    window = CopyWindow(1 << 30, fixed=False)
    assert window.nbytes == 16 << 20
    window.put(160 << 20)
    assert window.nbytes == 40 << 20
    window.step_ended()
    window.put(80 << 20)
    assert window.nbytes == 40 << 20
    window.put(8 << 30)
    assert window.nbytes == 1 << 30
    assert CopyWindow(3, fixed=True).nbytes == 3
    assert CpuStore(device=FakeDevice(), most=1 << 28).window == 512 << 20


def test_what_has_not_left_is_copied_on_the_device():
    """The tail of a forward that backward asks for at once does not come back over the link."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28)
    wrong = []
    slot = store.put(made(device, 7))
    device.expect(slot.get(), 7, wrong)
    assert not device.side["in"].queue
    device.drain()

    assert wrong == []


def test_what_was_passed_over_is_read_ahead_when_it_has_left():
    """A slot still on its way out when others were read ahead comes back before it is asked for, and only once."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28, window=16 * KB)
    wrong = []
    slots = [store.put(made(device, value)) for value in range(1, 7)]
    for value in (6, 5):
        device.expect(slots[value - 1].get(), value, wrong)
    assert [slot.source is None for slot in slots] == [False] * 6

    device.drain()
    device.expect(slots[3].get(), 4, wrong)
    assert [slot.loaded is not None for slot in slots] == [True, True, True, False, False, False]
    copies = len(device.side["in"].queue)
    device.expect(slots[2].get(), 3, wrong)
    assert len(device.side["in"].queue) == copies
    device.drain()
    assert wrong == []


def test_what_was_given_out_can_be_changed():
    """Each time the bytes are of their own, whether they come from the source, over the link, or were on their way."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28)
    slot = store.put(made(device, 7))
    for prepare in (lambda: None, device.drain, lambda: store.prefetch(slot)):
        prepare()
        given = slot.get()
        device.drain()
        assert given.tolist() == [7] * KB
        given.zero_()
        again = slot.get()
        device.drain()
        assert again.tolist() == [7] * KB


def test_a_source_that_changes_while_it_is_copied_is_an_error():
    """Bytes that nobody can know are never given: the error is the one of autograd, and says what to do."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28)
    source = made(device, 7)
    early, late = store.put(source), store.put(source)
    device.drain()
    store.put(made(device, 0))  # sees that both copies are done
    source.add_(1)
    back = early.get(), late.get()
    device.drain()
    assert [b.tolist() for b in back] == [[7] * KB] * 2
    torn = store.put(source)
    source.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation.*1,024 bytes"):
        torn.get()
    device.drain()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torn.get()


def test_the_order_of_the_step_before_is_read_ahead():
    """In the first step what was put before is read ahead; from then on what followed in the step before."""
    order = ReadOrder()
    assert list(order.after(3)) == [2, 1, 0]
    for number in (3, 1, 2, 0):
        order.asked(number)
    assert list(order.after(3)) == [2, 1, 0]
    order.ended()

    assert list(order.after(3)) == [1, 2, 0]
    assert list(order.after(7)) == [6, 5, 4, 3, 1, 2, 0]


def test_an_order_that_goes_in_circles_ends():
    """Slots that are asked for twice in a step do not keep the look ahead going for ever."""
    order = ReadOrder()
    for number in (2, 1, 2, 1, 0):
        order.asked(number)
    order.ended()

    assert list(order.after(2)) == [1, 0]


def test_what_comes_next_is_on_its_way():
    """A get brings back what is expected after it, up to the window, and each of them once."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28, window=2 * KB)
    slots = [store.put(made(device, i)) for i in range(6)]
    device.drain()
    slots[5].get()
    assert [slot.loaded is not None for slot in slots] == [False, False, False, True, True, False]
    slots[4].get()

    assert [slot.loaded is not None for slot in slots] == [False, False, True, True, False, False]


def test_a_target_asked_for_on_another_stream_is_lent_to_it():
    """Memory read ahead on one stream and used on another is kept until that one is through, and only then."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28)
    slots = [store.put(made(device, i)) for i in range(3)]
    device.drain()
    slots[2].get()
    assert device.lent == []
    device.now = device.other
    slots[1].get()

    assert [stream for _, stream in device.lent] == [device.other]


def test_a_device_that_lends_no_memory_reads_again():
    """What was read ahead on one stream is read once more on the other, and the first copy is kept until it is done."""
    device, wrong = FakeDevice(), []
    device.lend = lambda tensor, stream: False
    store = CpuStore(device=device, most=1 << 28)
    slots = [store.put(made(device, i)) for i in range(3)]
    device.drain()
    slots[2].get()
    ahead = slots[1].loaded
    device.now = device.other
    found = slots[1].get()
    assert ahead is not None
    assert found is not ahead.target
    device.expect(found, 1, wrong)
    device.drain()
    for slot in slots:
        slot.free()
    store.close()
    assert wrong == []


def test_a_device_without_room_ends_the_reading_ahead_and_not_the_program():
    """Running out of memory for what is not needed yet is no error; for what is needed it is the program's own."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 28)
    slots = [store.put(made(device, i)) for i in range(3)]
    device.drain()
    room, asked = device.room, []

    def full(nbytes, where):
        asked.append(nbytes)
        if len(asked) > 1:
            raise torch.OutOfMemoryError("the device is full")
        return room(nbytes, where)

    device.room = full
    slots[2].get()
    assert slots[1].loaded is None
    with pytest.raises(torch.OutOfMemoryError):
        slots[1].get()
    device.room = room
    slots[1].get()
    assert slots[0].loaded is None


def test_steps_of_equal_sizes_take_no_more_memory():
    """The host's memory grows in the first step alone; its size is that of what was put, not a power of two above it."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 30)
    taken = []
    for _ in range(4):
        slots = [store.put(made(device, i, KB)) for i in range(20)]
        device.drain()
        for slot in reversed(slots):
            slot.get()
            slot.free()
        taken.append(store.pinned)
    assert set(taken) == {64 << 20}
    device.drain()
    store.close()
    assert store.pinned == 0


def test_memory_is_of_the_size_that_was_asked_for():
    """Ranges lie side by side, rounded to 512 bytes, and joined when they are given back."""
    memory = PinnedRanges(FakeDevice(), pin=True, most=1 << 30)
    ranges = [memory.take(n) for n in (1, 512, 513, 100_000)]
    assert memory.used == 512 + 512 + 1024 + 100_352
    assert [r.start for r in ranges] == [0, 512, 1024, 2048]
    assert [r.host.numel() for r in ranges] == [1, 512, 513, 100_000]
    for r in ranges:
        memory.release(r, None)
    assert memory.used == 0
    assert memory.take(memory.size).start == 0


def test_a_range_is_taken_with_the_events_of_all_that_lay_there():
    """Of ranges taken and taken back at random, each byte's last event is given once, when that byte is taken."""
    rng = random.Random(3)
    busy = BusyRanges()
    last = {}  # of each byte, as long as it is free
    for event in range(400):
        start = rng.randrange(60)
        end = start + rng.randrange(1, 12)
        due = {last.pop(byte) for byte in range(start, end) if byte in last}
        assert set(busy.take(start, end)) == due
        busy.add(start, end, event)
        last.update(dict.fromkeys(range(start, end), event))
        assert set(busy.events()) == set(last.values())


def test_memory_grows_by_what_is_needed_up_to_the_limit():
    """Beyond the limit there is an OSError, which leaves the tensor where it is; nothing is taken for it."""
    memory = PinnedRanges(FakeDevice(), pin=True, most=100 << 20)
    memory.take(60 << 20)
    memory.take(30 << 20)
    assert memory.size == 94 << 20
    with pytest.raises(OSError, match="limit"):
        memory.take(20 << 20)
    assert memory.size == 94 << 20


@pytest.mark.parametrize(("room", "fits"), [(9 * KB, False), (11 * KB, True), (None, True)])
def test_without_a_limit_four_fifths_of_the_free_memory_are_taken(room, fits, monkeypatch):
    """Where the system does not tell how much is free, there is no limit."""
    monkeypatch.setattr(Pressure, "room", lambda self: room)
    device = FakeDevice()
    store = CpuStore(device=device)
    if fits:
        store.put(made(device, 5, 8 * KB))
    else:
        with pytest.raises(OSError, match="limit is 7,372"):
            store.put(made(device, 5, 8 * KB))
    device.drain()
    store.close()


def test_pages_are_locked_once_and_let_go():
    """Each block is pinned when it is taken and unpinned when the store is closed and the last slot is gone."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 30)
    slot = store.put(made(device, 5))
    assert list(device.pinned.values()) == [64 << 20]
    store.close()
    store.close()
    assert device.pinned
    device.drain()
    wrong = []
    device.expect(slot.get(), 5, wrong)
    device.drain()
    slot.free()

    assert wrong == []
    assert not device.pinned
    assert len(device.unpinned) == 1


def test_memory_that_is_not_to_be_pinned_is_not():
    """With `pin=False` no page is locked."""
    device = FakeDevice()
    store = CpuStore(device=device, pin=False, most=1 << 30)
    store.put(made(device, 5)).free()
    store.close()

    assert device.pinned == {}
    assert device.unpinned == []


def test_pages_that_cannot_be_locked_are_used_all_the_same():
    """A system that locks no pages is a warning, and the bytes come back."""
    device = FakeDevice()
    device.pin = lambda address, nbytes: "operation not supported"
    store = CpuStore(device=device, most=1 << 30)
    with pytest.warns(NotPinned, match=r"67,108,864 bytes .* \(operation not supported\)"):
        slot = store.put(made(device, 5))
    device.drain()
    wrong = []
    device.expect(slot.get(), 5, wrong)
    device.drain()
    slot.free()
    store.close()

    assert wrong == []
    assert device.unpinned == []


def test_freeing_is_safe_in_the_middle_of_a_put():
    """A slot that is freed while the store is at work, as the garbage collector may, waits for its turn."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 30)
    first = store.put(made(device, 1))
    take = store._memory.take
    store._memory.take = lambda nbytes: (first.free(), take(nbytes))[1]
    second = store.put(made(device, 2))
    store._memory.take = take
    assert store._memory.used == 2 * KB
    device.drain()
    third = store.put(made(device, 3))

    assert store._memory.used == 2 * KB
    for slot in (second, third):
        slot.free()
    store.close()


def test_what_is_freed_is_given_back_at_once():
    """An abandoned graph's memory is free without another put or get, on the host and on the device."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 30)
    source = made(device, 1)
    alive = weakref.ref(source)
    slot = store.put(source)
    del source
    device.drain()
    slot.free()

    assert alive() is None
    assert store._memory.used == 0


def test_a_child_process_leaves_the_device_alone():
    """A copy of a slot that dies in a forked process asks the device for nothing."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 30)
    slot = store.put(made(device, 1))
    store._process = -1  # as if this were another process
    device.reached = None
    slot.free()

    assert store._memory.used == KB


def test_no_event_is_asked_while_a_graph_is_captured():
    """Asking an event would end the capture; what is freed meanwhile is given back later."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 30)
    slot = store.put(made(device, 1))
    device.drain()
    device.capturing, reached, device.reached = (lambda: True), device.reached, None
    slot.free()
    assert store._memory.used == KB
    device.capturing, device.reached = (lambda: False), reached
    store.close()

    assert store.pinned == 0


def test_threads_share_a_store():
    """Puts, gets and frees of several threads keep the account right."""
    device = FakeDevice(size=1 << 24)
    device.step = lambda: False
    run = threading.Lock()
    store = CpuStore(device=device, most=1 << 30)
    failed = []

    def work(value):
        try:
            for _ in range(50):
                with run:
                    source = made(device, value)
                store.put(source).free()
        except Exception as error:  # noqa: BLE001 - shown below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del device.step
    device.drain()
    store.close()

    assert failed == []
    assert store._alive == {}
    assert store.pinned == 0


def test_nothing_is_put_into_a_closed_store_nor_into_a_graph():
    """A closed store, and a CUDA graph that is being captured, are an OSError: the tensor is kept."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 30)
    device.capturing = lambda: True
    with pytest.raises(OSError, match="graph is being captured"):
        store.put(made(device, 1))
    device.capturing = lambda: False
    store.close()
    with pytest.raises(OSError, match="closed"):
        store.put(made(device, 1))


def test_tensors_of_the_cpu_are_kept_and_it_is_said_once():
    """There is nowhere to move them; the message says what does move them."""
    store = CpuStore()
    with pytest.warns(NothingGained, match="in CPU memory already.*kedge.Disk") as said:
        assert not store.takes(torch.device("cpu"))
    assert not store.takes(torch.device("cpu"))
    assert len(said) == 1


def test_devices_without_streams_are_kept_and_it_is_said():
    """Without a stream beside the computation, a copy would stop the program."""
    with pytest.warns(NothingGained, match="not on 'meta'"):
        assert not CpuStore().takes(torch.device("meta"))


def test_a_store_is_gone_with_its_last_reference():
    """Nothing global holds a store, its memory or its slots."""
    device = FakeDevice()
    store = CpuStore(device=device, most=1 << 30)
    slot = store.put(made(device, 1))
    device.drain()
    slot.free()
    store.close()
    gone = weakref.ref(store), weakref.ref(store._memory)
    del store, slot
    gc.collect()

    assert [ref() for ref in gone] == [None, None]
