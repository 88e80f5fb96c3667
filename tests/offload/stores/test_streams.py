"""Where moving bytes to the host's memory frees any: what is asked of a device, told by one that is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kedge.errors import NothingGained
from kedge.offload.stores.cpu import CpuStore
from kedge.offload.stores.pinned import PinnedRanges
from kedge.offload.stores.streams import CopyDevice
from kedge.torch_internals import accelerators, cuda

GPU = torch.device("xpu", 0)


@pytest.fixture
def gpu(monkeypatch):
    """The properties of a device with streams, which can be changed until they are asked for."""
    properties, asked = SimpleNamespace(is_integrated=0), []
    module = SimpleNamespace(
        get_device_properties=lambda device: (asked.append(device), properties)[1]
    )
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    monkeypatch.setattr(accelerators, "has_streams", lambda device: device == GPU)
    yield properties
    assert set(asked) <= {GPU}


def test_pytorch_tells_which_memory_is_unified():
    """The property by which unified memory is known has this name, in a build without CUDA too."""
    assert (
        "is_integrated: _int" in (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    )


def test_memory_of_its_own_is_freed(gpu):
    """A card with memory of its own gains, and the store takes its tensors."""
    assert CopyDevice().gains(GPU) is None
    store = CpuStore()
    assert store.takes(GPU)
    store.close()


def test_unified_memory_frees_nothing(gpu):
    """A device that computes in the CPU's memory gains nothing: the store takes no tensor of it, and says why, once."""
    gpu.is_integrated = 1
    store = CpuStore()
    with pytest.warns(NothingGained, match="xpu:0 has no memory of its own") as said:
        assert [store.takes(GPU) for _ in range(3)] == [False] * 3

    assert len(said) == 1
    store.close()


def test_a_device_that_tells_nothing_of_its_memory_has_its_own(gpu):
    """Properties are asked for where there are some."""
    del gpu.is_integrated
    assert CopyDevice().gains(GPU) is None


def test_other_devices_are_not_asked(gpu):
    """CPU tensors are there already, and without streams no copy runs beside the computation."""
    assert "in CPU memory already" in CopyDevice().gains(torch.device("cpu"))
    assert "not on 'meta'" in CopyDevice().gains(torch.device("meta"))


def test_memory_that_pytorch_has_locked_is_not_locked_again(monkeypatch):
    """Where pages cannot be locked in place, the store's blocks are memory of PyTorch's, and nothing is registered."""
    asked = []
    monkeypatch.setattr(
        accelerators,
        "pinned",
        lambda shape, dtype: (asked.append(shape), torch.zeros(shape, dtype=dtype))[1],
    )
    monkeypatch.setattr(cuda, "register", None)
    monkeypatch.setattr(cuda, "unregister", None)
    memory = PinnedRanges(CopyDevice(), pin=True, most=1 << 28)
    taken = memory.take(1000)

    assert taken.host.numel() == 1000
    assert asked == [(memory.size,)]
    memory.release(taken, None)
    memory.close()


def test_without_memory_that_can_be_locked_copies_go_on():
    """Neither kind of locked memory: the store says so, and its memory is the system's."""
    memory = PinnedRanges(CopyDevice(), pin=True, most=1 << 28)
    with pytest.warns(UserWarning, match="could not be locked"):
        taken = memory.take(1000)
    assert taken.host.numel() == 1000
    memory.release(taken, None)
    memory.close()
