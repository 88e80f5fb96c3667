"""Sharded parameters: their memory is gone, and back, between a forward and its backward."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch

from tests import forked

SHARDED = """
    import json, torch, kedge
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
    for name, to in (("rebuild", kedge.Rebuild()), ("disk", kedge.Disk())):
        found, account = run(to)
        print(json.dumps([name, all(map(torch.equal, plain, found)), list(account.total.rebuilt)]))
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sharded():
    """Run the program; for each destination whether gradients are equal, and by which rules something was rebuilt."""
    done = forked.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(SHARDED)], timeout=300)
    assert done.returncode == 0, done.stderr
    return {name: found for name, *found in map(json.loads, done.stdout.splitlines())}


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="PyTorch without torch.distributed"
)
@pytest.mark.parametrize("to", ["rebuild", "disk"])
def test_parameters_that_fsdp_gives_back_are_not_rebuilt_from(to, sharded):
    """Under FSDP, where a parameter's memory is gone before what was made from it is wanted, gradients are equal."""
    equal, rebuilt = sharded[to]

    assert equal
    assert {"relu", "gelu", "layer_norm"} <= set(rebuilt)
