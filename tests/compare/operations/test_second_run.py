"""``kedge diff --deep``: recorded programs run again, and what is said if they cannot or are others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.store.writing.folder import create
from tests import forked
from tests.compare.stories import Story, from_step

PROGRAM = """
import argparse
import torch
from torch import nn
from torch.nn import functional as F

options = argparse.ArgumentParser()
options.add_argument("--rate", type=float, default=0.1)
options.add_argument("--lr", type=float, default=0.1)
options = options.parse_args()

torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, x, step):
        h = self.first(x)
        if step >= 2:
            h = F.dropout(h, options.rate)
        return self.last(h)


net = Net()
optimizer = torch.optim.SGD(net.parameters(), options.lr)
x, y = torch.randn(16, 4), torch.randint(0, 2, (16,))
SEED
for step in range(4):
    optimizer.zero_grad()
    F.cross_entropy(net(x, step), y).backward()
    optimizer.step()
    open(f"step{step}.txt", "w").close()
raise SystemExit("the end")
"""
LINE = 1 + PROGRAM.splitlines().index("            h = F.dropout(h, options.rate)")


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., str]:
    """Record the program with some options, and return the recording."""

    def run(name: str, *options: str, seed: str = "") -> str:
        (tmp_path / "train.py").write_text(PROGRAM.replace("SEED", seed))
        words = ["run", "-q", "--every", "1", "--budget", "none", "-o", name, "train.py", *options]
        command = [sys.executable, "-m", "kedge", *words]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        forked.run(command, cwd=tmp_path, env=environment, forks=True, ahead=forked.WATCH)
        return str(tmp_path / name)

    return run


def deep(a: str, b: str, *options: str) -> Any:
    """Compare two recordings with second runs, in a process of its own; return the JSON object."""
    command = [sys.executable, "-m", "kedge", "diff", a, b, "--deep", "--json", *options]
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    ended = subprocess.run(
        command, text=True, capture_output=True, check=False, env=environment, timeout=300
    )
    assert ended.returncode == 1, ended.stderr
    return json.loads(ended.stdout), ended.stderr


def test_an_operation_of_a_later_step(record: Callable[..., str], tmp_path: Path) -> None:
    """Both programs run again with their options, in their folder, up to that step and no further."""
    a, b = record("a.kedge"), record("b.kedge", "--rate", "0.3")
    for file in tmp_path.glob("step*.txt"):
        file.unlink()
    found, said = deep(a, b)

    assert found["first"]["step"] == 2
    operation = found["operation"]
    assert operation["how"] == "argument"
    assert operation["arguments"] == [{"name": "p", "a": "0.1", "b": "0.3"}]
    for side in "ab":
        assert operation[side] == [
            {
                "name": "dropout",
                "module": "",
                "file": "train.py",
                "line": LINE,
                "text": "h = F.dropout(h, options.rate)",
            }
        ]
    assert "seen in second runs up to step 2, equal to the recorded ones" in operation["evidence"]
    assert operation["written"] == ["step0.txt", "step1.txt"]
    assert not (tmp_path / "step2.txt").exists()
    assert f"[kedge] running train.py --rate 0.3 of {b} again, up to step 2" in said
    assert "for 4 steps)" in said


def test_a_run_that_is_not_repeated_accuses_nothing(record: Callable[..., str]) -> None:
    """Without a seed the second run is another one."""
    a, b = record("a.kedge", seed="torch.seed()"), record("b.kedge", seed="torch.seed()")
    found, _ = deep(a, b, "-q")

    operation = found["operation"]
    assert operation["how"] == "not-repeated"
    assert operation["headline"] == "no operation is named: the second run of A is another run"
    assert "differs from the recorded one at step 2; set all seeds" in operation["evidence"]
    assert operation["a"] == operation["b"] == []


def test_an_imported_file_that_was_changed_since(
    record: Callable[..., str], tmp_path: Path
) -> None:
    """The second run is another one, and the file is named that was written since."""
    layers = tmp_path / "layers.py"
    recordings = []
    for number, (name, rate) in enumerate((("a.kedge", "0.1"), ("b.kedge", "0.3"))):
        layers.write_text(
            f"from torch.nn.functional import dropout\n\n\ndef drop(layer, _, h):\n    return dropout(h, {rate})\n"
        )
        later = layers.stat().st_mtime + 10 * number  # Python compiles it again
        os.utime(layers, (later, later))
        recordings.append(
            record(name, seed="import layers; net.first.register_forward_hook(layers.drop)")
        )
    found, _ = deep(*recordings, "-q")

    operation = found["operation"]
    assert operation["how"] == "not-repeated"
    assert "layers.py was written after the recorded run had begun" in operation["evidence"]


def test_updates_need_no_second_run(record: Callable[..., str]) -> None:
    """Where they differ after the backward pass, no program is run."""
    found, said = deep(record("a.kedge"), record("b.kedge", "--lr", "0.2"))

    assert found["operation"]["how"] == "not-seen"
    assert "they differ after the backward pass" in found["operation"]["headline"]
    assert "running" not in said


def test_a_program_that_is_gone_or_changed(
    record: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is not run, and the message says why."""
    a = record("a.kedge")
    train = tmp_path / "train.py"
    train.write_text(train.read_text() + "\n# changed\n")
    assert main(["diff", a, a, "--deep"]) == 2
    assert capsys.readouterr().err == (
        f"kedge: cannot run the program of {a} again: {train} was changed since; "
        "record both runs again, or bring the file back\n"
    )

    train.unlink()
    assert main(["diff", a, a, "--deep"]) == 2
    assert f"{train} is not there any more" in capsys.readouterr().err

    moved = tmp_path / "elsewhere"
    moved.mkdir()
    shutil.move(a, moved)
    manifest = moved / "a.kedge" / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "folder": str(tmp_path / "gone")}))
    assert main(["diff", str(moved / "a.kedge"), str(moved / "a.kedge"), "--deep"]) == 2
    assert f"its folder {tmp_path / 'gone'} is not there" in capsys.readouterr().err


def test_a_recording_without_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of kedge.watch, or of several ranks, cannot be run again."""
    manifest = {"kedge": "0.1.0", "command": ["train.py"], "torch": "2.13.0"}
    for name, more in (("a", {}), ("b", {"folder": str(tmp_path), "world": 2, "rank": 0})):
        with create(tmp_path / f"{name}.kedge", {**manifest, **more}, force=False) as writer:
            Story(factor=from_step(2, 2.0, "mid:out")).write(writer)
    a, b = (str(tmp_path / f"{name}.kedge") for name in "ab")

    assert main(["diff", a, a, "--deep"]) == 2
    assert "the recording has no folder to run it in" in capsys.readouterr().err
    assert main(["diff", b, b, "--deep"]) == 2
    assert "it ran as 2 ranks; --deep runs one process" in capsys.readouterr().err
