"""The ledger: what never fired in a run, whichever of its steps were measured, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import (
    GUARDED,
    MEASURED,
    MIXED,
    SKIPPED,
    Conv,
    Paced,
    batch,
    images,
    names,
    net,
    silent,
    watch,
    watched,
)


def critic_first(watch: Watcher) -> Any:
    """Train a generator in some steps of its critic alone; one parameter is used in none."""
    generator, critic = net(), nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1))
    critic.append(nn.Identity())
    generator.unused = nn.Parameter(torch.ones(3))
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.01) for m in (generator, critic))
    for step in range(6):
        theirs.zero_grad()
        critic[:2](critic(generator(batch()).detach())[:, [0, 0]]).mean().backward()
        theirs.step()
        if step > 1:
            ours.zero_grad()
            critic(generator(batch())).mean().backward()
            ours.step()
    return generator, critic


class Many(nn.Module):
    """Holds layers that are called in one step, alone, in evaluation, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.usual, self.late, self.alone, self.evaluated = (nn.Linear(4, 4) for _ in range(4))
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, late: bool = False) -> Tensor:
        x = self.usual(x)
        if not self.training:
            return self.evaluated(x)
        return self.late(x) if late else x


def called_now_and_then(watch: Watcher) -> Any:
    """Call each layer but one of `Many` in some step, and evaluate between the steps."""
    model = Many()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(6):
        optimizer.zero_grad()
        out = model(batch(), late=step == 3)
        out = model.alone(out) if step == 4 else out
        out.mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()(batch())
        model.train()
    return model


class Trainer(nn.Module):
    """Steps within its own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.optimizers = [torch.optim.SGD(self.net.parameters(), 0.01)]

    def forward(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        loss.backward()
        self.optimizers[0].step()
        return loss.detach()


def stepping_within_a_forward(watch: Watcher) -> Any:
    """End steps in the midst of forwards: the hooks that see a forward's end may be gone by then, and yet none stays open."""
    trainer = Trainer()
    for _ in range(7):
        trainer(batch())
    if watch.budget.kind is not StepKind.MEASURED:
        assert not any(root.hooks.is_running for root in watch.models.roots)
    return trainer


class Branching(nn.Module):
    """Takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.even, self.never = nn.ReLU(), nn.Tanh(), nn.Sigmoid()

    def forward(self, x: Tensor, step: int) -> Tensor:
        return self.odd(x) if step % 2 else self.even(x)


def made_anew(watch: Watcher) -> Any:
    """Make a module in each step: they follow each other under one name, and the ledger is about all of them."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(4):
        optimizer.zero_grad()
        Branching()(model(batch()), step).mean().backward()
        optimizer.step()
    return model


def generators_in_turn(watch: Watcher) -> Any:
    """Run two trainings in turn, as generators: each forward is of its own model, and both are left half way."""

    def training(model: nn.Module) -> Iterator[None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        while True:
            optimizer.zero_grad()
            loss = model(batch()).mean()
            yield
            loss.backward()
            optimizer.step()

    models = [net(), net()]
    pair = [training(model) for model in models]
    for _ in range(7):
        for each in pair:
            next(each)
    for each in pair:
        each.close()
    return models


UNUSED = {
    f"{site}:param.grad"
    for site in ("unused.weight", "unused.bias", "evaluated.weight", "evaluated.bias")
}
LEDGERS = [
    (critic_first, GUARDED + SKIPPED + GUARDED, None, {"generator.unused:param.grad"}),
    *(
        (called_now_and_then, levels, 6, {"unused:out"} | UNUSED)
        for levels in (MEASURED, GUARDED, SKIPPED)
    ),
    *((stepping_within_a_forward, levels, 7, set()) for levels in (MEASURED, GUARDED, MIXED)),
    (made_anew, MEASURED, 4, {"Branching.never:out"}),
    (generators_in_turn, GUARDED + MEASURED, 6, set()),
]


@pytest.mark.parametrize(
    ("program", "levels", "steps", "sites"),
    LEDGERS,
    ids=[f"{program.__name__}-{names(levels)}" for program, levels, _, _ in LEDGERS],
)
def test_the_ledger_lists_what_no_step_used(
    program: Callable[[Watcher], Any],
    levels: tuple[StepKind, ...],
    steps: int | None,
    sites: set[str],
    paced: Paced,
) -> None:
    """Whether a step was measured or not, whether it trained, evaluated or called a part alone."""
    paced(*levels)
    models: list[Any] = []
    log = watched(lambda watch: models.append(program(watch)))
    assert log.watch is not None
    assert not log.watch.failed
    assert steps in (None, log.watch.summary.steps)
    assert set(silent(log)) == sites


class Drops(nn.Module):
    """Uses a dropout's probability without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.drop = nn.Linear(2, 2), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.fc(x), self.drop.p, self.training)


def test_the_ledger_says_why_also_where_the_model_is_gone() -> None:
    """A function that has returned leaves no model behind, but what it did with its parts is still reported."""
    log = watch(lambda: nn.Sequential(Drops(), Drops())(torch.ones(1, 2)).sum().backward())
    (event,) = [event for event in log.events if event["kind"] == "ledger"]

    assert [(s["site"], s["cause"], s["remedy"]) for s in event["sites"]] == [
        (
            f"{i}.drop:out",
            "bypassed: Drops.forward reads its p without calling it",
            f'hook "{i}" instead',
        )
        for i in (0, 1)
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
    assert cause.startswith("never called itself, but the modules inside it were")


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
