"""Two ranks whose model is on a device: sharded, parallel and in stages, it is recorded as on the CPU.

`test_distributed.py` has four ranks, and all that is known of them, on the CPU; `make test-all`
runs that on the device too.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch.distributed

from kedge.store.recording import Recording
from tests import forked
from tests.accelerator import build

pytestmark = pytest.mark.skipif(
    not (
        torch.distributed.is_available()
        and torch.distributed.is_gloo_available()
        and build.compiler()
    ),
    reason="no gloo, or no C++ compiler",
)

PROGRAM = """
    import sys
    from collections import OrderedDict
    sys.path.insert(0, sys.argv[1])
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    import kedge
    from tests.accelerator import ranks

    WORLD = 2

    def made(device):
        torch.manual_seed(0)
        return nn.Sequential(OrderedDict(up=nn.Linear(6, 12), act=nn.ReLU(), down=nn.Linear(12, 3))).to(device)

    def sharded(device, rank):
        model, mesh = made(device), init_device_mesh(device, (WORLD,))
        fully_shard(model.up, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, lambda batch: model(batch.chunk(WORLD)[rank].to(device)).square().mean().backward()

    def parallel(device, rank):
        model, mesh = made(device), init_device_mesh(device, (WORLD,))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model, lambda batch: model(batch.to(device)).square().mean().backward()

    def staged(device, rank):
        model = made(device)
        for other in ("down",) if rank == 0 else ("up", "act"):
            delattr(model, other)
        stage = PipelineStage(model, rank, WORLD, next(model.parameters()).device)
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda found, wanted: (found - wanted).square().mean())
        given = (lambda batch: [batch.to(device)]) if rank == 0 else (lambda batch: [])
        wanted = {"target": torch.ones(8, 3).to(device)} if rank else {}
        return model, lambda batch: schedule.step(*given(batch), **wanted)

    def train(kind, device, rank):
        model, step = globals()[kind](device, rank)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with kedge.watch(f"{kind}-{device}.kedge", every=1, budget=None, strict=True) as watch:
            watch.tell = None
            for number in range(3):
                torch.manual_seed(number)
                batch = torch.randn(8, 6)
                optimizer.zero_grad()
                step(batch)
                optimizer.step()

    def one_rank(rank):
        for kind in ("sharded", "parallel", "staged"):
            for device in ("cpu", "sim"):
                train(kind, device, rank)
        dist.barrier()

    torch.set_num_threads(1)
    sys.exit(any(ranks.run(WORLD, "sim", one_rank)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the program once; returns the folder of its recordings."""
    build.library()
    place = tmp_path_factory.mktemp("device")
    (place / "it.py").write_text(textwrap.dedent(PROGRAM))
    done = forked.run(
        [sys.executable, "-W", "ignore", "it.py", str(Path(__file__).parents[3])],
        cwd=place,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    return place


@pytest.mark.parametrize("kind", ["sharded", "parallel", "staged"])
def test_ranks_on_a_device_record_what_they_do_on_the_cpu(kind: str, folder: Path) -> None:
    """The same sites and counts, and sums up to the rounding of float32, of values and parameters, sharded or not."""
    host, device = (Recording.open(folder / f"{kind}-{where}.kedge") for where in ("cpu", "sim"))

    assert device.ranks == (0, 1)
    assert {site.site for site in device.sites} == {site.site for site in host.sites}
    for site in host.sites:
        ours, theirs = device.rows(site.site), host.rows(site)
        np.testing.assert_array_equal(ours.count, theirs.count, err_msg=site.site)
        np.testing.assert_allclose(
            ours.sumsq, theirs.sumsq, rtol=1e-4, atol=1e-9, err_msg=site.site
        )
