"""Collectives of `torch.distributed`: operations that write what they return into an argument."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import kedge
from kedge.errors import EditError, NeverFiredWarning

GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""The name is new in PyTorch 2.13."""
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A process group of this process alone, in which every sum is its one term."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_goes_into_a_collective_and_what_comes_out() -> None:
    """Its output is what it has written into, each tensor of a list for itself."""
    x = torch.arange(3.0)
    gathered = torch.empty(3)
    parts = [torch.empty(3)]
    with kedge.hook("/all_*, /broadcast", kedge.record(copy=True)) as acts:
        dist.all_reduce(x)
        GATHER(gathered, x)
        dist.all_gather(parts, x)
        dist.broadcast(x, 0)
    assert acts["/all_reduce"].tolist() == [0, 1, 2]
    assert acts[f"/{GATHER.__name__}"].tolist() == [0, 1, 2]
    assert acts["/all_gather:out[0]"].tolist() == [0, 1, 2]
    assert acts["/broadcast"].tolist() == [0, 1, 2]


def test_a_value_is_copied_before_a_collective_overwrites_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No version counts what it writes, so nothing else would show it."""
    x = torch.arange(3.0)
    real = dist.all_reduce

    def doubling(tensor: Tensor) -> None:
        real(tensor)
        tensor.data.mul_(2)  # as if two ranks were there

    doubling.__name__ = "all_reduce"
    doubling.__module__ = real.__module__

    def all_reduce(tensor: Tensor) -> None:
        torch.overrides.handle_torch_function(doubling, (tensor,), tensor)

    with kedge.hook("/all_reduce:in", kedge.record()) as acts:
        all_reduce(x)
    assert acts["/all_reduce:in[0]"].tolist() == [0, 1, 2]
    assert x.tolist() == [0, 2, 4]


def test_collectives_inside_a_module() -> None:
    """They are operations of its forward."""

    class Shared(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            total = x.sum(0)
            dist.all_reduce(total)
            return total * 2

    model = nn.Sequential(Shared())
    with kedge.hook(model, "0/all_reduce", kedge.record(copy=True)) as acts:
        output = model(torch.ones(2, 3))
    assert acts["0/all_reduce"].tolist() == [2, 2, 2]
    assert output.tolist() == [4, 4, 4]


def test_what_was_written_cannot_be_replaced() -> None:
    """The program goes on with the tensor that it gave."""
    with (
        pytest.raises(EditError, match="returns nothing that it could replace; edit what goes"),
        kedge.hook("/all_reduce", kedge.scale(2)),
    ):
        dist.all_reduce(torch.ones(3))
    gathered = torch.empty(3)
    with kedge.hook(f"/{GATHER.__name__}:in[1]", kedge.scale(2)):
        GATHER(gathered, torch.ones(3))
    assert gathered.tolist() == [2, 2, 2]


def test_an_output_that_is_not_there_yet_does_not_fire() -> None:
    """What a call that runs on returns is a handle to wait for."""
    x = torch.ones(3)
    with (
        pytest.warns(NeverFiredWarning, match="all_reduce:out"),
        kedge.hook("/all_reduce, /all_reduce:in", kedge.record(copy=True)) as acts,
    ):
        dist.all_reduce(x, async_op=True).wait()
    assert acts["/all_reduce:in[0]"].tolist() == [1, 1, 1]


def test_the_operation_of_the_same_name_is_another() -> None:
    """`torch.gather` returns what it gathers."""
    with kedge.hook("/gather", kedge.record()) as acts:
        torch.gather(torch.arange(4.0), 0, torch.tensor([2, 1]))
    assert acts["/gather"].tolist() == [2, 1]
