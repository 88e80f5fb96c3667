"""Rows about whole runs: recorded, compared, timed, and told to other programs."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import kedge
from capable.row import Lacking, Partly, check, row, same

TRAINING = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
rate = float(sys.argv[1]) if len(sys.argv) > 1 else 0.1
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
for step in range(12):
    x = torch.randn(16, 4)
    y = model(x)
    loss = (y - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item().hex())
"""
FULL = ("--every", "1", "--budget", "none")


@contextmanager
def folder() -> Iterator[Path]:
    """Give a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def ran(at: Path, *words: str, status: int = 0) -> str:
    """Run a command in a folder; return what it prints.

    Raises:
        Lacking: It ends with another status.
    """
    environment = {**os.environ, "CI": "", "NO_COLOR": "1", "COLUMNS": "200"}
    command = [sys.executable, *words]
    done = subprocess.run(
        command, cwd=at, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    if done.returncode != status:
        said = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
        raise Lacking(f"`{' '.join(words[1:4])}` ended with {done.returncode}: {said[-1]}")
    return done.stdout


def recorded(at: Path, name: str, text: str, *options: str, arguments: tuple[str, ...] = ()) -> str:
    """Write a program, run it under `kedge run` into a recording of its name; return what it prints."""
    (at / f"{name}.py").write_text(text, encoding="utf-8")
    words = ("run", "-q", "-o", f"{name}.kedge", *options, f"{name}.py", *arguments)
    return ran(at, "-m", "kedge", *words)


@row(30, "a training recorded without a change of the program")
def unchanged() -> str:
    """Its last loss is that of the plain run to the bit, and the recording has each step's."""
    with folder() as at:
        printed = recorded(at, "train", TRAINING)
        plain = ran(at, "train.py")
        recording = kedge.Recording.open(at / "train.kedge")
        check(printed == plain, f"the last loss is {printed.strip()}, not {plain.strip()}")
        check(len(recording.steps) == 12, f"{len(recording.steps)} of 12 steps")
        weights = recording.series("0.weight:param", "rms")
    check(bool(np.isfinite(weights).any()), "no statistics of a weight")
    return "`kedge run`"


@row(31, "the first NaN named with its line")
def first_nan() -> None:
    """One born in a module's forward, one in the loss, one in backward alone."""
    lines = {
        "    y = torch.log(y - 9)  # NaN": ("    y = model(x)\n", "log"),
        "    loss = torch.sqrt(-1 - loss)  # NaN": (".square().mean()\n", "sqrt"),
        "    loss = (y * 0).abs().sqrt().mean()  # NaN": (".square().mean()\n", "sqrt"),
    }
    for line, (after, operation) in lines.items():
        text = TRAINING.replace(after, f"{after}    if step == 5:\n    {line}\n")
        number = next(i for i, each in enumerate(text.splitlines(), 1) if "# NaN" in each)
        with folder() as at:
            recorded(at, "train", text)
            found = json.loads(ran(at, "-m", "kedge", "check", "train.kedge", "--json", status=1))
        born = [each for each in found["findings"] if each["code"] == "NAN-BORN"]
        check(len(born) == 1, f"no NAN-BORN for `{line.strip()}`")
        said = json.dumps(born[0])
        check(f"train.py:{number}" in said, f"not the line of `{line.strip()}`")
        check(operation in said.lower(), f"not the operation of `{line.strip()}`")


@row(32, "two runs compared: the first difference, and its cause")
def compared() -> None:
    """`kedge diff --deep` names the changed line; equal runs are equal; one changed batch is one."""
    changed = TRAINING.replace("y = model(x)", "y = model(x) + 1e-3 * (step == 4)")
    batch = TRAINING.replace("x = torch.randn(16, 4)", "x = torch.randn(16, 4) + (step == 4)")
    number = next(i for i, line in enumerate(changed.splitlines(), 1) if "1e-3" in line)
    with folder() as at:
        for name, text in {
            "good": TRAINING,
            "again": TRAINING,
            "changed": changed,
            "batch": batch,
        }.items():
            recorded(at, name, text, *FULL)
        command = ("-m", "kedge", "diff", "good.kedge")
        ran(at, *command, "again.kedge", status=0)
        deep = ran(at, *command, "changed.kedge", "--deep", "--json", status=1)
        data = ran(at, *command, "batch.kedge", status=1)
    check(f"changed.py:{number}" in deep, f"the line is not named in {deep[:300]}")
    first = next(line for line in data.splitlines() if line.startswith("✗"))
    check("data" in first and "batch" in first, f"a changed batch is called “{first}”")


