"""Watching a program that forks, runs threads, or in which Kedge itself fails: it goes on as it would have."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kedge.actions.measure.meter import Meter
from kedge.actions.measure.values import StepValues
from kedge.testing import assert_same_bits
from kedge.watch.models import models as watched_models
from kedge.watch.watcher import Watcher
from tests.marks import full
from tests.threaded import in_threads
from tests.watch.watched import Conv, Memory, descend, images, net, watch, watched


class Net(nn.Module):
    """Convolutions with BatchNorm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.act, self.fc = nn.ReLU(inplace=True), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.act(self.bn(self.conv(x)))).flatten(1))


class Block(nn.Module):
    """One block of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(2, (2, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, 2)
        )
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.mlp(self.n2(x))


class Gpt(nn.Module):
    """A small language model with tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def training(make: Any, batch: Any, optimizer: Any) -> Any:
    """Train 20 steps; return everything that a training leaves behind."""
    torch.manual_seed(7)
    model = make()
    stepper, losses = optimizer(model.parameters()), []
    for step in range(20):
        stepper.zero_grad()
        out = model(batch())
        loss = F.cross_entropy(
            out.flatten(0, -2), torch.zeros(out.shape[:-1], dtype=torch.long).flatten()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        losses.append(loss.detach())
        if step % 7 == 3:
            with torch.no_grad():
                losses.append(model.eval()(batch()).sum())
            model.train()
    return [
        losses,
        list(model.state_dict().values()),
        [p.grad for p in model.parameters()],
        torch.get_rng_state(),
    ]


@pytest.mark.parametrize("every", [full(1), 3, full(100)])
@pytest.mark.parametrize("name", ["cnn", "gpt"])
def test_a_watched_training_has_the_bits_of_an_unwatched_one(name: str, every: int) -> None:
    """Losses, parameters, buffers, gradients and random numbers, after 20 steps with dropout and BatchNorm."""
    cases: dict[str, Any] = {
        "cnn": (Net, images, lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        "gpt": (Gpt, lambda: torch.randint(20, (3, 8)), lambda p: torch.optim.AdamW(p, 0.01)),
    }
    plain, kept = training(*cases[name]), []
    log = watch(lambda: kept.append(training(*cases[name])), every=every)
    assert_same_bits(kept[0], plain)
    assert log.watch.summary.steps == 20
    assert log.recording().rows(":out").step.tolist() == sorted({*range(0, 20, every), 1})
    assert log.recording().rows("loss").step.tolist() == list(range(20))


def test_two_threads_that_train_are_both_watched() -> None:
    """Each thread's model is a root of its own, and nothing of either is lost.

    Both have computed their gradients before either steps: what comes after the last step of the optimizer that counts
    them, as when one thread is done before the other, belongs to no step.
    """
    models = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)]
    meet = threading.Barrier(2)

    def work(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        meet.wait(10)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            meet.wait(10)
            optimizer.step()

    log = watch(lambda: in_threads(*(lambda m=m: work(m) for m in models)), every=1)
    recording = log.recording()
    prefixes = {r["prefix"] for r in log.roots}
    assert len(prefixes - {""}) == 2
    for site in (f"{prefix}.0:out" for prefix in prefixes):
        assert recording.rows(site).calls.sum() == 10
        assert recording.rows(site).count.sum() == 10 * 12


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_writes_nothing() -> None:
    """The recording is the parent's; the child's model runs on, with nothing measured."""
    model, x = Conv(), images()
    told, tell = os.pipe()

    def program() -> None:
        model(x)
        child = os.fork()
        if not child:
            before = len(log.rows)
            model(x)
            nn.Linear(2, 2)(torch.ones(1, 2))
            log.watch.__exit__(None, None, None)
            os.write(tell, b"quiet" if len(log.rows) == before and not log.events else b"wrote")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        model(x)

    log = Memory()
    watch(program, every=1, log=log)
    assert os.read(told, 5) == b"quiet"
    os.close(told)
    os.close(tell)
    assert log.recording().rows(":out").step.tolist() == [0, 1]
    assert len(log.roots) == 1


class Broken(Memory):
    """A log that fails from its second step on."""

    calls = 0

    def stats(self, step: int, columns: Any) -> None:
        self.calls += 1
        if self.calls > 1:
            raise OSError("no room is left")
        super().stats(step, columns)


def test_a_failure_of_kedge_is_reported_once_and_the_program_continues(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing raises in the program, every hook goes, and the bits are the same."""
    case: Any = (Net, images, lambda p: torch.optim.SGD(p, 0.1))
    plain, kept, log = training(*case), [], Broken()
    watch(lambda: kept.append(training(*case)), every=1, log=log)
    assert_same_bits(kept[0], plain)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[kedge] a step cannot be watched: OSError: no room is left (")
    assert line.endswith("); everything else is")
    assert {row["step"] for row in log.rows} == {0}


def test_a_failure_at_the_very_end_leaves_no_hook() -> None:
    """The last write fails after the program has ended: whoever ended the watch learns of it, and nothing is left behind."""
    log, model = Broken(), nn.Linear(2, 2)
    with pytest.raises(OSError, match="no room is left"):
        watch(lambda: [model(torch.ones(1, 2)) for _ in range(2)], every=1, log=log)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_measurement_that_fails_costs_its_own_site_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site is off from there on, and stderr says so whatever the program does with warnings."""
    observe = StepValues.observe

    def fails(values: StepValues, seat: Any, value: Tensor, **options: Any) -> None:
        if seat.site.path == "act" and seat.site.kind == "out":
            raise RuntimeError("cannot measure this")
        observe(values, seat, value, **options)

    monkeypatch.setattr(StepValues, "observe", fails)
    model, log = Conv(), Memory()
    with Watcher(Meter(), log, n=1):
        for _ in range(3):
            model(images())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(
        "[kedge] measure('full') at act:out (pass 0, call 0, float32[5, 4, 4, 4]): RuntimeError: cannot"
    )
    assert log.recording().rows("fc:out").step.tolist() == [0, 1, 2]
    silent = [s["site"] for e in log.events if e["kind"] == "ledger" for s in e["sites"]]
    assert silent == ["act:out"]


def test_what_kedge_failed_with_is_there_to_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is kept with where it came from, and without what went through there."""
    monkeypatch.setattr(watched_models, "module_tree", lambda *_: 1 / 0)
    model = net()
    log = watched(lambda watch: descend(model, 4))
    assert log.watch is not None
    assert isinstance(log.watch.shield.failure, ZeroDivisionError)
    assert log.watch.shield.failure.__traceback__ is None
    assert "in watch" in log.watch.shield.failure.__notes__[0]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "[kedge] the model Sequential cannot be watched: ZeroDivisionError: division by zero (watch/models/"
    )
    assert line.endswith("); everything else is")


class Looped(nn.Module):
    """A network with a reference to itself, and one from a part to the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 1))
        self.me = self
        self.last.whole = self

    def forward(self, x: Tensor) -> Tensor:
        return self.last[0](self.me.first(x).relu())


def test_a_model_that_contains_itself_is_watched() -> None:
    """PyTorch cannot list its modules by all paths, which never end; by their first paths it can."""
    torch.manual_seed(0)
    log = watched(lambda watch: descend(Looped(), 3))
    assert log.watch is not None
    assert not log.watch.failed
    assert log.steps(level=2) == [0, 1, 2]
    assert {"first:out", "last.0:out", "first.weight:param.grad", "last.0.bias:update"} <= set(
        log.texts()
    )
