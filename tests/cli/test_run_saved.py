"""``kedge run --saved``: the account of a step is in the recording, and the program computes what it does without."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kedge.cli.main import main
from kedge.store.events import SavedEvent, event_from
from tests.cli.serving import Server

Kedge = Callable[..., subprocess.CompletedProcess[str]]
Script = Callable[..., str]

HEAD = """
import warnings
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 4))
    def forward(self, x):
        return self.body(x)

model, loss_fn = Net(), nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x, y = torch.randn(512, 8), torch.randint(0, 4, (512,))

def step(out):
    loss = loss_fn(out, y) + out.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

def tell():
    print([p.double().sum().item() for p in model.parameters()], torch.rand(2).tolist())
"""

#: What a program does, and the source that follows `HEAD`.
PROGRAMS = {
    "a plain loop": "for _ in range(3): step(model(x))\ntell()",
    "several micro-batches": """
for _ in range(3):
    optimizer.zero_grad()
    for part, target in zip(x.chunk(4), y.chunk(4)):
        loss_fn(model(part), target).backward()
    optimizer.step()
tell()
""",
    "its own pair around the model": """
for _ in range(3):
    with torch.autograd.graph.save_on_cpu():
        out = model(x)
    step(out)
print(torch._C._autograd._top_saved_tensors_default_hooks(True))
tell()
""",
    "its own pair around the step": """
for _ in range(3):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        step(model(x))
print(torch._C._autograd._top_saved_tensors_default_hooks(True))
tell()
""",
    "checkpoints of both kinds": """
for reentrant in (False, True, False):
    step(checkpoint(model, x.clone().requires_grad_(), use_reentrant=reentrant))
tell()
""",
    "transforms of torch.func": """
for _ in range(3):
    step(model(x))
    params = dict(model.named_parameters())
    found = torch.func.grad(lambda p: torch.func.functional_call(model.body[0], p, (x,)).sum())(
        {n: p.detach() for n, p in model.body[0].named_parameters()}
    )
    print(found["bias"].sum().item())
tell()
""",
    "warnings that are errors": "warnings.simplefilter('error')\nfor _ in range(3): step(model(x))\ntell()",
    "backward twice, and second order": """
out = model(x)
grads = torch.autograd.grad(out.square().mean(), list(model.parameters()), create_graph=True)
loss = sum(g.square().sum() for g in grads)
loss.backward(retain_graph=True)
loss.backward()
optimizer.step()
tell()
""",
    "no optimizer": """
for _ in range(3):
    model(x).sum().backward()
    for p in model.parameters():
        p.data -= 0.01 * p.grad
        p.grad = None
tell()
""",
    "a first pass without gradients": """
with torch.no_grad():
    model(x)
for _ in range(3): step(model(x))
tell()
""",
    "keyword arguments and a model that ends with an error": """
class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = model
    def forward(self, *, data, fail=False):
        out = self.inner(data)
        if fail:
            raise ValueError("as it should")
        return out
wrapped = Wrapped()
try:
    wrapped(data=x, fail=True)
except ValueError as error:
    print(error)
for _ in range(2): step(wrapped(data=x))
tell()
""",
}


SAVED = ["run", "--saved", "-o", "it.kedge", "prog.py"]


def event_of(folder: Path) -> Mapping[str, Any]:
    """Read the one event about saved tensors that has everything."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    (found,) = [event for event in events if event["kind"] == "saved" and "total" in event]
    return found


@pytest.mark.parametrize("what", PROGRAMS)
def test_the_program_computes_the_same_bits(what: str, server: Server, tmp_path: Path) -> None:
    """With ``--saved`` a program prints the very numbers that it prints without Kedge, and the account is made."""
    plain = server.run(HEAD + PROGRAMS[what], tmp_path / "plain", None)
    done = server.run(HEAD + PROGRAMS[what], tmp_path / "ours", SAVED)

    assert (done.status, plain.status) == (0, 0), done.stderr + plain.stderr
    assert done.stdout == plain.stdout
    assert "not" not in done.stderr.replace("no findings", "").replace(
        "could not judge", ""
    ).replace("NOT-", "")
    event = event_of(tmp_path / "ours" / "it.kedge")
    assert event["bytes"] == event["total"]["bytes"] > 0
    assert event["seconds"] > 0


def test_an_in_place_change_is_refused_as_without_kedge(server: Server, tmp_path: Path) -> None:
    """What autograd refuses, and PyTorch lets pass where saved-tensor hooks are in force, is refused with ``--saved`` too."""
    source = (
        HEAD + "\nout = model(x)\nz = out.exp()\nloss = (z * 2).sum()\nz.add_(1)\nloss.backward()\n"
    )
    plain = server.run(source, tmp_path / "plain", None)
    done = server.run(source, tmp_path / "ours", SAVED)
    said = [line for line in plain.told if line.startswith("RuntimeError")]

    assert done.status == plain.status == 1
    assert said[0].partition("Hint")[0] in done.stderr


