"""Four ranks that share one model: sharded, replicated, in stages; merged they are what one process records."""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed

from kedge.report.head import lost_ranks
from kedge.rules.registry import check
from kedge.store.recording import Recording
from tests import forked
from tests.accelerator import build
from tests.marks import full

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)

PROGRAM = """
    import contextlib, json, os, signal, sys
    ROOT, DEVICE = sys.argv[1:]
    sys.path.insert(0, ROOT)
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
    )
    from torch.utils.checkpoint import checkpoint
    import kedge
    from tests.accelerator import ranks

    WORLD, STEPS = 4, 3

    def say(*words):
        os.write(1, (json.dumps(words) + "\\n").encode())  # at once: four write to one file

    class Log(nn.Module):
        def forward(self, x):
            return torch.log(x)

    class Block(nn.Module):
        again = False
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.act, self.down = nn.LayerNorm(6), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)
        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False) if self.again else self.inner(x)
        def inner(self, x):
            return x + self.down(self.act(self.up(self.norm(x))))

    class Net(nn.Module):
        def __init__(self, blocks=2, head=True):
            super().__init__()
            self.layers = nn.ModuleDict({str(i): Block() for i in range(blocks)})
            self.head = nn.Linear(6, 3) if head else None  # fewer rows than ranks: one has none
        def forward(self, x):
            for layer in self.layers.values():
                x = layer(x)
            return x if self.head is None else self.head(x)

    def made(**options):
        torch.manual_seed(0)
        return Net(**options).to(DEVICE)

    def shard(model, mesh):
        for layer in model.layers.values():
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def parallel(model, mesh):
        for layer in model.layers.values():
            parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return model

    def sequence(model, mesh):
        whole = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)), "down": whole}
        for layer in model.layers.values():
            parallelize_module(layer, mesh, plan)
        return model

    def train(model, share, steps=STEPS):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)  # PyTorch takes no mix of DTensors and others together
        for step in range(steps):
            torch.manual_seed(step)
            loss = model(share(torch.randn(8, 4, 6).to(DEVICE))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            yield [getattr(p.grad, "_local_tensor", p.grad).clone() for p in model.parameters()]
            optimizer.step()

    def watched(name, model, share, sites="**"):
        with kedge.watch(f"{name}.kedge", every=1, budget=None, strict=True, sites=sites) as watch:
            watch.tell = None
            list(train(model, share))

    def staged(name, rank, schedule, *, broken=False):
        model = made(blocks=WORLD, head=False)
        if broken:
            model.layers["2"].act = Log()
        for other in {str(i) for i in range(WORLD)} - {str(rank)}:
            del model.layers[other]
        here = next(model.parameters()).device
        stage = PipelineStage(model, rank, WORLD, here)
        run = schedule(stage, 4, loss_fn=lambda found, wanted: (found - wanted).square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        junk = [torch.full((1 << 14,), float("nan"), device=here) for _ in range(64)]  # the memory that is allocated next
        del junk
        with kedge.watch(f"{name}.kedge", every=1, budget=None, strict=True) as watch:
            watch.tell = None
            for step in range(STEPS):
                torch.manual_seed(step)
                given = {0: (torch.randn(8, 6).to(here),)}.get(rank, ())
                run.step(*given, **({"target": torch.ones(8, 6).to(here)} if rank == WORLD - 1 else {}))
                optimizer.step()
                optimizer.zero_grad()

    def offloaded(mesh, rank):
        def gradients(to, again):
            model = made()
            for layer in model.layers.values():
                layer.again = again
            shard(model, mesh)
            with kedge.offload(model, to=to, min_bytes=0) if to else contextlib.nullcontext():
                return [g for step in train(model, lambda x: x.chunk(WORLD)[rank]) for g in step]
        for again in (False, True):
            plain = gradients(None, again)
            for to in (kedge.Rebuild(), kedge.Cpu(), kedge.Disk()):
                same = all(map(torch.equal, plain, gradients(to, again)))
                say("offload", again, str(to), same)

    def bereft(mesh, rank):
        model, alone = shard(made(), mesh), made()
        with kedge.watch("bereft.kedge", every=1, budget=None, strict=True) as watch:
            watch.tell = None
            try:
                for step, _ in enumerate(train(model, lambda x: x.chunk(WORLD)[rank], 14)):
                    if step == 11 and rank == WORLD - 1:
                        os.kill(os.getpid(), signal.SIGKILL)
            except RuntimeError:
                say("bereft", rank)
            list(train(alone, lambda x: x))

    def note_collectives():
        def noting(work, name):
            def call(*args, **named):
                frame = sys._getframe(1)
                while frame is not None and "/torch/" in frame.f_code.co_filename:
                    frame = frame.f_back
                if frame is not None and "/kedge/" in frame.f_code.co_filename and "/tests/" not in frame.f_code.co_filename:
                    say("collective", name, frame.f_code.co_filename, frame.f_lineno)
                return work(*args, **named)
            return call
        for name in ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast"):
            setattr(functional, name, noting(getattr(functional, name), name))

    def rank_of_four(rank):
        note_collectives()
        line = init_device_mesh(DEVICE, (WORLD,))
        table = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("data", "tensor"))
        watched("fsdp", shard(made(), line), lambda x: x.chunk(WORLD)[rank])
        watched("tensor", parallel(made(), line), lambda x: x)
        watched("both", shard(parallel(made(), table["tensor"]), table["data"]), lambda x: x.chunk(2)[rank // 2])
        split = lambda x: distribute_tensor(x, line, [Shard(1)])
        watched("sequence", sequence(made(head=False), line), split)
        watched("ddp", nn.parallel.DistributedDataParallel(made()), lambda x: x.chunk(WORLD)[rank], "**, /square")
        staged("stages", rank, ScheduleGPipe)
        staged("broken", rank, Schedule1F1B, broken=True)
        offloaded(line, rank)
        dist.barrier()
        bereft(line, rank)

    torch.set_num_threads(1)
    ended = ranks.run(WORLD, DEVICE, rank_of_four)
    ranks.load(DEVICE)
    watched("one", made(), lambda x: x)
    watched("line", made(blocks=WORLD, head=False), lambda x: x)
    sys.exit(ended != [0, 0, 0, signal.SIGKILL])
"""


