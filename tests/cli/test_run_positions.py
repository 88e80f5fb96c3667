"""Where a program was at last is told, by module, of each rank that was killed or ended by an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
import torch.distributed

from kedge.report.positions import last_positions
from kedge.store.events import EndEvent, PositionEvent
from kedge.store.recording import Recording
from tests.cli.serving import Server
from tests.marks import measured

pytestmark = pytest.mark.timing

RUN = ["run", "--every", "1", "--budget", "none", "-q", "-o", "it.kedge"]
PROGRAM = """
import time
import torch
from torch import nn

class Wait(nn.Module):
    def forward(self, x):
        if step == 8 and "{place}" == "forward":
            time.sleep(600)  # forward
        if step == 8 and "{place}" == "error":
            raise ValueError("no")
        return Waiting.apply(x)

class Waiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        if step == 8 and "{place}" == "backward":
            time.sleep(600)  # backward
        return grad * 2

class Again(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(Ending(), nn.Linear(4, 4))

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

class Ending(nn.Module):
    def forward(self, x):
        if step == 8 and "{place}" == "again" and torch._C._current_graph_task_id() != -1:
            time.sleep(600)  # again
        return x + 1

model = nn.Sequential(nn.Linear(4, 4), Wait(), Again(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(9):
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if "{place}" == "outside":
    time.sleep(600)  # outside
"""
EXPERTS = """
import time
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank = dist.get_rank()

class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x, stuck):
        if stuck and rank == 1:
            while True:
                time.sleep(0.01)
        if stuck:
            dist.all_reduce(torch.ones(1))
        return self.fc(x)

class Mixture(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x):
        for number, expert in enumerate(self.experts):
            x = expert(x, step == 40 and number == 3 * rank)
        return x

torch.manual_seed(0)
model = Mixture()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(50):
    loss = model(torch.ones(2, 4)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


looked_at = pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="a process by itself has no thread that looks at it"
)


def looks(folder: Path) -> dict[int, PositionEvent]:
    """Return the last look at each rank that was seen in one place twice."""
    try:
        recording = Recording.open(folder)
    except Exception:  # noqa: BLE001 - it is not there yet, or not whole
        return {}
    found = recording.of(PositionEvent)
    return {recording.rank_of(look): look for look in found if look.since != look.seen}


def until(condition: Callable[[], bool]) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


@looked_at
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_program_is_told_with_the_module_in_which_it_was(
    server: Server, tmp_path: Path, by: signal.Signals
) -> None:
    """It dies of the signal as without Kedge, in a measured step or another."""
    program = PROGRAM.format(place="forward")
    running = server.start(program, tmp_path, [*RUN, "prog.py"])
    until(lambda: bool(looks(tmp_path / "it.kedge")))
    os.kill(running.pid, by)

    assert running.wait().ending == by
    (said,) = last_positions(Recording.open(tmp_path / "it.kedge"))
    assert said.startswith("the program was last seen in the forward of 1, step 8 (prog.py:")
    assert ": time.sleep(600)  # forward), at " in said
    assert " UTC, first seen there " in said


@looked_at
@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("backward", "in backward, step 8 (prog.py:"),
        ("again", "in backward, inside 2.inner.0, step 8 (prog.py:"),
        ("outside", "outside of modules, step 9 (prog.py:"),
    ],
)
def test_a_killed_program_may_have_been_elsewhere(
    server: Server, tmp_path: Path, place: str, said: str
) -> None:
    """In a backward pass, in what it computes again there, or in no module."""
    running = server.start(PROGRAM.format(place=place), tmp_path, [*RUN, "prog.py"])
    until(lambda: bool(looks(tmp_path / "it.kedge")))
    os.kill(running.pid, signal.SIGKILL)
    running.wait()

    (told,) = last_positions(Recording.open(tmp_path / "it.kedge"))
    assert told.startswith(f"the program was last seen {said}")
    assert f"# {place})" in told


def test_an_error_is_told_with_the_module_in_which_it_came(server: Server, tmp_path: Path) -> None:
    """The end of the recording names it, and no file of looks is left."""
    server.run(PROGRAM.format(place="error"), tmp_path, [*RUN, "prog.py"])
    recording = Recording.open(tmp_path / "it.kedge")

    (said,) = last_positions(recording)
    assert said.startswith("the program ended in the forward of 1, step 8 (prog.py:")
    assert said.endswith(': raise ValueError("no"))')
    assert not list((tmp_path / "it.kedge").glob("position*"))


def test_a_program_that_ends_by_itself_has_no_position(server: Server, tmp_path: Path) -> None:
    """Neither its end nor the folder says where it was."""
    server.run(PROGRAM.format(place=""), tmp_path, [*RUN, "prog.py"])
    recording = Recording.open(tmp_path / "it.kedge")

    assert [end.position for end in recording.of(EndEvent)] == [None]
    assert list(last_positions(recording)) == []
    assert not list((tmp_path / "it.kedge").glob("position*"))


def test_the_look_is_no_thread_of_the_program(server: Server, tmp_path: Path) -> None:
    """A program that joins all its threads at its end does not wait for it."""
    joining = """
import threading
for each in threading.enumerate():
    if each is not threading.main_thread():
        each.join()
print(threading.active_count())
"""
    done = server.run(PROGRAM.format(place="") + joining, tmp_path, [*RUN, "prog.py"])

    assert done.stdout == "1\n"


@pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
@measured
def test_ranks_that_wait_for_each_other_are_told_apart(tmp_path: Path) -> None:
    """One is stuck in a module and another waits for it in a collective: both are named, and the line."""
    (tmp_path / "moe.py").write_text(dedent(EXPERTS))
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command = [sys.executable, *launcher, "kedge", "run", "-o", "it.kedge", "moe.py"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.DEVNULL
    ) as running:
        try:
            until(lambda: len(looks(tmp_path / "it.kedge")) == 2)
        finally:
            running.terminate()  # as a launcher's time limit does

    first, second = last_positions(Recording.open(tmp_path / "it.kedge"))
    assert first.startswith("rank 0 was last seen in the forward of experts.0, step 40 (moe.py:")
    assert ": dist.all_reduce(torch.ones(1))), at " in first
    assert second.startswith("rank 1 was last seen in the forward of experts.3, step 40 (moe.py:")
    assert ": time.sleep(0.01)), at " in second