def test_a_program_that_hooks_a_saved_tensor_itself_goes_on(server: Server, tmp_path: Path) -> None:
    """PyTorch allows one pair of hooks for a saved tensor: the program's is registered, and Kedge says that it lists none."""
    source = (
        HEAD
        + "\nout = model(x).exp()\nout.grad_fn._raw_saved_result.register_hooks(lambda t: t * 2, lambda t: t / 2)\n"
        "out.sum().backward()\ntell()\n"
    )
    plain = server.run(source, tmp_path / "plain", None)
    done = server.run(source, tmp_path / "ours", SAVED)

    assert (done.status, plain.status) == (0, 0), done.stderr + plain.stderr
    assert done.stdout == plain.stdout
    line = source.splitlines().index("out = model(x).exp()") + 2
    assert f"saved tensors are not listed: prog.py:{line} uses _raw_saved_" in done.stderr


@pytest.fixture
def recorded_account(server: Server, tmp_path: Path) -> Path:
    """A recording with an account."""
    assert server.run(HEAD + PROGRAMS["a plain loop"], tmp_path / "run", SAVED).status == 0
    return tmp_path / "run" / "it.kedge"


def test_the_whole_step_is_in_the_account(recorded_account: Path) -> None:
    """Modules, loss modules and functional losses have their bytes; lines, remedies, the largest tensors and the peak stand there."""
    event = event_of(recorded_account)
    saved = event_from(event)
    assert isinstance(saved, SavedEvent)
    account = saved.account
    held = {sums.path: sums.bytes for sums in account.modules}

    assert {"body.1", "body.3", "loss_fn", None} <= set(held)
    assert sum(held.values()) == event["bytes"]
    assert event["step"] == 0
    assert account.inputs == 512 * 8 * 4 + 512 * 8  # the data, and the loss's target
    assert account.parameters == 64 * 4 * 4
    assert {line.text for line in account.lines} >= {
        "return self.body(x)",
        "loss = loss_fn(out, y) + out.square().mean()",
    }
    assert {sums.path for sums in account.tree} >= {"", "body", "loss_fn", None}
    assert account.total.rebuild > 0
    assert account.course.peak == event["bytes"] == max(account.course.bytes)
    assert account.course.bytes[-1] == 0
    assert account.items[0]["shape"] == [512, 64]
    assert {item["node"] for item in account.items} >= {"GeluBackward0", "LogSoftmaxBackward0"}


def test_the_report_has_its_tables(
    recorded_account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``kedge report --saved`` shows totals, modules, lines and the course of the step."""
    assert main(["report", "--saved", str(recorded_account)]) == 0
    out = capsys.readouterr().out

    assert "step 0, at its peak" in out
    assert "can be rebuilt exactly" in out
    assert any(line.startswith("body.1 ") for line in out.splitlines())
    assert "return self.body(x)" in out
    assert "over the step" in out
    assert max(map(len, out.splitlines())) <= 100


def test_without_the_option_what_every_run_counts_is_shown(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run without ``--saved`` has the bytes by module alone, and the report says how to have more."""
    words = [word for word in SAVED if word != "--saved"]
    assert server.run(HEAD + PROGRAMS["a plain loop"], tmp_path / "run", words).status == 0
    assert main(["report", "--saved", str(tmp_path / "run" / "it.kedge")]) == 0
    out = capsys.readouterr().out

    assert "body.1" in out
    assert "kedge run --saved" in " ".join(out.split())
    assert "checkpoint" not in out


def test_the_page_leaves_the_source_out_if_asked(
    recorded_account: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--no-source`` keeps the lines of the program, and where they are, out of the page."""
    page = recorded_account.with_name("it.html")
    main(["report", "--html", str(recorded_account)])
    assert "return self.body(x)" in page.read_text(encoding="utf-8")
    main(["report", "--html", "--no-source", str(recorded_account)])

    assert "return self.body(x)" not in page.read_text(encoding="utf-8")
    assert "prog.py:" not in page.read_text(encoding="utf-8")


def test_a_verified_run_makes_the_account_as_well(
    kedge: Kedge, script: Script, tmp_path: Path
) -> None:
    """``--verify --saved`` compares the program with the one of which the account is made."""
    (tmp_path / script("")).write_text(HEAD + PROGRAMS["a plain loop"])
    done = kedge("run", "--verify", "--saved", "train.py")

    assert done.returncode == 0, done.stderr + done.stdout


@pytest.mark.parametrize("words", [["--html"], ["--headroom"], ["--sites", "x"]])
def test_the_table_stands_alone(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """``--saved`` does not go with what has no use for it, and says so."""
    with pytest.raises(SystemExit):
        main(["report", "x.kedge", "--saved", *words])

    assert "a table of its own" in capsys.readouterr().err
