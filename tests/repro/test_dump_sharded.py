"""``--dump`` in a run whose parameters and values are spread over ranks."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
from safetensors.torch import load_file

from kedge.store.events import DumpEvent, NoteEvent
from kedge.store.recording import AnyEvent, Recording
from tests import forked
from tests.accelerator import build
from tests.marks import full

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
ROOT = Path(__file__).parents[2]

PROGRAM = """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    WORLD = 2

    class Log(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
        def forward(self, x):
            return torch.log(x * self.weight)

    class Sqrt(Log):
        def forward(self, x):
            y = x.abs() * (x > 0) * self.weight
            return torch.where(y > 0, torch.sqrt(y), y)

    class Exp(nn.Module):
        def forward(self, x):
            return torch.log(-x.exp())

    class Block(nn.Module):
        between = False
        def __init__(self, act):
            super().__init__()
            self.up, self.act, self.down = nn.Linear(6, 6), act, nn.Linear(6, 6)
        def forward(self, x):
            x = self.act(self.up(x))
            return self.down(torch.log(x) if self.between else x)

    class Net(nn.Module):
        def __init__(self, act):
            super().__init__()
            self.first, self.second = Block(nn.Identity()), Block(act)
            for block in (self.first, self.second):
                nn.init.eye_(block.up.weight), nn.init.zeros_(block.up.bias), nn.init.eye_(block.down.weight)
                nn.init.zeros_(block.down.bias)
        def forward(self, x):
            return self.second(self.first(x))

    def sharded(mesh, act, *leaves, between=False):
        model = Net(act).to(DEVICE)
        model.second.between = between
        for part in (*leaves, "first", "second", ""):
            fully_shard(model.get_submodule(part), mesh=mesh, reshard_after_forward=True)
        return model

    def parallel(mesh, act):
        model = Net(act).to(DEVICE)
        plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
        for block in (model.first, model.second):
            parallelize_module(block, mesh, plan)
        return model

    def trained(model, batch, around):
        optimizer, found = torch.optim.SGD(model.parameters(), 0.01, foreach=False), []
        with around:
            for _ in range(2):
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                found += [p.grad.to_local().clone() for p in model.parameters()]
                optimizer.step()
        return found

    def one_rank(rank):
        import contextlib, kedge
        sys.executable = ""  # no call is run again to name its operation: that takes seconds
        mesh = init_device_mesh(DEVICE, (WORLD,))
        good = torch.rand(4, 6).to(DEVICE) + 0.5
        bad = good * (-1 if rank == 1 else 1)  # only this rank has what cannot be computed with
        def kept(name, model, batch):
            with_dump = kedge.watch(f"{name}.kedge", every=1, budget=None, dump=True, strict=True)
            with_dump.tell = None
            return trained(model, batch, with_dump)
        same = map(torch.equal, kept("sound", sharded(mesh, Log()), good),
                   trained(sharded(mesh, Log()), good, contextlib.nullcontext()))
        os.write(1, (json.dumps([*same]) + "\\n").encode())
        kept("parameter", sharded(mesh, Log()), bad)
        kept("leaf", sharded(mesh, Log(), "second.act"), bad)
        kept("between", sharded(mesh, nn.Identity(), between=True), bad)
        kept("backward", sharded(mesh, Sqrt()), bad)
        kept("part", parallel(mesh, Exp()), good)
        dist.barrier()

    if __name__ == "__main__":
        ROOT, DEVICE = sys.argv[1:]
        sys.path.insert(0, ROOT)
        from tests.accelerator import ranks
        torch.set_num_threads(1)
        sys.exit(any(ranks.run(WORLD, DEVICE, one_rank)))
"""


@dataclass
class TwoRanks:
    """What two ranks printed, the folder of their recordings, and the device."""

    lines: list[Any]
    folder: Path
    device: str

    def events(self, name: str, kind: type[AnyEvent]) -> tuple[AnyEvent, ...]:
        """What a recording says of a kind."""
        return Recording.open(self.folder / f"{name}.kedge").of(kind)

    def replayed(self, name: str) -> str:
        """Run the script of rank 1's dump, alone."""
        folder = self.folder / f"{name}.kedge" / "dump-0-1"
        load = "from tests.accelerator import ranks; ranks.load(sys.argv[1]); import runpy; "
        program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {load}device = sys.argv.pop(); runpy.run_path('replay.py', {{}}, '__main__')"
        done = forked.run([sys.executable, "-c", program, self.device], cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=["cpu", full("sim")])
def two(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TwoRanks:
    """Run the program once on the CPU, and once on the simulated device."""
    if request.param == "sim":
        if build.compiler() is None:
            pytest.skip("no C++ compiler, or no headers of Python")
        build.library()
    folder = tmp_path_factory.mktemp("two")
    (folder / "it.py").write_text(textwrap.dedent(PROGRAM))
    done = forked.run(
        [sys.executable, "-W", "ignore", "it.py", str(ROOT), request.param], cwd=folder, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return TwoRanks([json.loads(line) for line in done.stdout.splitlines()], folder, request.param)


def test_watching_changes_no_bit(two: TwoRanks) -> None:
    """Gradients of each rank are those without ``--dump``, and a sound run has nothing to keep."""
    assert len(two.lines) == 2
    assert all(same for line in two.lines for same in line)
    assert two.events("sound", DumpEvent) == two.events("sound", NoteEvent) == ()


@pytest.mark.parametrize(
    ("name", "module", "site", "direction"),
    [
        ("parameter", "second.act", "second.act:out", "forward"),
        ("leaf", "second.act", "second.act:out", "forward"),
        ("between", "second", "second.down:in", "forward"),
        ("backward", "second.act", "second.act:in.grad", "backward"),
    ],
)
def test_the_call_is_kept_by_the_rank_that_made_it(
    name: str, module: str, site: str, direction: str, two: TwoRanks
) -> None:
    """With the parameters as they are gathered for it; alone it makes the same value again."""
    (dump,) = two.events(name, DumpEvent)
    told = {"rank": 1, "module": module, "site": site, "direction": direction, "folder": "dump-0-1"}
    assert {key: getattr(dump, key) for key in told} == told

    kept = load_file(two.folder / f"{name}.kedge" / "dump-0-1" / "tensors.safetensors")
    shapes = {
        name: tuple(tensor.shape) for name, tensor in kept.items() if name.startswith("param.")
    }
    whole = {"up.weight": (6, 6), "up.bias": (6,), "down.weight": (6, 6), "down.bias": (6,)}
    own = whole if name == "between" else {"weight": (6,)}
    assert shapes == {f"param.{name}": shape for name, shape in own.items()}
    replayed = two.replayed(name)
    assert f"the first NaN in the {direction}: " in replayed
    assert "note: " not in replayed


def test_what_a_rank_has_only_a_part_of_is_named(two: TwoRanks) -> None:
    """No rank can run its part alone; the note says what to do."""
    notes = {event.rank or 0: event.text for event in two.events("part", NoteEvent)}
    text = (
        "no dump was written: second.act computes with args.0, of which this rank has only its part; "
        "run the program in one process to keep the call"
    )
    assert notes == {0: text, 1: text}
