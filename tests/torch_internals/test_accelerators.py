"""Devices by what PyTorch calls the accelerator: without one, with one that lacks things, and with a real one."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch

from kedge.torch_internals import accelerators
from tests.marks import DEVICE, needs_device


class Module:
    """A module of PyTorch for a kind of device that is not there, with two devices and their generators."""

    def __init__(self, *, begun=True, forked=False):
        self.states = [torch.tensor([index, 0]) for index in range(2)]
        self.asked = []
        self.is_initialized = lambda: begun
        self._is_in_bad_fork = lambda: forked

    def device_count(self):
        self.asked.append("device_count")
        return len(self.states)

    def get_device_name(self):
        self.asked.append("get_device_name")
        return "Made Up 3000"

    def get_rng_state(self, index):
        self.asked.append("get_rng_state")
        return self.states[index].clone()

    def set_rng_state(self, state, index):
        self.states[index] = state


@pytest.fixture
def machine(monkeypatch):
    """Return a function that installs an accelerator with a given module."""

    def put(module, kind="xpu"):
        monkeypatch.setattr(
            torch.accelerator,
            "current_accelerator",
            lambda check_available=False: torch.device(kind),
        )
        monkeypatch.setattr(torch, "get_device_module", lambda device: module)
        monkeypatch.setattr(accelerators, "_known", {})
        monkeypatch.setattr(accelerators, "_in_use", {})
        return module

    return put


def test_the_name_of_the_device_in_use(machine):
    """The kind, and the name that its module gives."""
    machine(Module())
    assert accelerators.name() == "xpu (Made Up 3000)"


@pytest.mark.parametrize("untouched", [{"begun": False}, {"forked": True}])
def test_asking_begins_nothing(machine, untouched):
    """A device that was not used, or may not be used in a forked child, is not asked anything."""
    module = machine(Module(**untouched))

    assert accelerators.in_use() is None
    assert accelerators.name() == "cpu"
    assert [*accelerators.generator_states()] == ["cpu"]
    assert not accelerators.is_capturing()
    assert module.asked == []


def test_a_module_without_a_word_on_its_beginning_is_used_where_it_is_available(machine):
    """MPS has no beginning; it has one device, and its name is not known."""
    assert machine(SimpleNamespace(is_available=lambda: True), "mps")
    assert accelerators.name() == "mps"
    assert [*accelerators.generator_states()] == ["cpu"]
    machine(SimpleNamespace(is_available=lambda: False), "mps")
    assert accelerators.name() == "cpu"


def test_random_numbers_of_every_device_are_the_same_after_a_block(machine):
    """Those of the CPU, and of both devices, also if the block fails."""
    module, before = machine(Module()), torch.get_rng_state()

    def draw():
        with accelerators.same_random_numbers():
            torch.rand(3)
            for state in module.states:
                state.add_(5)
            assert [*map(int, module.states[1])] == [6, 5]
            raise KeyError

    with pytest.raises(KeyError):
        draw()
    assert torch.equal(torch.get_rng_state(), before)
    assert [state.tolist() for state in module.states] == [[0, 0], [1, 0]]
    assert [*accelerators.generator_states()] == ["cpu", "xpu:0", "xpu:1"]


def test_while_a_graph_is_captured_a_device_is_not_asked_for_its_random_numbers(machine):
    """Reading them would end the capture."""
    module = machine(Module())
    module.is_current_stream_capturing = lambda: True
    assert accelerators.is_capturing()
    assert [*accelerators.generator_states()] == ["cpu"]


def test_what_a_device_lacks_is_tried_once(machine):
    """A refusal of PyTorch's is an answer for all devices of the kind."""
    machine(Module())
    tried = []

    def attempt(device):
        tried.append(device)
        raise NotImplementedError("Backend doesn't support this.")

    assert [accelerators.can(attempt, torch.device("xpu", index)) for index in (0, 1)] == [
        False,
        False,
    ]
    assert tried == [torch.device("xpu", 0)]
    assert not accelerators.can(attempt, torch.device("cpu"))


def test_a_device_that_fails_is_not_one_that_lacks_something(machine):
    """An error of the device's own ends what was tried, and is no answer for later."""
    machine(Module())

    def attempt(device):
        raise torch.AcceleratorError("out of order")

    for _ in range(2):
        with pytest.raises(torch.AcceleratorError):
            accelerators.can(attempt, torch.device("xpu"))


def test_while_a_graph_is_captured_nothing_is_tried(machine):
    """It would become part of the graph; afterwards it is tried as ever."""
    module, tried = machine(Module()), []
    module.is_current_stream_capturing = lambda: True
    attempt = lambda device: not tried.append(device)
    assert not accelerators.can(attempt, torch.device("xpu"))
    assert tried == []
    module.is_current_stream_capturing = lambda: False
    assert accelerators.can(attempt, torch.device("xpu"))


