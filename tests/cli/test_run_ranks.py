"""``kedge run`` under torchrun: one recording of all ranks, and nothing in the way of the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest
import torch.distributed

from kedge.report.head import lost_ranks
from kedge.rules.registry import check
from kedge.store.events import EndEvent, StepSkippedEvent
from kedge.store.recording import Recording
from tests import forked
from tests.marks import full, measured

pytestmark = [
    pytest.mark.timing,
    measured,
    pytest.mark.skipif(
        not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
        reason="this torch has no gloo",
    ),
]

ALWAYS = ("--budget", "none")
BEGIN = """
    import os, sys
    import torch
    import torch.distributed as dist
    from torch import nn

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    if world > 1:
        model = nn.parallel.DistributedDataParallel(model)
"""
# DDP averages gradients: with this loss and this rate, all ranks together do what one process does.
TRAIN = (
    BEGIN
    + """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * world)
    for step in range(int(sys.argv[1])):
        torch.manual_seed(step)
        batch = torch.randn(16, 6)
        loss = model(batch.chunk(world)[rank]).square().sum() / len(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if world > 1:
        dist.barrier()
        sys.stdout.write(f"{rank} {loss.item()} {[p.sum().item() for p in model.parameters()]}\\n")
        dist.destroy_process_group()
"""
)


@dataclass
class Launcher:
    """Runs programs under torchrun in a folder."""

    folder: Path

    def write(self, source: str, name: str = "train.py") -> str:
        """Write a program."""
        (self.folder / name).write_text(dedent(source))
        return name

    def __call__(
        self, ranks: int, *words: str, launcher: tuple[str, ...] = (), **options: Any
    ) -> Any:
        """Run a module with several processes."""
        command = [
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            *launcher,
            "-m",
            *words,
        ]
        return self.python(*command, **options)

    def python(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run python."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
            **variables,
        }
        return forked.run(
            [sys.executable, *words], cwd=self.folder, env=environment, timeout=120, forks=True
        )

    @property
    def recordings(self) -> list[str]:
        """Name the recordings in the folder."""
        return sorted(path.name for path in self.folder.iterdir() if path.suffix == ".kedge")


def told(done: subprocess.CompletedProcess[str]) -> list[str]:
    """Return the lines that are Kedge's."""
    return [line for line in done.stderr.splitlines() if line.startswith("[kedge]")]


@pytest.fixture
def torchrun(tmp_path: Path) -> Launcher:
    """A function that runs torchrun in the test's folder."""
    return Launcher(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """Record the program in one process, on whole batches."""
    alone = Launcher(tmp_path_factory.mktemp("whole"))
    done = alone.python("-m", "kedge", "run", *ALWAYS, "-o", "it.kedge", alone.write(TRAIN), "23")
    assert done.returncode == 0, done.stderr
    return Recording.open(alone.folder / "it.kedge")


@dataclass
class Ranked:
    """A program that ran at several ranks: with Kedge and without, and its recording."""

    ranks: int
    done: subprocess.CompletedProcess[str]
    plain: subprocess.CompletedProcess[str]
    names: list[str]
    recording: Recording


@pytest.fixture(scope="module", params=[2, full(4)])
def ranked(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Ranked:
    """Run the program under torchrun, each rank on its share of the batches."""
    torchrun = Launcher(tmp_path_factory.mktemp("ranked"))
    name = torchrun.write(TRAIN)
    plain = torchrun(request.param, "train", "23")
    done = torchrun(request.param, "kedge", "run", *ALWAYS, name, "23")
    (recorded,) = torchrun.recordings
    return Ranked(
        request.param, done, plain, torchrun.recordings, Recording.open(torchrun.folder / recorded)
    )


def test_the_ranks_compute_what_they_compute_without_kedge(ranked: Ranked) -> None:
    """Losses and parameters of every rank are the same to the last bit."""
    assert ranked.plain.returncode == ranked.done.returncode == 0, ranked.done.stderr
    assert sorted(ranked.done.stdout.splitlines()) == sorted(ranked.plain.stdout.splitlines())
    assert len(ranked.done.stdout.splitlines()) == ranked.ranks


def test_one_recording_has_all_ranks_and_one_speaks(ranked: Ranked) -> None:
    """Its name is made of the script's and the run's, and only rank 0 says last words."""
    assert re.fullmatch(r"train\.py\.[0-9a-f]{8}\.kedge", ranked.names[0])
    assert ranked.recording.ranks == tuple(range(ranked.ranks))
    assert ranked.recording.manifest["world"] == ranked.ranks
    seen, found, following = told(ranked.done)
    assert re.match(
        rf"\[kedge\] {ranked.ranks} ranks recorded; rank 0: \d+ sites, 23 steps, 4 measured", seen
    )
    assert found.startswith("[kedge] no findings; "), found
    assert following == f"[kedge] see more with: kedge report {ranked.names[0]}"
    assert ranked.recording.end is not None
    assert [end.exit for end in ranked.recording.of(EndEvent)] == [0] * ranked.ranks


def test_merged_statistics_are_those_of_the_whole_batch(ranked: Ranked, whole: Recording) -> None:
    """Of what each rank has a share of: counts are equal, figures up to the rounding of float32."""
    assert ranked.recording.steps.tolist() == whole.steps.tolist() == [0, 1, 10, 20]
    for kind in ("out", "in", "out.grad"):
        assert [s.site for s in ranked.recording.of_kind(kind)] == [
            s.site for s in whole.of_kind(kind)
        ]
        for site in whole.of_kind(kind):
            ours, theirs = ranked.recording.rows(site.site), whole.rows(site)
            np.testing.assert_array_equal(ours.count, theirs.count)
            np.testing.assert_array_equal(ours.nonzero, theirs.nonzero)
            np.testing.assert_array_equal(ours.active, theirs.active)
            for statistic in ("mean", "rms", "min", "max"):
                np.testing.assert_allclose(
                    ours.statistic(statistic),
                    theirs.statistic(statistic),
                    rtol=2e-5,
                    atol=1e-6,
                    err_msg=site.site,
                )


def test_what_all_ranks_hold_counts_once_for_each(ranked: Ranked, whole: Recording) -> None:
    """Sums and counts of replicated parameters grow alike, so that what is derived stays right."""
    for kind in ("param", "update"):
        for site in whole.of_kind(kind):
            ours, theirs = ranked.recording.rows(site.site), whole.rows(site)
            np.testing.assert_array_equal(ours.count, theirs.count * ranked.ranks)
            np.testing.assert_allclose(
                ours.statistic("rms"), theirs.statistic("rms"), rtol=1e-4, err_msg=site.site
            )


def test_gradients_at_the_optimizer_are_those_of_all_ranks(
    ranked: Ranked, whole: Recording
) -> None:
    """After the exchange every rank has the same norm: that of the whole batch, averaged by DDP."""
    (site,) = whole.of_kind("grad.norm")
    expected = np.sqrt(whole.rows(site).sumsq) / ranked.ranks
    norms = [
        np.sqrt(ranked.recording.of_rank(rank).rows(site.site).sumsq)
        for rank in range(ranked.ranks)
    ]

    assert len(expected) == 23
    for norm in norms:
        np.testing.assert_allclose(norm, expected, rtol=1e-4)
        np.testing.assert_array_equal(norm, norms[0])


def test_a_rank_can_be_read_by_itself(ranked: Ranked) -> None:
    """It has the sites of the whole and its own share of the rows."""
    shares = [ranked.recording.of_rank(rank) for rank in range(ranked.ranks)]

    assert all(
        [s.site for s in share.sites] == [s.site for s in ranked.recording.sites]
        for share in shares
    )
    assert {share.rows("0:out").count[0] for share in shares} == {16 * 8 // ranked.ranks}
    assert len({share.rows("0:out").sum[0] for share in shares}) == ranked.ranks
    assert [share.ranks for share in shares] == [(rank,) for rank in range(ranked.ranks)]
    assert all(share.end is not None for share in shares)


def test_healthy_ranks_give_no_findings(ranked: Ranked) -> None:
    """Different data at each rank is no departure."""
    assert check(ranked.recording) == ()


# Ranks that do not talk to each other: what their launcher would tell them is enough.
ALONE = """
    import os, sys, time
    import torch
    from torch import nn

    time.sleep(float(sys.argv[1]) if os.environ["RANK"] == sys.argv[2] else 0)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(12):
        loss = model(torch.ones(4, 2)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print("done")
"""


def ranks(
    torchrun: Launcher, count: int, *words: str, port: str = "29500"
) -> list[subprocess.CompletedProcess[str]]:
    """Run the command as several ranks at once, as a simple launcher does."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(count),
        "MASTER_PORT": port,
    }
    command = [sys.executable, "-m", "kedge", "run", *ALWAYS, *words]
    each = [environment | {"RANK": str(rank)} for rank in range(count)]
    return forked.run_together([command] * count, envs=each, cwd=torchrun.folder, timeout=120)


@pytest.mark.parametrize("late", [full("0"), "1"])
def test_a_rank_that_is_late_takes_part(torchrun: Launcher, late: str) -> None:
    """Whichever rank comes first, all have all their steps in the one recording."""
    done = ranks(torchrun, 2, torchrun.write(ALONE), "1.0", late)

    assert [(d.returncode, d.stdout) for d in done] == [(0, "done\n")] * 2
    assert torchrun.recordings == ["train.py.29500.kedge"]
    recording = Recording.open(torchrun.folder / "train.py.29500.kedge")
    assert recording.ranks == (0, 1)
    assert [recording.of_rank(rank).steps.tolist() for rank in (0, 1)] == [[0, 1, 10]] * 2
    assert recording.rows(":out").calls[0] == 2
    assert not told(done[1])


def test_an_old_recording_is_not_mistaken_for_this_run(torchrun: Launcher) -> None:
    """Replacing the recording of a run that had the same address, all ranks are in the new one."""
    name = torchrun.write(ALONE)
    ranks(torchrun, 2, "-q", "-o", "it.kedge", name, "0", "0")
    done = ranks(torchrun, 2, "-q", "--force", "-o", "it.kedge", "--every", "4", name, "1.0", "0")

    assert [(d.returncode, d.stderr) for d in done] == [(0, "")] * 2
    recording = Recording.open(torchrun.folder / "it.kedge")
    assert recording.manifest["every"] == 4
    assert [recording.of_rank(rank).steps.tolist() for rank in (0, 1)] == [[0, 1, 4, 8]] * 2
    assert torchrun.recordings == ["it.kedge"]


def test_rank_0_refuses_for_all(torchrun: Launcher) -> None:
    """Where there is a recording already, rank 0 ends before the program starts, and nothing is touched."""
    name = torchrun.write(ALONE)
    ranks(torchrun, 2, "-q", "-o", "it.kedge", name, "0", "0")
    before = {path.name: path.read_bytes() for path in (torchrun.folder / "it.kedge").iterdir()}

    done = torchrun(
        2,
        "kedge",
        "run",
        *ALWAYS,
        "-o",
        "it.kedge",
        name,
        "9",
        "1",
        launcher=("--rdzv-id", "again"),
    )

    assert done.returncode != 0
    assert "kedge: cannot create the recording it.kedge: there is one already" in done.stderr
    assert {
        path.name: path.read_bytes() for path in (torchrun.folder / "it.kedge").iterdir()
    } == before


def test_ranks_without_a_rank_0_run_unrecorded(torchrun: Launcher) -> None:
    """A rank whose rank 0 records elsewhere says so once, and its program is what it is without Kedge."""
    name = torchrun.write(ALONE)
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "29500"}

    done = torchrun.python(
        "-m", "kedge", "run", *ALWAYS, "-o", "it.kedge", name, "0", "0", **variables
    )

    assert (done.returncode, done.stdout) == (0, "done\n")
    assert done.stderr == (
        f"[kedge] rank 1: writing failed: rank 0 has not created a recording at {torchrun.folder / 'it.kedge'}; "
        "give all ranks the same path, in a folder that they share; "
        "the program goes on, but is not recorded from here on\n"
    )
    assert torchrun.recordings == []


def test_an_attempt_after_a_failure_leaves_the_first_ones_recording(torchrun: Launcher) -> None:
    """When torchrun starts all ranks again, even with --force, each attempt has a recording of its own."""
    name = torchrun.write(
        ALONE + "    sys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)\n"
    )

    words = ("kedge", "run", *ALWAYS, "--force", "-o", "it.kedge", name, "0", "0")
    done = torchrun(2, *words, launcher=("--max-restarts", "1"))

    assert done.returncode == 0, done.stderr
    assert torchrun.recordings == ["it.kedge", "it.restart-1.kedge"]
    for recorded, status in zip(torchrun.recordings, (3, 0), strict=True):
        recording = Recording.open(torchrun.folder / recorded)
        assert recording.ranks == (0, 1)
        assert recording.steps.tolist() == [0, 1, 10]
        ends = [end.exit for end in recording.of(EndEvent)]
        assert set(ends) <= {status}  # torchrun may stop a rank before it has ended by itself
        assert ends
    assert told(done)[-1] == "[kedge] see more with: kedge report it.restart-1.kedge"


def test_a_rank_that_departs_is_found(torchrun: Launcher) -> None:
    """Parameters that one rank changes by itself are found in the end, and `kedge check` exits with 1."""
    source = (
        ALONE.replace(
            "    loss =",
            "    if step == 5 and os.environ['RANK'] == '1': model.weight.data.mul_(1.01)\n        loss =",
        )
        + """
    open(f"done-{os.environ['RANK']}", "w").close()
    while not all(os.path.exists(f"done-{rank}") for rank in range(3)):
        time.sleep(0.02)  # nothing else holds these ranks together, and rank 0 tells what there is when it ends
"""
    )
    done = ranks(
        torchrun,
        3,
        "-o",
        "it.kedge",
        "--every",
        "2",
        "--budget",
        "none",
        torchrun.write("import torch; torch.manual_seed(0)\n" + dedent(source)),
        "0",
        "0",
    )

    assert re.fullmatch(
        r"\[kedge\] 1 error: RANK-DEPARTS at weight:param; \d+ rules could not judge",
        told(done[0])[1],
    ), told(done[0])
    assert not told(done[1])
    assert torchrun.python("-m", "kedge", "check", "it.kedge").returncode == 1


def test_a_killed_rank_is_named_and_the_others_are_judged(torchrun: Launcher) -> None:
    """What it has recorded until then is read with the rest."""
    source = ALONE.replace(
        "    loss =",
        """    if os.environ["RANK"] == "1" and step == 5:
            while not os.path.exists("it.kedge/manifest.json"):
                time.sleep(0.02)
        if os.environ["RANK"] == "1" and step == 9:
            open("killed", "w").close()
            os.kill(os.getpid(), 9)
        loss =""",
    )
    source += """
    while os.environ["RANK"] == "0" and not os.path.exists("killed"):
        time.sleep(0.02)
"""
    done = ranks(torchrun, 4, "-o", "it.kedge", "--every", "2", torchrun.write(source), "0", "0")
    recording = Recording.open(torchrun.folder / "it.kedge")

    assert [d.returncode for d in done] == [0, -9, 0, 0]
    assert "[kedge] rank 1 have no recorded end: killed, or still running" in told(done[0])
    assert recording.ranks == (0, 1, 2, 3)
    assert recording.of_rank(1).steps.tolist() == [0, 1, 2, 4, 6, 8]
    assert list(lost_ranks(recording)) == ["rank 1 have no recorded end: killed, or still running"]
    assert all(finding.code != "RANK-DEPARTS" for finding in check(recording))


@pytest.mark.parametrize("sharded", ["FSDP2", full("FSDP")])
def test_sharded_models_train_as_without_kedge(torchrun: Launcher, sharded: str) -> None:
    """Parameters that are sharded over the ranks end up with the same bits, and outputs are recorded."""
    wrap = {
        "FSDP2": "from torch.distributed.fsdp import fully_shard\n"
        "    for layer in model: fully_shard(layer)\n    fully_shard(model)",
        "FSDP": "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"
        "    model = FSDP(model, device_id=torch.device('cpu'))",
    }[sharded]
    source = TRAIN.replace("model = nn.parallel.DistributedDataParallel(model)", "pass")
    source = source.replace("    optimizer =", "    " + wrap + "\n    optimizer =", 1)
    source = source.replace(" {[p.sum().item() for p in model.parameters()]}", "")
    name = torchrun.write(source)

    plain = torchrun(2, "train", "12")
    done = torchrun(2, "kedge", "run", *ALWAYS, "-o", "it.kedge", name, "12")

    assert (plain.returncode, done.returncode) == (0, 0), done.stderr
    assert sorted(done.stdout.splitlines()) == sorted(plain.stdout.splitlines())
    recording = Recording.open(torchrun.folder / "it.kedge")
    assert recording.ranks == (0, 1)
    assert told(done)[1].startswith("[kedge] no findings; ")
    assert recording.rows(":out").count.tolist() == [16 * 2] * 3
    if sharded == "FSDP2":  # each rank has its share, and all together are the whole
        weight = {kind: recording.rows(f"0.weight:{kind}") for kind in ("param", "param.grad")}
        assert {kind: rows.count.tolist() for kind, rows in weight.items()} == dict.fromkeys(
            weight, [8 * 6] * 3
        )


#: At step 7 the loss of rank 1 alone is NaN, and the gradients of all, which DDP averages.
SPOILED = TRAIN.replace(
    "        optimizer.zero_grad()\n",
    "        if step == 7 and rank == 1:\n"
    '            loss = loss * float("nan")\n'
    "        optimizer.zero_grad()\n",
)
#: No rank hears of another one's gradients; but all meet after each step.
APART = SPOILED.replace("if world > 1:\n        model", "if False:\n        model").replace(
    "        optimizer.step()\n", "        optimizer.step()\n        dist.barrier()\n"
)


@pytest.mark.parametrize("source", [SPOILED, APART], ids=["together", "apart"])
def test_a_rank_that_stops_does_not_leave_the_others_waiting(
    source: str, torchrun: Launcher
) -> None:
    """Each acts on what it has itself; torchrun ends the rest, and the recording has the finding."""
    name = torchrun.write(source)
    words = ("kedge", "run", *ALWAYS, "-o", "it.kedge", "--on", "NAN-BORN=stop", name, "23")

    done = torchrun(2, *words)

    assert done.returncode == 1
    assert "rank 1: stopped before the optimizer's step 7 (NAN-BORN: " in done.stderr
    assert ("[kedge] stopped" in done.stderr) == (source is SPOILED)
    recording = Recording.open(torchrun.folder / "it.kedge")
    (found, *_) = check(recording)
    assert (found.code, found.step) == ("NAN-BORN", 7)


def test_ranks_that_skip_a_step_stay_together(torchrun: Launcher) -> None:
    """With gradients that DDP has averaged, all skip the same steps, and have the same parameters."""
    name = torchrun.write(SPOILED)
    words = ("kedge", "run", *ALWAYS, "-o", "it.kedge", "--on", "NAN-BORN=skip", name, "23")

    done = torchrun(2, *words)

    assert done.returncode == 0, done.stderr
    first, second = sorted(done.stdout.splitlines())
    assert first.partition("[")[2] == second.partition("[")[2]
    assert "nan" not in done.stdout
    skipped = Recording.open(torchrun.folder / "it.kedge").of(StepSkippedEvent)
    assert [event.step for event in skipped] == [7, 7]
