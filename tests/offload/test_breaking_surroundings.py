"""Offloading where others change what it stands on: sharded parameters, other blocks, forward-mode derivatives."""

from __future__ import annotations

import gc
import sys
import textwrap
import weakref

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

import kedge
from kedge.hooks.saved.pairs import drain, pair_stack
from tests import forked

SHARDED = """
    import sys, torch, kedge
    import torch.distributed as dist
    from contextlib import nullcontext
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    class Norms(nn.Module):
        def __init__(self):
            super().__init__()
            self.batch, self.layer, self.shift = nn.BatchNorm1d(32), nn.LayerNorm(32), nn.Parameter(torch.randn(32, 32))
        def forward(self, x):
            return torch.sigmoid(self.layer(torch.relu(self.batch(x))) + self.shift)

    def block():
        return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def run(to):
        torch.manual_seed(0)
        model = nn.Sequential(Norms(), block(), Norms(), block())
        mesh = init_device_mesh("cpu", (1,))
        for part in model:
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
        optimizer, found = torch.optim.Adam(model.parameters(), 1e-2), []
        with kedge.offload(model, to=to, min_bytes=0) if to else nullcontext() as account:
            for step in range(3):
                model(torch.randn(32, 32)).square().sum().backward()
                found += [p.grad.to_local().clone() for p in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        return found, account

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    plain, _ = run(None)
    found, account = run({"rebuild": kedge.Rebuild(), "disk": kedge.Disk()}[sys.argv[1]])
    assert all(map(torch.equal, plain, found))
    assert {"relu", "gelu", "layer_norm"} <= set(account.total.rebuilt), account
    dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="PyTorch without torch.distributed")
@pytest.mark.parametrize("to", ["rebuild", "disk"])
def test_parameters_that_fsdp_gives_back_are_not_rebuilt_from(to):
    """Under FSDP, where a parameter's memory is gone before what was made from it is wanted, gradients are equal."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SHARDED), to]
    done = forked.run(command, timeout=300)
    assert done.returncode == 0, done.stderr


def test_blocks_inside_a_block_leave_nothing():
    """However many blocks were opened and ended inside another one, nothing of them is held and no pair of theirs is left."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    with kedge.offload(model, min_bytes=0):
        pairs = len(pair_stack.pairs)
        ended = []
        for _ in range(5):
            inner = kedge.offload(model, min_bytes=0)
            with inner:
                model(torch.randn(4, 8)).sum().backward()
            ended.append(weakref.ref(inner._engine))
            del inner
        gc.collect()
        assert len(pair_stack.pairs) == pairs
        assert [each() for each in ended] == [None] * 5
    assert drain() == []


def test_tensors_of_zeros_without_memory_stay():
    """What forward-mode differentiation makes of constants has no memory: it stays, and derivatives are equal."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    x = torch.randn(3, 8, requires_grad=True)

    def run() -> list[torch.Tensor]:
        model.zero_grad()
        with forward_ad.dual_level():
            y = model(forward_ad.make_dual(x, torch.ones_like(x)))
            tangent = forward_ad.unpack_dual(y).tangent
            (y.sum() + tangent.sum()).backward()
        return [tangent.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = run()
    with kedge.offload(model, to=kedge.Disk(), min_bytes=0):
        assert all(map(torch.equal, plain, run()))