@row(34, "the configuration of two runs compared")
def configurations() -> None:
    """Options, optimizer and model are told apart; a check before any training is not offered."""
    with folder() as at:
        recorded(at, "good", TRAINING, *FULL)
        adam = TRAINING.replace("optim.SGD", "optim.Adam").replace("8, 1)", "8, 1, bias=False)")
        recorded(at, "other", adam, *FULL, arguments=("0.01",))
        rows = json.loads(ran(at, "-m", "kedge", "report", "good", "other", "--json"))
        against = ran(at, "-m", "kedge", "check", "other", "--against", "good", status=1)
    told = json.dumps(rows["differ"]) + against
    for word in ("optimizer", "0.01", "Adam", "SGD"):
        check(word in told, f"{word} is not told")
    raise Partly("by `kedge report A B` and `kedge check --against`, once both have run a step")


class Slow(nn.Module):
    """Waits ten milliseconds in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.01)
        return x * 2


@row(38, "the time of each module")
def times() -> str:
    """Forward and backward of every module; one that waits takes at least what it waits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Slow(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with folder() as at:
        with kedge.watch(str(at / "timed.kedge"), time=True, every=1, budget=None):
            for _ in range(8):
                optimizer.zero_grad()
                model(torch.randn(16, 4)).square().mean().backward()
                optimizer.step()
        timed = kedge.Recording.open(at / "timed.kedge").timed_modules
    if timed is None:
        raise Lacking("no times in the recording")
    for path in ("0", "1", "2"):
        check(path in timed.medians, f"no time of {path}")
        check(all(seconds > 0 for seconds in timed.medians[path]), f"no time of {path}")
    waited = timed.medians["1"][0]
    check(waited >= 0.01, f"a module that waits 10 ms takes {1000 * waited:.1f} ms")
    return "`kedge.watch(time=True)`, `kedge run --time`"


COMMANDS = (
    (0, "check --json a"),
    (1, "check --json b --against a"),
    (0, "report --json a"),
    (0, "report --json a b"),
    (1, "diff --json a b"),
    (0, "explain --json"),
    (0, "explain --json SPIKE"),
    (0, "replay --json a"),
    (0, "sites --json a.py"),
    (0, "sites --json --costs a.py"),
    (0, "query --json a 'select count(*) from stats'"),
    (0, "examine --json a.py"),
)
"""What is asked of two recordings and their program, and the status that it ends with."""


@row(43, "an interface for programs and agents")
def as_json() -> None:
    """Each command's `--json` is one JSON value."""
    with folder() as at:
        recorded(at, "a", TRAINING, *FULL, "--keep-steps", "1")
        recorded(at, "b", TRAINING, *FULL, arguments=("0.2",))
        for status, words in COMMANDS:
            json.loads(ran(at, "-m", "kedge", *shlex.split(words), status=status))
    raise Partly("`--json` of every command that answers; no MCP server, no skills")


@row(33, "the optimizer's state, and collectives")
def optimizer_state() -> None:
    """Adam's first moment after each step, and what goes into a sum over two processes and comes out."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.randn(5, 4)
    optimizer = torch.optim.Adam(model.parameters())
    plain = []
    with kedge.hook(model, "weight:state[exp_avg]", kedge.record(keep=None, copy=True)) as acts:
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            plain.append(optimizer.state[model.weight]["exp_avg"].clone())
    records = acts.records("weight:state[exp_avg]")
    check(len(records) == 3, f"{len(records)} records of three steps")
    for record, value in zip(records, plain, strict=True):
        same(record.value, value, "the first moment")
    with folder() as at:
        (at / "ranks.py").write_text(RANKS, encoding="utf-8")
        command = [sys.executable, "ranks.py", "1"]
        other = subprocess.Popen(command, cwd=at, stdout=subprocess.DEVNULL)
        printed = ran(at, "ranks.py", "0")
        other.wait(timeout=60)
    check(printed.split() == ["1.0", "3.0"], f"all_reduce of 1 and 2 is read as {printed.strip()}")
    raise Partly("the state, and collectives that the program calls; not those inside DDP and FSDP")


RANKS = """
import sys
import torch
import torch.distributed as dist
import kedge

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.path[0] + "/ranks", rank=rank, world_size=2)
total = torch.tensor(1.0 + rank)
with kedge.hook("/all_reduce:in, /all_reduce", kedge.record(copy=True)) as acts:
    dist.all_reduce(total)
print(acts["/all_reduce:in[0]"].item(), acts["/all_reduce"].item())
dist.destroy_process_group()
"""


@row(40, "models that run on a server")
def served() -> None:
    """Not offered."""
    raise Lacking("not offered")


def reported(text: str, *options: str) -> str:
    """Run a program under `kedge run`; return its report."""
    with folder() as at:
        recorded(at, "program", text, *options)
        return ran(at, "-m", "kedge", "report", "program.kedge")