@dataclass
class FourRanks:
    """What four ranks printed, and the folder of their recordings."""

    lines: list[Any]
    folder: Path

    def recording(self, name: str) -> Recording:
        """Open the recording of a run."""
        return Recording.open(self.folder / f"{name}.kedge")


@pytest.fixture(scope="module", params=["cpu", full("sim")])
def four(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FourRanks:
    """Run the program once on the CPU, and once on the simulated device."""
    if request.param == "sim":
        if build.compiler() is None:
            pytest.skip("no C++ compiler, or no headers of Python")
        build.library()
    folder = tmp_path_factory.mktemp("four")
    (folder / "it.py").write_text(textwrap.dedent(PROGRAM))
    root = str(Path(__file__).parents[3])
    done = forked.run(
        [sys.executable, "-W", "ignore", "it.py", root, request.param], cwd=folder, timeout=240
    )
    assert done.returncode == 0, done.stderr
    return FourRanks([json.loads(line) for line in done.stdout.splitlines()], folder)


PARAMETERS = ("param", "param.grad", "update", "grad.norm")


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("fsdp", ("in", "out", *PARAMETERS)), ("tensor", PARAMETERS), ("both", PARAMETERS)],
)
def test_sharded_models_are_merged_to_the_whole(
    name: str, kinds: tuple[str, ...], four: FourRanks
) -> None:
    """Each element counts once, also of uneven and empty shards, copies, and models of two meshes; sums agree with one process."""
    ours, whole = four.recording(name), four.recording("one")

    assert ours.ranks == (0, 1, 2, 3)
    assert {s.site for s in ours.sites} == {s.site for s in whole.sites}
    for site in (site for kind in kinds for site in whole.of_kind(kind)):
        found, wanted = ours.rows(site.site), whole.rows(site)
        for counted in ("step", "count", "nonzero", "nonfinite"):
            np.testing.assert_array_equal(
                getattr(found, counted), getattr(wanted, counted), err_msg=site.site
            )
        for measured in ("sum", "sumsq", "min", "max"):
            np.testing.assert_allclose(
                getattr(found, measured),
                getattr(wanted, measured),
                rtol=1e-4,
                atol=1e-5,
                err_msg=site.site,
            )
        if site.kind == "param":  # the same numbers in the first step
            assert (found.min[0], found.max[0]) == (wanted.min[0], wanted.max[0])


