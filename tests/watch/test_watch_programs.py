"""Watching a program that compiles, forks, runs threads, or in which Kedge itself fails: it goes on as it would have."""

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
from kedge.watch.watcher import Watcher
from tests.threaded import in_threads, replicas_of
from tests.watch.watched import Conv, Memory, images, watch


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
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(2, (2, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, 2))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
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
        loss = F.cross_entropy(out.flatten(0, -2), torch.zeros(out.shape[:-1], dtype=torch.long).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        losses.append(loss.detach())
        if step % 7 == 3:
            with torch.no_grad():
                losses.append(model.eval()(batch()).sum())
            model.train()
    return [losses, list(model.state_dict().values()), [p.grad for p in model.parameters()], torch.get_rng_state()]


@pytest.mark.parametrize("every", [1, 3, 100])
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


@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_is_watched_as_it_is_uncompiled(compiled: Any, backend: str) -> None:
    """Same sites, same figures, same parameters afterwards."""

    def run(*, compiling: bool) -> tuple[Memory, Any]:
        torch.manual_seed(1)
        model = Conv()
        called = compiled(model, backend=backend) if compiling else model

        def program() -> None:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            for _ in range(4):
                optimizer.zero_grad()
                called(images()).square().mean().backward()
                optimizer.step()

        return watch(program, every=3), list(model.state_dict().values())

    (eager, plain), (log, weights) = run(compiling=False), run(compiling=True)
    assert sorted(log.texts()) == sorted(eager.texts())
    assert log.steps(level=2)[-1] == 3
    assert (log.steps(level=1), log.steps(level=2)) == ([], [0, 1, 3])
    for text in ("conv:out", "act:out", ":out", "conv:out.grad", "fc.weight:param.grad", "conv.bias:update"):
        ours, theirs = log.recording().rows(text), eager.recording().rows(text)
        assert ours.sumsq.tolist() == pytest.approx(theirs.sumsq.tolist(), rel=1e-4), text
    torch.testing.assert_close(weights, plain)


def test_two_threads_that_train_are_both_watched() -> None:
    """Each thread's model is a root of its own, and nothing of either is lost."""
    models = [nn.Sequential(nn.Linear(3, 3), nn.ReLU()) for _ in range(2)]
    meet = threading.Barrier(2)

    def work(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        meet.wait(10)
        for _ in range(10):
            optimizer.zero_grad()
            model(torch.randn(4, 3)).square().sum().backward()
            optimizer.step()

    log = watch(lambda: in_threads(*(lambda m=m: work(m) for m in models)), every=1)
    recording = log.recording()
    assert {r["prefix"] for r in log.roots} == {"", "Sequential"}
    for site in ("0:out", "Sequential.0:out"):
        assert recording.rows(site).calls.sum() == 10
        assert recording.rows(site).count.sum() == 10 * 12


def test_replicas_are_one_model() -> None:
    """What `DataParallel` makes for one call is measured as the model it was made of, and is no root."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        for _ in range(3):
            optimizer.zero_grad()
            outs: list[Tensor] = []
            in_threads(*(lambda r=r, o=outs: o.append(r(torch.randn(4, 3))) for r in replicas_of(model, 2)))
            torch.cat(outs).sum().backward()
            optimizer.step()

    log = watch(program, every=1)
    rows = log.recording().rows("0:out")
    assert len(log.roots) == 1
    assert (rows.step.tolist(), rows.calls.tolist(), rows.count.tolist()) == (
        [0, 1, 2, 3],
        [1, 2, 2, 2],
        [6, 24, 24, 24],
    )


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


def test_a_failure_of_kedge_is_told_once_and_the_program_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing raises in the program, nothing more is measured, every hook goes, and the bits are the same."""
    case: Any = (Net, images, lambda p: torch.optim.SGD(p, 0.1))
    plain, kept, log = training(*case), [], Broken()
    watch(lambda: kept.append(training(*case)), every=1, log=log)
    assert_same_bits(kept[0], plain)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[kedge] watching failed: OSError: no room is left (")
    assert line.endswith("); it stops here, and the program goes on")
    assert log.calls == 2
    assert {row["step"] for row in log.rows} == {0}


def test_a_failure_at_the_very_end_leaves_no_hook() -> None:
    """The last write fails after the program has ended: whoever ended the watch is told, and nothing stays."""
    log, model = Broken(), nn.Linear(2, 2)
    with pytest.raises(OSError, match="no room is left"):
        watch(lambda: [model(torch.ones(1, 2)) for _ in range(2)], every=1, log=log)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_a_measurement_that_fails_costs_its_own_site_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One site is off from there on, which is told on stderr whatever the program does with warnings."""
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


class Drops(nn.Module):
    """Uses a dropout's probability without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.fc(x), self.drop.p, self.training)


def test_the_ledger_says_why_also_where_the_model_is_gone() -> None:
    """A function that has returned has left no model behind, and yet what it did with its parts is told."""
    log = watch(lambda: nn.Sequential(Drops(), Drops())(torch.ones(1, 2)).sum().backward())
    (event,) = [event for event in log.events if event["kind"] == "ledger"]

    assert [(s["site"], s["cause"], s["remedy"]) for s in event["sites"]] == [
        (f"{i}.drop:out", "bypassed: Drops uses its p without calling it", f'hook "{i}" instead') for i in (0, 1)
    ]


class PassesBy(nn.Module):
    """Reads settings of a container, and calls what it holds, as an adapter's wrapper does."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Sequential(nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base[0](x) if self.base.training else x


def test_a_container_that_is_passed_by_was_not_computed_by_another() -> None:
    """What it holds was called, whatever else of it is read."""
    log = watch(lambda: PassesBy()(torch.ones(1, 2)).sum().backward())
    (event,) = [event for event in log.events if event["kind"] == "ledger"]
    ((site, cause),) = [(s["site"], s["cause"]) for s in event["sites"]]

    assert site == "base:out"
    assert cause.startswith("never called itself, though what it holds was")


def test_the_ledger_says_what_never_fired_and_why() -> None:
    """A module that was never called is written down with its cause and a remedy."""
    model = Conv()
    model.spare = nn.Linear(2, 2)
    log = watch(lambda: model(images()).sum().backward())
    (event,) = [event for event in log.events if event["kind"] == "ledger"]
    entry = next(s for s in event["sites"] if s["site"] == "spare:out")
    assert (event["kind"], entry["fired"]) == ("ledger", 0)
    assert entry["cause"].startswith("never called")
    assert entry["remedy"]
