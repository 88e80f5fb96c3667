"""What is written of unusual loops: each step once, at the level it had, with the values that a program sees itself."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.rules.registry import check
from kedge.watch.steps.budget import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import Memory, descend, net, norm, watched

Paced = Callable[..., None]
LIGHT = [(StepKind.GUARDED,), (StepKind.SKIPPED,)]


def silent(log: Memory) -> dict[str, str]:
    """Read the ledger: what never fired, and why."""
    (ledger,) = [e for e in log.events if e["kind"] == "ledger"]
    return {entry["site"]: entry["cause"] for entry in ledger["sites"]}


def full_steps(log: Memory) -> set[int]:
    """List the steps that were written in full."""
    return set(log.steps(2))


def test_the_rows_of_a_gan_are_of_whole_rounds(paced: Paced) -> None:
    """The optimizer that steps last ends the step: each row holds all calls of a round, and only measured steps have one."""
    paced(StepKind.GUARDED, StepKind.MEASURED)
    generator, critic = net(), nn.Linear(2, 1)

    def program(watch: Watcher) -> None:
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (generator, critic))
        for _ in range(6):
            theirs.zero_grad()
            with torch.no_grad():
                fake = generator(torch.randn(5, 4))
            real = critic(torch.randn(5, 2))
            (critic(fake).mean() - real.mean()).backward()
            theirs.step()
            ours.zero_grad()
            critic(generator(torch.randn(5, 4))).mean().backward()
            ours.step()

    log = watched(program)
    recording = log.recording()
    assert log.watch.summary.steps == 6
    assert recording.rows("Linear:out").step.tolist() == [0, 2, 4] == sorted(full_steps(log))
    assert recording.rows("Linear:out").calls.tolist() == [3, 3, 3]
    for site in ("0.weight:update", "Linear.weight:update"):
        assert recording.rows(site).step.tolist() == [0, 2, 4], site
    assert recording.rows("loss").step.tolist() == recording.rows("loss_2").step.tolist() == list(range(6))


@pytest.mark.parametrize("levels", LIGHT)
def test_what_is_called_between_steps_that_are_measured_is_never_called_unused(
    levels: tuple[StepKind, ...], paced: Paced
) -> None:
    """A module whose calls no measured step saw is not in the ledger, whether it trains, evaluates or is called alone."""
    paced(*levels)

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.usual, self.late, self.alone, self.evaluated = (nn.Linear(4, 4) for _ in range(4))
            self.unused = nn.Linear(4, 4)

        def forward(self, x: Tensor, *, late: bool = False) -> Tensor:
            x = self.usual(x)
            if not self.training:
                return self.evaluated(x)
            return self.late(x) if late else x

    model = Many()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(6):
            optimizer.zero_grad()
            out = model(torch.randn(5, 4), late=step == 3)
            out = model.alone(out) if step == 4 else out
            out.mean().backward()
            optimizer.step()
            with torch.no_grad():
                model.eval()(torch.randn(5, 4))
            model.train()

    found = silent(watched(program))
    assert {site for site in found if site.endswith(":out")} == {"unused:out"}
    assert {site.partition(".")[0] for site in found if "param" in site} == {"unused", "evaluated"}


@pytest.mark.parametrize("levels", [(StepKind.GUARDED,), (StepKind.MEASURED,)])
def test_a_nan_after_an_error_in_mid_step_is_found_where_it_is_born(levels: tuple[StepKind, ...], paced: Paced) -> None:
    """What an interrupted forward left behind is neither taken for the next one's, nor in its way."""
    paced(*levels)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), Failing(), nn.Linear(4, 2))

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(8):
            optimizer.zero_grad()
            x = torch.randn(5, 4)
            for kind in (KeyboardInterrupt, ValueError):
                model[3].error = kind
                with pytest.raises(kind):
                    model(x)
            model[3].error = None
            if step == 5:
                with torch.no_grad():
                    model[2].weight[0, 0] = float("inf")
            model(x).mean().backward()
            optimizer.step()

    log = watched(program)
    assert log.watch is not None
    assert not log.watch.failed
    assert log.watch.summary.steps == 8
    (first, *_) = [f for f in check(log.recording()) if f.code == "NAN-BORN"]
    assert (first.site, first.step) == ("2.weight:param", 5)


class Failing(nn.Module):
    """Raises if it is told so."""

    error: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("level", [StepKind.GUARDED, StepKind.MEASURED])
def test_threads_with_a_model_each_are_told_apart(level: StepKind, paced: Paced) -> None:
    """Forwards of two threads that run at once do not mix: a NaN in the one is not looked for in the other."""
    paced(level)
    turns = threading.Barrier(2)
    models = [nn.Sequential(nn.Linear(4, 4), Meeting(turns), nn.Linear(4, 2)) for _ in range(2)]

    def work(number: int) -> None:
        for step in range(4):
            scale = float("nan") if number == 1 and step == 3 else 1.0
            models[number](torch.randn(5, 4) * scale).mean().backward()

    def program(watch: Watcher) -> None:
        for model in models:
            model[1].turns = None
            descend(model, 2)
            model[1].turns = turns
        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    log = watched(program)
    assert log.watch is not None
    assert not log.watch.failed
    sites = {f.site for f in check(log.recording()) if f.code == "NAN-BORN"}
    assert sites == {"Sequential:in"}


class Meeting(nn.Module):
    """Waits for another thread in the middle of a forward."""

    def __init__(self, turns: Any) -> None:
        super().__init__()
        self.turns = turns

    def forward(self, x: Tensor) -> Tensor:
        if self.turns is not None:
            self.turns.wait(timeout=30)
        return x * 1.0


def test_a_loop_that_is_a_generator_may_be_left_half_way(paced: Paced) -> None:
    """Two trainings in turn, as generators: each forward is of its own model, and what is left unfinished ends nothing."""
    paced(StepKind.GUARDED, StepKind.MEASURED)

    def training(model: nn.Module) -> Iterator[None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        while True:
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4)).mean()
            yield
            loss.backward()
            optimizer.step()

    def program(watch: Watcher) -> None:
        pair = [training(net()), training(net())]
        for _ in range(7):
            for each in pair:
                next(each)
        for each in pair:
            each.close()

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.steps == 6
    assert not log.watch.failed
    assert silent(log) == {}


def test_what_a_second_optimizer_trains_is_watched_from_its_next_step(paced: Paced) -> None:
    """It may come late, in a guarded step; its model's values are those that it has in the step to which they are put down."""
    paced(StepKind.GUARDED, StepKind.MEASURED)
    first, second, outs = net(), nn.Sequential(nn.Linear(4, 2), nn.ReLU()), []

    def program(watch: Watcher) -> None:
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (first, second))
        for step in range(6):
            for model, optimizer in ((first, ours), (second, theirs))[: 1 + (step >= 2)]:
                optimizer.zero_grad()
                out = model(torch.randn(5, 4))
                outs.append((step, model is second, out.detach()))
                out.square().mean().backward()
                optimizer.step()

    log = watched(program)
    recording, summary = log.recording(), log.watch.summary
    assert summary.steps == 6
    assert sum(summary.levels.values()) == 6
    rows = recording.rows("Sequential.1:out")
    assert rows.step.tolist() == [4]
    seen = {step + 1: norm(out) ** 2 for step, other, out in outs if other}
    for step, value in zip(rows.step.tolist(), rows.sumsq.tolist(), strict=True):
        assert value == pytest.approx(seen[step], rel=1e-5)
    assert set(rows.step.tolist()) <= full_steps(log)
    assert len(full_steps(log)) == summary.sampled
