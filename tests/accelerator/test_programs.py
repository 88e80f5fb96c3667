"""Programs that train on the simulated device, under `kedge run`: they print what they print without Kedge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kedge.store.recording import Recording
from tests import forked
from tests.accelerator import build
from tests.marks import full

pytestmark = pytest.mark.skipif(
    build.compiler() is None, reason="no C++ compiler, or no headers of Python"
)

ROOT = Path(__file__).parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")]),
    "OMP_NUM_THREADS": "1",
}

TRAIN = """
import torch
from torch import nn
from tests.accelerator import sim
DEVICE = "{device}"
if DEVICE == "sim": sim.load()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.drop, self.fc = nn.Dropout({drop}), nn.Linear(4 * 36, 3)

    def forward(self, batch):
        x = torch.relu(self.norm(self.conv(batch)))
        {edit}
        return self.fc(self.drop(x).flatten(1))

if __name__ == "__main__":
    torch.manual_seed(0)
    model = Net().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr={rate}, momentum=0.9)
    for step in range(40):
        generator = torch.Generator().manual_seed(step)
        size = 7 if step == 20 else 8
        x = torch.randn(size, 1, 6, 6, generator=generator).to(DEVICE)
        y = torch.randint(0, 3, (size,), generator=generator).to(DEVICE)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        if step % 5 == 0: print(step, loss.item())
"""
SOUND: dict[str, Any] = {"drop": 0.5, "edit": "pass", "rate": 0.01}
PROGRAMS = {
    "sound": SOUND,
    "NaN": SOUND | {"drop": 0.0, "edit": "if len(batch) == 7: x = torch.log(-x)"},
    "too large a rate": SOUND | {"drop": 0.0, "rate": 5.0},
}
OPTIONS = {
    "default": [],
    "every step": ["--every", "1", "--budget", "none"],
    "dump": ["--dump"],
    "saved": ["--saved"],
}


def run(folder: Path, *commands: Sequence[str]) -> list[subprocess.CompletedProcess[str]]:
    """Run commands of Python in a folder at the same time."""
    return forked.run_together(
        [[sys.executable, *command] for command in commands],
        cwd=folder,
        envs=[ENVIRONMENT] * len(commands),
        ahead=forked.WATCH,
    )


def program(name: str, device: str, folder: Path) -> str:
    """Write one of `PROGRAMS`; returns the name of its file."""
    (folder / f"{device}.py").write_text(TRAIN.format(device=device, **PROGRAMS[name]))
    return f"{device}.py"


def found(folder: Path, recording: str) -> list[tuple[str, str, int | None]]:
    """What the rules find in a recording."""
    (checked,) = run(folder, ["-m", "kedge", "check", recording, "--json"])
    return [
        (each["code"], each["site"], each["step"])
        for each in json.loads(checked.stdout)["findings"]
    ]


CASES = [(name, options) for name in PROGRAMS for options in OPTIONS]
SAMPLE = [("sound", "default"), ("sound", "saved"), ("NaN", "dump")]


@pytest.mark.parametrize(("name", "options"), [full(*c) if c not in SAMPLE else c for c in CASES])
def test_a_program_prints_what_it_prints_without_kedge(
    name: str, options: str, tmp_path: Path
) -> None:
    """Its recording names the device."""
    script = program(name, "sim", tmp_path)
    plain, ours = run(
        tmp_path, [script], ["-m", "kedge", "run", "-o", "it.kedge", *OPTIONS[options], script]
    )

    assert (plain.returncode, ours.returncode) == (0, 0), ours.stderr
    assert plain.stdout in ours.stdout + "\n"
    assert plain.stdout.count("\n") == 8
    assert (
        Recording.open(tmp_path / "it.kedge").manifest["device"] == "sim (simulated accelerator 0)"
    )


@pytest.mark.parametrize("name", PROGRAMS)
def test_findings_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    """Of the same program, with every step measured."""
    scripts = [program(name, device, tmp_path) for device in ("cpu", "sim")]
    done = run(
        tmp_path,
        *[["-m", "kedge", "run", "-o", f"{s}.kedge", *OPTIONS["every step"], s] for s in scripts],
    )
    assert [each.returncode for each in done] == [0, 0]
    here, there = (found(tmp_path, f"{script}.kedge") for script in scripts)
    assert there == here
    assert bool(here) == (name != "sound")


def test_what_is_kept_of_a_nan_is_replayed_on_the_device(tmp_path: Path) -> None:
    """By the script beside its tensors, in a process that has loaded the device."""
    script = program("NaN", "sim", tmp_path)
    options = ["--dump", *OPTIONS["every step"]]
    (ours,) = run(tmp_path, ["-m", "kedge", "run", "-o", "it.kedge", *options, script])
    assert ours.returncode == 0, ours.stderr
    replay = "from tests.accelerator import sim; sim.load(); import runpy; runpy.run_path('it.kedge/dump-20/replay.py', {}, '__main__')"
    (again,) = run(tmp_path, ["-c", replay])
    assert again.stdout.startswith("the model at step 20, forward, on sim:0\n"), (
        again.stdout + again.stderr
    )
    assert "log" in again.stdout


def test_a_program_is_verified(tmp_path: Path) -> None:
    """Outputs, gradients and weights have the same bits with Kedge and without."""
    script = program("sound", "sim", tmp_path)
    (ours,) = run(tmp_path, ["-m", "kedge", "run", "--verify", *OPTIONS["every step"], script])
    assert ours.stdout.startswith(
        "sim.py: 40 steps, 6 parameters, 40 outputs of models: bit-equal with and without watching"
    ), ours.stdout + ours.stderr


def test_sites_of_a_program_are_listed(tmp_path: Path) -> None:
    """With the operations between modules, as on the CPU."""
    scripts = [program("sound", device, tmp_path) for device in ("cpu", "sim")]
    here, there = run(tmp_path, *[["-m", "kedge", "sites", "--ops", script] for script in scripts])
    assert "/relu" in here.stdout
    assert there.stdout.replace("sim.py", "cpu.py") == here.stdout, there.stderr
