"""A kept call is run once more, in a process of its own, to name the operation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kedge.repro.rerun import operations_of, rerun
from tests import forked
from tests.marks import full

pytestmark = pytest.mark.timing

PROGRAM = """
import torch
from torch import nn

BAD = 12


class Chain(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x):
        y = self.fc(x).relu() * 0 + x
        y = torch.log(y)
        y = y * 0.0
        return y + x


class Beside(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        h = self.a(x)
        h = h * torch.cat([x[:, :3], torch.ones(len(x), 1)], 1).sign().prod(1, keepdim=True)
        return self.b(h) + h.square().sum(-1, keepdim=True).sqrt()


class Masked(nn.Module):
    def forward(self, x):
        return x.masked_fill(x.prod(1, keepdim=True) == 0, float("-inf")).softmax(-1)


class Counted(nn.Module):
    def forward(self, x):
        return x * float("nan") if step == BAD else x


if __name__ == "__main__":
    torch.manual_seed(0)
    model = nn.Sequential(nn.Identity(), MIDDLE(), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for step in range(14):
        x = torch.rand(2, 4) + 0.5
        if step == BAD:
            x[0, 0] = 0.0
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
"""


def run(folder: Path, middle: str, *options: str) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Watch the program and give the events and the finding."""
    (folder / "train.py").write_text(PROGRAM.replace("MIDDLE", middle))
    kedge = [sys.executable, "-m", "kedge"]
    command = [*kedge, "run", "-q", "--dump", *options, "-o", "run.kedge", "train.py"]
    forked.run(command, cwd=folder, check=True, forks=True, ahead=forked.WATCH)
    events = [
        json.loads(line)
        for line in (folder / "run.kedge" / "events.jsonl").read_text().splitlines()
    ]
    checked = forked.run([*kedge, "check", "--json", "run.kedge"], cwd=folder, forks=True)
    (birth,) = [f for f in json.loads(checked.stdout)["findings"] if f["code"] == "NAN-BORN"]
    return events, birth


def test_the_finding_names_the_operation_and_its_line(tmp_path: Path) -> None:
    """Of a chain inside one forward it is not the last one that is named, but the one that made it first."""
    events, birth = run(tmp_path, "Chain", "--budget", "none")

    (named,) = [e for e in events if e["kind"] == "operation"]
    assert [(o["site"], o["value"], o["text"]) for o in named["operations"]] == [
        ("1/log:out", "inf", "y = torch.log(y)"),
        ("1/mul#1:out", "nan", "y = y * 0.0"),
    ]
    assert birth["evidence"]["operation"]["file"] == "train.py"
    assert (
        'infinities in the operation 1/log:out (train.py:15): "y = torch.log(y)", then NaN in'
        in birth["message"]
    )
    assert "was its last" not in birth["message"]


def test_the_operation_of_a_backward_is_named(tmp_path: Path) -> None:
    """It is the one whose node made it, in the container that holds it beside a child that uses the same tensor."""
    events, birth = run(tmp_path, "Beside", "--budget", "none")

    (dump,) = [e for e in events if e["kind"] == "dump"]
    assert (dump["step"], dump["module"], dump["direction"]) == (12, "1", "backward")
    assert birth["evidence"]["operation"]["site"] == "1/sqrt:in.grad"
    assert birth["evidence"]["dump"]["step"] == 12


def test_a_mask_is_not_what_made_a_nan(tmp_path: Path) -> None:
    """An operation that is asked to fill in infinities makes none; the one that turned them into NaN is named."""
    _, birth = run(tmp_path, "Masked", "--budget", "none")

    assert [o["site"] for o in birth["evidence"]["operations"]] == ["1/softmax:out"]


def test_what_does_not_come_again_has_no_name(tmp_path: Path) -> None:
    """A forward that needs a global of the program fails or goes well when it is run alone: nothing is named, nothing fails."""
    events, birth = run(tmp_path, "Counted", "--budget", "none")

    assert [e["kind"] for e in events if e["kind"] in ("dump", "operation")] == ["dump"]
    assert (birth["site"], "operation" in birth["evidence"]) == ("1:out", False)


def test_another_outcome_than_was_seen_has_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What went wrong in more or fewer elements than were seen is something else."""
    run(tmp_path, "Chain", "--budget", "none")
    dump = tmp_path / "run.kedge" / "dump-12"
    assert len(rerun(dump)) == 2

    monkeypatch.setattr(
        "kedge.repro.rerun._seen", lambda folder: {"nan": 5, "inf": 0, "elements": 8}
    )
    assert rerun(dump) == []


def test_a_folder_that_is_no_dump_names_nothing(tmp_path: Path) -> None:
    """Whatever fails in the other process is a name that is not known."""
    assert operations_of(tmp_path) == []


SURROUNDED = """
import sys
from pathlib import Path

import helper

sys.path.insert(1, Path("beside"))
Path("alive.txt").touch()
"""

HELPER = """
import atexit
import subprocess
import sys

Path = __import__("pathlib").Path
if not Path("alive.txt").exists():
    atexit.register(Path("alive.txt").unlink, missing_ok=True)
else:
    atexit.register(Path("twice.txt").touch)
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"])
print("no end of a line", end="")
sys.stdout.buffer.write(bytes([255, 254]))
"""


def test_what_the_program_does_around_itself_hides_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not its prints, a path that is no string, a process it starts, a handler at exit, or a file in the working folder."""
    program = PROGRAM.replace(
        'if __name__ == "__main__":', f'{SURROUNDED}\nif __name__ == "__main__":', 1
    )
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", program)
    (tmp_path / "helper.py").write_text(HELPER)
    events, _ = run(tmp_path, "Chain", "--budget", "none")

    (named,) = [e for e in events if e["kind"] == "operation"]
    assert [o["site"] for o in named["operations"]] == ["1/log:out", "1/mul#1:out"]
    assert not (tmp_path / "twice.txt").exists()


def test_a_file_in_the_working_folder_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is named as a module that Kedge needs, in a folder that the program does not import from, is left alone."""
    run(tmp_path, "Chain", "--budget", "none")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "safetensors.py").write_text("open('run.txt', 'w')")
    monkeypatch.chdir(tmp_path / "elsewhere")

    assert len(operations_of(tmp_path / "run.kedge" / "dump-12")) == 2
    assert not Path("run.txt").exists()


def test_a_process_that_nobody_waits_for_ends_by_itself(tmp_path: Path) -> None:
    """If the program is killed while the call is run again, that takes no longer than it may."""
    (tmp_path / "replay.py").write_text("import time\n\ntime.sleep(600)\n")
    text = f"import sys, kedge.repro.rerun as r; r.PATIENCE = 0.5; sys.argv = ['', {str(tmp_path)!r}]; r.main()"
    ended = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, timeout=60, check=False
    )

    assert ended.returncode == 1
    assert b"Timeout" in ended.stderr


SHORT = """
import torch
from torch import nn


class Bad(nn.Module):
    def forward(self, x):
        return x * float("nan") if step == 353 else x


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), Bad(), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(400):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("budget", [full("3%"), "0.1%"])
def test_a_dump_bears_the_true_step_also_in_a_step_that_was_not_measured(
    budget: str, tmp_path: Path, monkeypatch
) -> None:
    """The step is counted whether it was measured or not, and the finding is that of the dump."""
    monkeypatch.setattr(sys.modules[__name__], "PROGRAM", SHORT)
    events, birth = run(tmp_path, "Bad", "--budget", budget)

    assert [(e["step"], e["site"]) for e in events if e["kind"] == "dump"] == [(353, "2:out")]
    assert next(e for e in events if e["kind"] == "end")["levels"]["guarded"] > 0
    assert (birth["site"], birth["step"], birth["severity"]) == ("2:out", 353, "error")
    assert birth["evidence"]["dump"]["folder"] == "dump-353"
