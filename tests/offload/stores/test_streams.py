"""Where moving bytes to the host's memory frees any: what is asked of CUDA, told by a device that is not there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kedge.errors import NothingGained
from kedge.offload.stores.cpu import CpuStore
from kedge.offload.stores.streams import Cuda

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch):
    """Give a device's properties, which can be changed until they are asked for."""
    properties, asked = SimpleNamespace(is_integrated=0), []

    def look(device):
        asked.append(device)
        return properties

    monkeypatch.setattr(torch.cuda, "get_device_properties", look)
    yield properties
    assert set(asked) <= {GPU}


def test_pytorch_tells_which_memory_is_unified():
    """The property by which unified memory is known has this name, in a build without CUDA too."""
    assert "is_integrated: _int" in (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()


def test_memory_of_its_own_is_freed(gpu):
    """A card with memory of its own gains, and the store takes its tensors."""
    assert Cuda().gains(GPU) is None
    store = CpuStore()
    assert store.takes(GPU)
    store.close()


def test_unified_memory_frees_nothing(gpu):
    """A device that computes in the CPU's memory gains nothing: the store takes no tensor of it, and says why, once."""
    gpu.is_integrated = 1
    store = CpuStore()
    with pytest.warns(NothingGained, match="cuda:0 has no memory of its own") as said:
        assert [store.takes(GPU) for _ in range(3)] == [False] * 3

    assert len(said) == 1
    store.close()


def test_other_devices_are_not_asked(gpu):
    """CPU tensors are there already, and of devices that are not CUDA's nothing is known."""
    assert "in CPU memory already" in Cuda().gains(torch.device("cpu"))
    assert "not on 'meta'" in Cuda().gains(torch.device("meta"))