def test_where_no_more_memory_can_be_locked_copies_are_waited_for(machine, monkeypatch):
    """It is no error of the program's: there is just none."""
    machine(Module())
    monkeypatch.setattr(accelerators, "can", lambda attempt, device: True)

    def full(*shape, **options):
        raise RuntimeError("no locked memory is left")

    monkeypatch.setattr(torch, "empty", full)
    assert accelerators.pinned((3,), torch.float32) is None


def test_what_has_no_doubles_is_computed_with_on_the_host(machine, monkeypatch):
    """MPS answers with a TypeError; a tensor of the CPU stays itself."""
    machine(Module())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *args, **kwargs: zeros(None))
    there = SimpleNamespace(device=torch.device("xpu"), cpu=lambda: "the copy")
    assert accelerators.with_doubles(there) == "the copy"
    assert accelerators.with_doubles(here := torch.ones(2)) is here


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_the_host_has_neither_streams_nor_a_clock(kind):
    """Nothing is queued, so nothing is waited for and nothing timed."""
    device = torch.device(kind)
    assert not accelerators.has_streams(device)
    assert not accelerators.has_clock(device)
    assert accelerators.timed_mark(device) is None
    assert not accelerators.shares_memory(device)
    accelerators.synchronize(device)


def test_a_device_with_events_but_one_queue_is_not_timed(machine, monkeypatch):
    """MPS: to record an event ends a batch of kernels, and to ask for the time between two waits for the device."""
    machine(Module(), "mps")
    used = []
    event = SimpleNamespace(
        record=used.append, query=lambda: True, synchronize=lambda: None, elapsed_time=lambda _: 1.0
    )
    monkeypatch.setattr(torch, "Stream", lambda device: "the only one")
    monkeypatch.setattr(torch, "Event", lambda device, enable_timing=False: event)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device=None: "the only one")
    device = torch.device("mps")
    assert not accelerators.has_streams(device)
    assert accelerators.timed_mark(device) is None
    assert not accelerators.has_clock(device)
    assert used == []


def test_a_tensor_of_the_host_is_its_own_copy():
    """Nothing is copied, and nothing arrives."""
    x = torch.ones(3)
    host, arrived = accelerators.to_host(x)
    assert host is x
    assert arrived is None


def test_autocast_is_recognised_by_kind_of_device():
    """Only the kinds for which it is on, with their dtypes."""
    assert accelerators.autocast() == {}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert accelerators.autocast() == {"cpu": torch.bfloat16}


@needs_device
def test_memory_that_pytorch_reserves_is_free():
    """Memory that PyTorch holds and nobody uses is free to the program."""
    device = torch.zeros(1, device=DEVICE).device
    before = accelerators.free_memory(device)
    held = torch.zeros(1 << 20, device=device)
    during = accelerators.free_memory(device)
    del held
    if before is not None:
        assert during <= before - (4 << 20)
        assert accelerators.free_memory(device) >= before


@needs_device
def test_a_copy_to_the_host_arrives_beside_the_computation():
    """It has the values from when it was asked for, though the memory is used again."""
    work = torch.randn(2048, 2048, device=DEVICE)
    for _ in range(20):
        work = work @ work / work.norm()
    whole = torch.arange(1000, device=DEVICE, dtype=torch.float32)
    host, arrived = accelerators.to_host(whole)
    del whole
    torch.zeros(1000, device=DEVICE)  # wants the memory that was just freed
    if arrived is not None:
        assert host.is_pinned()
        arrived.synchronize()
    assert torch.equal(host, torch.arange(1000, dtype=torch.float32))


@needs_device
def test_a_stream_is_in_force_in_a_block_alone():
    """Also in a block inside of it; the device and the stream are those from before afterwards."""
    device = torch.zeros(1, device=DEVICE).device
    if not accelerators.has_streams(device):
        pytest.skip(f"{device} has no streams")
    before, (one, other) = (
        accelerators.current_stream(device),
        (torch.Stream(device), torch.Stream(device)),
    )
    with accelerators.on(one):
        with accelerators.on(other), accelerators.on(one):
            assert accelerators.current_stream(device) == one
        assert accelerators.current_stream(device) == one
    assert accelerators.current_stream(device) == before


@needs_device
def test_a_device_tells_the_time_between_two_events():
    """A device with a clock gives seconds; without one, None."""
    device = torch.zeros(1, device=DEVICE).device
    first = accelerators.timed_mark(device)
    x = torch.randn(1024, 1024, device=device)
    x @ x
    last = accelerators.timed_mark(device)
    if first is None or last is None:
        pytest.skip(f"{device} has no events with times")
    last.synchronize()
    spent = accelerators.seconds(first, last)
    assert accelerators.has_clock(device) == (spent is not None)
    assert spent is None or spent > 0


@needs_device
def test_random_numbers_of_a_device_come_again():
    """What was drawn in a block is drawn again after it."""
    torch.manual_seed(random.randrange(1 << 30))
    torch.rand(1, device=DEVICE)
    with accelerators.same_random_numbers():
        drawn = torch.rand(5, device=DEVICE)
    assert torch.equal(torch.rand(5, device=DEVICE), drawn)
