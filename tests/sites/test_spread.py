"""How values are spread over ranks; tests/watch/steps/ and tests/accelerator/ try it with several."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from kedge.sites.spread import counted_once, spread_of


class Scheduled(Tensor):
    """A tensor of somebody's own that has the attributes of a DTensor, with another meaning."""

    device_mesh = "fine"
    placements = 3


def test_a_tensor_with_the_attributes_of_a_dtensor_is_an_ordinary_one():
    """A name says nothing: a program may call its own things so."""
    value = torch.ones(2).as_subclass(Scheduled)
    assert not isinstance(value, DTensor)
    assert spread_of(value) is None
    assert counted_once([value]) == ([value], [])


@contextmanager
def one_of_four(rank: int) -> Iterator[DeviceMesh]:
    """A mesh of a process group that sends nothing, and ends with the block."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    finally:
        distributed.destroy_process_group()


def spread_over(mesh: DeviceMesh) -> DTensor:
    """A value in halves, of which each is there twice."""
    return DTensor.from_local(torch.ones(2), mesh, [Replicate(), Shard(0)], run_check=False)


def test_a_mesh_goes_with_its_process_group() -> None:
    """What is known of how values are spread over it keeps no mesh alive, neither a value's nor the widest of a model's."""
    with one_of_four(0) as mesh:
        value, narrow = (
            spread_over(mesh),
            DTensor.from_local(torch.ones(2), mesh["data"], [Shard(0)], run_check=False),
        )
        assert spread_of(value) is spread_of(value)
        assert spread_of(narrow, mesh).copies == (0, 1)
        assert spread_of(torch.ones(2), mesh).copies == (0, 1, 2, 3)
        kept = [weakref.ref(mesh), weakref.ref(narrow.device_mesh)]
    del mesh, value, narrow
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_a_process_may_come_back_as_another_rank() -> None:
    """A mesh of the same ranks has it at another place then, also while the mesh of before exists."""
    found, values = [], []
    for rank in (0, 3):
        with one_of_four(rank) as mesh:
            values.append(spread_over(mesh))
            found.append(spread_of(values[-1]))
    assert [(each.copies, each.leads) for each in found] == [((0, 2), True), ((1, 3), False)]
