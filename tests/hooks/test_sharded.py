"""Under FSDP2, where a parameter is a shard that is gathered for the calls of its module."""

from __future__ import annotations

import json
import sys
import textwrap

import pytest
import torch

from tests import forked

SHARDED = """
    import copy, json, torch, kedge
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.func import functional_call

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.mlp = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh())
            self.shift = nn.Parameter(torch.randn(8))
        def forward(self, x):
            hidden = self.fc(x).sigmoid()
            return hidden + self.mlp(x) * self.shift

    def net():
        torch.manual_seed(0)
        return nn.Sequential(Block(), Block())

    def step(model, forward):
        torch.manual_seed(1)
        model.zero_grad()
        out = forward(torch.randn(4, 8))
        out.square().sum().backward()
        grads = [p.grad if p.grad is not None else torch.zeros(p.shape) for p in model.parameters()]
        grads = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
        return [out.detach(), *grads]

    def same(one, other):
        return all(map(torch.equal, one, other))

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    model = net()
    for part in (*model, model):
        fully_shard(part, mesh=mesh, reshard_after_forward=True)
    usual = step(model, model)

    for name in ("0.fc.weight", "1.shift", "1.mlp.0.bias"):
        twin = net()
        weights = {name: twin.get_parameter(name) * 0.5}
        expected = step(twin, lambda x: functional_call(twin, weights, (x,)))
        with kedge.hook(model, f"{name}:param", kedge.scale(0.5)):
            found = step(model, model)
        print(json.dumps([f"edited {name}", same(found, expected)]))

    twin = net()
    twin[0].fc.register_forward_hook(lambda module, args, output: torch.logit(output.sigmoid() * 0.5))
    with kedge.session() as s:
        s.hook(model, "0/hidden=", kedge.scale(0.5))
        acts = s.hook(model, "0/hidden=", kedge.record(copy=True))
        found = step(model, model)
    expected = step(twin, twin)
    close = all(map(torch.allclose, found, expected))
    print(json.dumps(["a variable", close and acts["0/hidden="].max().item() <= 0.5]))

    twin = net()
    twin[1].mlp.forward = lambda x: x
    with kedge.hook(model, "1.mlp", kedge.skip()):
        print(json.dumps(["skipped", same(step(model, model), step(twin, twin))]))
    print(json.dumps(["after", same(step(model, model), usual)]))
    dist.destroy_process_group()
"""


@pytest.mark.skipif(
    not torch.distributed.is_available(), reason="PyTorch without torch.distributed"
)
def test_hooks_on_a_sharded_model_are_those_on_a_whole_one() -> None:
    """Outputs and gradients are equal to those of a model that is not sharded, and afterwards as before."""
    done = forked.run([sys.executable, "-W", "ignore", "-c", textwrap.dedent(SHARDED)], timeout=300)
    assert done.returncode == 0, done.stderr
    found = dict(map(json.loads, done.stdout.splitlines()))
    assert len(found) == 6
    assert [name for name, equal in found.items() if not equal] == []
