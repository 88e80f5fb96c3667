"""``kedge run --on``: a program is stopped, told, spared a step, or kept, at a finding."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.rules.registry import check
from kedge.store.events import SnapshotEvent, StepSkippedEvent
from kedge.store.recording import Recording
from tests.cli.test_run import python

pytestmark = pytest.mark.timing

Kedge = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

#: The third step is bad; every error is caught, as servers and notebooks do, and the end is told.
TRAIN = """
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def train():
        for step in range(20):
            x = torch.randn(16, 4)
            if step == 13:
                x[0, 0] = float("inf")
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            print("sum", step, sum(p.double().sum() for p in model.parameters()).item())
            optimizer.step()

    try:
        train()
    except Exception as error:
        print("caught", type(error).__name__, error.finding.code, error.finding.step)
    finally:
        print("over")
"""


def test_stop_ends_the_program_with_3_and_a_whole_recording(
    kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """Its output up to there is that of a program that is not watched, and ``finally`` is run."""
    name = script(TRAIN)

    done = kedge("run", "-o", "it.kedge", "--on", "nan-born=stop", name)

    lines = python(tmp_path, name).stdout.splitlines()
    assert done.returncode == 3
    assert done.stdout.splitlines() == [*lines[:14], "over"]
    stopped, _, found, line, kept, _ = done.stderr.splitlines()
    assert re.match(
        r"\[kedge\] stopped before the optimizer's step 13 \(NAN-BORN: .*step 13", stopped
    )
    assert found.startswith("[kedge] 1 error: NAN-BORN at ")
    assert re.match(r"\[kedge\] \S+:\d+", line)
    assert kept.startswith("[kedge] kept step 13; run one again with: kedge replay")
    recording = Recording.open(tmp_path / "it.kedge")
    assert recording.end is not None
    assert (recording.end.exit, recording.end.error) == (3, None)
    assert [finding.step for finding in check(recording) if finding.severity == "error"] == [13]


def test_raise_can_be_caught(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """The program then ends as it likes."""
    done = kedge("run", "-o", "it.kedge", "--on", "NAN-BORN=raise", script(TRAIN))

    assert done.returncode == 0
    assert done.stdout.splitlines()[-2:] == ["caught FindingRaised NAN-BORN 13", "over"]


def test_a_raised_finding_that_nobody_catches_is_a_traceback(kedge: Kedge, script: Script) -> None:
    """The last line says what was found, and the exit status is Python's."""
    loud = TRAIN.replace("except Exception as error", "except KeyError as error")

    done = kedge("run", "-o", "it.kedge", "--on", "error=raise", script(loud))

    assert done.returncode == 1
    assert "    optimizer.step()\n" in done.stderr
    assert "kedge.errors.FindingRaised: NAN-BORN: " in done.stderr


def test_skipped_steps_are_counted_and_noted(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """The program runs to its end with finite parameters."""
    done = kedge("run", "-o", "it.kedge", "--on", "NAN-BORN=skip", script(TRAIN))

    assert done.returncode == 0
    sums = [line for line in done.stdout.splitlines() if line.startswith("sum")]
    assert len(sums) == 20
    assert "nan" not in done.stdout
    assert sums[13].split()[2] == sums[14].split()[2]
    assert "[kedge] skipped 1 optimizer step in all, for NAN-BORN\n" in done.stderr
    (event,) = Recording.open(tmp_path / "it.kedge").of(StepSkippedEvent)
    assert event.step == 13


def test_a_snapshot_is_kept_and_the_program_ends_as_it_would(
    kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """Its output is the same, and ``kedge check`` names the folder; a second order may stop it there."""
    name = script(TRAIN)

    done = kedge("run", "-o", "it.kedge", "--on", "NAN-BORN=snapshot", name)
    both = ("--on", "NAN-BORN=snapshot", "--on", "NAN-BORN=stop")
    stopped = kedge("run", "-o", "both.kedge", *both, name)

    assert done.stdout == python(tmp_path, name).stdout
    assert "[kedge] kept the program's state before the optimizer's step 13" in done.stderr
    checked = " ".join(kedge("check", "it.kedge").stdout.split())
    assert "The program's state is kept in snapshot-13." in checked
    assert stopped.returncode == 3
    assert "The program's state is kept in snapshot-13 (" not in stopped.stderr
    for recorded in ("it.kedge", "both.kedge"):
        (event,) = Recording.open(tmp_path / recorded).of(SnapshotEvent)
        assert (tmp_path / recorded / event.folder / "optimizer.safetensors").exists()


@pytest.mark.parametrize("action", ["stop", "raise", "skip", "snapshot", "snapshot,skip"])
def test_orders_change_no_bit_of_a_sound_run(
    action: str, kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """Nor does judging, which runs while the program does."""
    sound = script(TRAIN.replace("step == 13", "step < 0").replace("range(20)", "range(200)"))
    also = ("--on", "SPIKE=snapshot")

    done = kedge("run", "-q", "-o", "it.kedge", "--on", f"NAN-BORN={action}", *also, sound)

    assert done.stdout == python(tmp_path, sound).stdout
    assert (done.returncode, done.stderr) == (0, "")


def test_a_project_orders_for_all_its_runs(kedge: Kedge, script: Script, tmp_path: Path) -> None:
    """In ``[tool.kedge.on]`` of its pyproject.toml, from which the command line may differ."""
    (tmp_path / "pyproject.toml").write_text('[tool.kedge.on]\nNAN-BORN = "stop"\n')
    name = script(TRAIN)

    assert kedge("run", "-o", "it.kedge", name).returncode == 3
    assert kedge("run", "-o", "other.kedge", "--on", "NAN-BORN=raise", name).returncode == 0


@pytest.mark.parametrize(
    ("order", "said"),
    [
        ("NAN-BRON=stop", "kedge: --on NAN-BRON: there is no such rule or severity; the nearest are NAN-BORN"),
        ("NAN-BORN=halt", "kedge: --on NAN-BORN=halt: there is no such action; "),
        ("NAN-BORN", "'NAN-BORN' names no action; write one behind the code, such as NAN-BORN=stop"),
        ("SPIKE=skip", "kedge: --on SPIKE=skip: its findings are known only after the step"),
        ("error=skip", "steps can be skipped for NAN-BORN; for error choose stop, raise or snapshot"),
        ("NAN-BORN=stop,skip", "kedge: --on NAN-BORN: stop and skip exclude each other"),
    ],
)  # fmt: skip
def test_a_wrong_order_is_refused_before_the_program_runs(
    order: str, said: str, kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """With 2, and nothing is written."""
    done = kedge("run", "-o", "it.kedge", "--on", order, script(TRAIN))

    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert not (tmp_path / "it.kedge").exists()