def test_the_norm_of_gradients_that_ddp_averaged_counts_once(four: FourRanks) -> None:
    """All ranks have the same, so together it is that of the model and not twice as much."""
    ours, whole = (four.recording(name).rows(":grad.norm") for name in ("ddp", "one"))

    np.testing.assert_array_equal(ours.count, whole.count)
    np.testing.assert_allclose(ours.sumsq, whole.sumsq, rtol=1e-4)


def test_operations_outside_of_modules_are_merged_as_modules_are(four: FourRanks) -> None:
    """Each rank has squared its share of the outputs."""
    squares = four.recording("ddp").rows("/square#0")
    outputs = four.recording("one").rows(":out")

    assert squares.step.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(squares.count, outputs.count)
    np.testing.assert_allclose(squares.sum, outputs.sumsq, rtol=1e-4)


def test_addends_are_not_taken_for_values(four: FourRanks) -> None:
    """A gradient or loss still to be added up has no statistics but its size, and is left out of the norm of all."""
    recording = four.recording("sequence")
    partial = [site for site in recording.of_kind("param.grad") if site.partial]

    assert {site.path for site in partial} == {
        f"layers.{i}.norm.{name}" for i in (0, 1) for name in ("weight", "bias")
    }
    for site in partial:
        rows = recording.rows(site)
        assert (rows.count == 6).all()
        assert (rows.nonfinite == 0).all()
        assert np.isnan([rows.sum, rows.sumsq, rows.min, rows.max]).all()
    assert not len(recording.rows("loss"))
    whole = 2 * (6 * 12 + 12 + 12 * 6 + 6)  # without those of the norms
    assert recording.rows(":grad.norm").count.tolist() == [whole] * 3
    assert check(recording) == ()


def test_no_hook_makes_ranks_communicate(four: FourRanks) -> None:
    """A rank that measures a step which others do not would wait for them for ever."""
    assert [line for line in four.lines if line[0] == "collective"] == []


def test_stages_are_one_model(four: FourRanks) -> None:
    """Modules of all stages under their own names, micro-batches merged, the first stage's input and the last one's loss."""
    ours, whole = four.recording("stages"), four.recording("line")

    assert ours.steps.tolist() == [0, 1, 2]
    assert [root.name for root in ours.roots] == ["Net"]
    assert {m["path"] for m in ours.roots[0].modules} == {m["path"] for m in whole.roots[0].modules}
    assert ours.roots[0].parameters == whole.roots[0].parameters
    assert {s.site for s in ours.sites} == {s.site for s in whole.sites}
    inner = ours.rows("layers.2.up:out")
    assert inner.calls.tolist() == [4] * 3  # the call that learned shapes is no value
    assert inner.count.tolist() == [8 * 12] * 3
    assert ours.rows(":in").count.tolist() == ours.rows(":out").count.tolist() == [8 * 6] * 3
    assert ours.rows("loss").count.tolist() == [4] * 3
    assert ours.rows(":grad.norm").count.tolist() == whole.rows(":grad.norm").count.tolist()
    assert ours.site("layers.2:in").sources == (ours.site("layers.1:out").id,)
    assert check(ours) == ()


def test_a_fault_in_one_stage_is_one_finding(four: FourRanks) -> None:
    """It names the module and the rank that has it; that the other ranks pass it on is no fault of theirs."""
    (finding,) = check(four.recording("broken"))

    assert (finding.code, finding.site, finding.ranks) == (
        "NAN-BORN",
        "layers.2.act:out",
        (2,),
    )
    assert finding.message.endswith("This holds for rank 2.")


def test_gradients_of_sharded_models_are_the_same_with_offload(four: FourRanks) -> None:
    """Parameters whose memory comes and goes stay where they are, with and without checkpoints, on each rank."""
    found = [line[1:] for line in four.lines if line[0] == "offload"]

    assert len(found) == 4 * 2 * 3
    assert all(same for *_, same in found)


def test_ranks_go_on_alone_after_one_has_died(four: FourRanks) -> None:
    """What the dead one has recorded is read with the rest, and no rank waits for it."""
    recording = four.recording("bereft")

    assert sorted(line[1] for line in four.lines if line[0] == "bereft") == [0, 1, 2]
    assert list(lost_ranks(recording)) == ["rank 3 have no recorded end: killed, or still running"]
    assert [recording.of_rank(rank).steps.tolist() for rank in (0, 1, 2)] == [[*range(12 + 3)]] * 3
    *_, last = recording.of_rank(3).steps.tolist()
    assert last < 11
    assert check(recording) == ()
