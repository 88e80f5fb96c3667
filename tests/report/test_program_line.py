"""The program's line that stands beside a finding: that of the fault, or one that says what it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kedge
from kedge.report.findings import render_findings
from kedge.report.program_line import line_of_finding, line_of_site
from kedge.report.terminal import console_for
from kedge.rules.registry import check
from kedge.rules.rule import Finding
from kedge.store.events import LossLinesEvent, OperationLine
from kedge.store.recording import Recording


class Probabilities(nn.Module):
    """A classifier that returns probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x).softmax(1)


class Bounded(nn.Module):
    """A classifier whose logits come from a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x))


def classified(model: nn.Module) -> torch.Tensor:
    """The loss of a classifier."""
    return nn.functional.cross_entropy(model(torch.randn(8, 4)), torch.randint(0, 3, (8,)))


def over_batch(model: nn.Module) -> torch.Tensor:
    """One of a softmax over the batch."""
    scores = torch.log_softmax(model(torch.randn(8, 4)), 0)
    return nn.functional.nll_loss(scores, torch.ones(8).long())


def paired(model: nn.Module) -> torch.Tensor:
    """One that compares each prediction with each target."""
    return nn.functional.mse_loss(model(torch.randn(8, 4))[:, :1], torch.randn(8))


def recorded(model: nn.Module, loss: Any, tmp_path: Path) -> Recording:
    """Train a model in six steps, and return the recording."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with kedge.watch(tmp_path / "run.kedge") as run:
        run.tell = None
        for _ in range(6):
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
    return Recording.open(tmp_path / "run.kedge")


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(
    ("model", "loss", "code", "line"),
    [
        (Probabilities, classified, "DOUBLE-SOFTMAX", "return self.fc(x).softmax(1)"),
        (Bounded, classified, "SQUASHED-LOGITS", "return torch.relu(self.fc(x))"),
        (
            nn.Linear,
            over_batch,
            "DOUBLE-SOFTMAX",
            "scores = torch.log_softmax(model(torch.randn(8, 4)), 0)",
        ),
        (
            nn.Linear,
            paired,
            "PAIRED-TARGETS",
            "return nn.functional.mse_loss(model(torch.randn(8, 4))[:, :1], torch.randn(8))",
        ),
    ],
)
def test_the_line_of_the_fault_is_shown(
    model: Any, loss: Any, code: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line that made the faulty value stands beside the finding, and not the one that calls backward."""
    made = model(4, 3) if model is nn.Linear else model()
    recording = recorded(made, loss, tmp_path)
    (finding,) = [each for each in check(recording) if each.code == code]
    shown = line_of_finding(recording, finding)

    assert shown is not None
    assert (shown.source.text, shown.said) == (line, "")
    assert shown.place.startswith(f"{shown.source.file}:{shown.source.line} in ")
    render_findings(recording, [finding], console_for())
    printed = capsys.readouterr().out
    assert " ".join(line.split()) in " ".join(printed.split())
    assert "loss(model).backward()" not in printed


LOSS = {
    "site": "loss", "path": "loss", "kind": "loss", "root": -1, "shape": [],
    "source": {"file": "train.py", "line": 7, "function": "fit", "text": "loss.backward()"},
}  # fmt: skip
CALLED = {
    "site": "fc:out", "type": "Linear",
    "source": {"file": "train.py", "line": 5, "function": "<module>", "text": "y = fc(x)"},
}  # fmt: skip


def test_a_line_that_is_not_at_fault_says_what_it_is() -> None:
    """Where only the line of the call or of backward is known, it is named as that."""
    recording = Recording.build([LOSS, CALLED, "other:out"])
    said = {}
    for site in ("loss", "fc:out", "other:out", "nowhere:out"):
        shown = line_of_finding(recording, Finding("ODD", "warning", site, 0, "It is odd."))
        said[site] = shown and shown.place

    assert said == {
        "loss": "train.py:7 in fit: backward is called here",
        "fc:out": "train.py:5: Linear is called here",
        "other:out": None,
        "nowhere:out": None,
    }
    assert line_of_site(recording.site("other:out")) is None


def test_a_line_that_the_message_quotes_is_not_repeated() -> None:
    """The message has it already."""
    finding = Finding("ODD", "warning", "fc:out", 0, 'It is called at train.py:5: "y = fc(x)".')
    assert line_of_finding(Recording.build([CALLED]), finding) is None


def test_a_loss_stands_beside_the_line_that_computes_it() -> None:
    """It says more than the line that calls backward, where it was recorded."""
    source = replace(Recording.build([CALLED]).site("fc:out").source, line=6, text="loss = f(y)")
    made = OperationLine(node="MeanBackward0", shape=(), source=source)
    lines = LossLinesEvent(step=1, site="loss", operations=(made,))
    shown = line_of_finding(
        Recording.build([LOSS], events=[lines]), Finding("ODD", "info", "loss", 0, "It is odd.")
    )

    assert shown is not None
    assert shown.entry() == {
        "place": "train.py:6: the loss is computed here",
        "text": "loss = f(y)",
    }
