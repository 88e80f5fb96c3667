"""Roots: which models of a program are watched on their own, and under which names."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from kedge.actions.measure.meter import Meter
from kedge.watch.watcher import Watcher
from tests.threaded import in_threads, replicas_of
from tests.watch.watched import Conv, Memory, batch, descend, images, net, silent, train, watch


class Gan:
    """A generator and a discriminator, each with its optimizer."""

    def __init__(self) -> None:
        self.g = nn.Sequential(nn.Linear(2, 3), nn.Tanh())
        self.d = Conv.__new__(Conv)
        nn.Module.__init__(self.d)
        self.d = nn.Linear(3, 1)

    def train(self, steps: int) -> None:
        og, od = (torch.optim.SGD(m.parameters(), 0.1) for m in (self.g, self.d))
        for _ in range(steps):
            fake = self.g(torch.randn(4, 2))
            od.zero_grad()
            F.softplus(self.d(fake.detach())).mean().backward()
            od.step()
            og.zero_grad()
            F.softplus(-self.d(fake)).mean().backward()
            og.step()


def test_two_roots_with_two_optimizers_are_told_apart() -> None:
    """The sites of each begin with the name of the attribute that holds it, and an iteration is one step although two optimizers step."""
    log = watch(lambda: Gan().train(6), every=2)
    assert [(r["name"], r["type"], r["prefix"]) for r in log.roots] == [
        ("g", "Sequential", "g"),
        ("d", "Linear", "d"),
    ]
    assert log.texts("out") == ["g.0:out", "g.1:out", "g:out", "d:out"]
    updates = {"g.0.weight:update", "g.0.bias:update", "d.weight:update", "d.bias:update"}
    assert set(log.texts("update")) == updates
    assert {e["root"] for e in log.entries if e["path"].startswith("d")} == {1}
    assert log.watch.summary.steps == 6
    recording = log.recording()
    for site in updates:
        assert len(recording.rows(site)) >= 2, site


def test_roots_of_one_class_are_numbered() -> None:
    """No two roots share a prefix; what no variable holds has the name of its class."""
    gc.collect()  # optimizers of other tests would be waited for
    models = frozenset(nn.Linear(2, 2) for _ in range(4))
    log = watch(lambda: list(map(methodcaller("__call__", torch.ones(1, 2)), models)))
    assert [r["prefix"] for r in log.roots] == ["", "Linear", "Linear_2", "Linear_3"]
    assert log.texts("out") == [":out", "Linear:out", "Linear_2:out", "Linear_3:out"]


def test_a_loss_module_is_a_root_of_its_own() -> None:
    """Its output is the loss, and its input is the model's output."""
    model, loss = Conv(), nn.CrossEntropyLoss()

    def program() -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss(model(images()), torch.zeros(5, dtype=torch.long)).backward()
            optimizer.step()

    log = watch(program, every=1)
    ids = {e["site"]: e["id"] for e in log.entries}
    inputs = {e["site"]: e["from"] for e in log.entries if e["kind"] == "in" and e["root"] == 1}
    assert inputs == {"CrossEntropyLoss:in": [ids["fc:out"]], "CrossEntropyLoss:in[target]": [None]}
    assert len(log.recording().rows("CrossEntropyLoss:out")) == 3
    assert log.watch.summary.steps == 3


def test_a_root_that_turns_out_to_be_part_of_another_keeps_its_names() -> None:
    """A part that was called on its own first is watched under those names also inside the whole."""

    class Whole(nn.Module):
        def __init__(self, part: nn.Module) -> None:
            super().__init__()
            self.part, self.head = part, nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.part(x))

    gc.collect()  # optimizers of other tests would be waited for
    part = nn.Sequential(nn.Linear(3, 2))
    whole = Whole(part)

    def program() -> None:
        part(torch.ones(1, 3))
        train(whole, 3, batch=lambda: torch.randn(2, 3))

    log = watch(program, every=1)
    assert log.texts("out") == ["0:out", ":out", "whole.head:out", "whole:out"]
    assert sorted(log.texts("param")) == [
        "0.bias:param",
        "0.weight:param",
        "whole.head.bias:param",
        "whole.head.weight:param",
    ]
    assert sorted(log.texts("update")) == [
        t.replace(":param", ":update") for t in sorted(log.texts("param"))
    ]
    assert log.watch.summary.steps >= 3
    assert {s for s, c in _rows_per_step(log).items() if c > 1} == set()


def _rows_per_step(log: Memory) -> dict[str, int]:
    """Count the most rows of parameters' gradients that one step has."""
    counts: dict[tuple[str, int], int] = {}
    texts = {e["id"]: e["site"] for e in log.entries if e["kind"] == "param.grad"}
    for row in log.rows:
        if row["site"] in texts:
            key = (texts[row["site"]], row["step"])
            counts[key] = counts.get(key, 0) + 1
    return {site: n for (site, _), n in counts.items()}


def test_a_model_made_later_is_watched_too() -> None:
    """Whenever a root appears, its first call is seen in full."""

    def program() -> None:
        train(Conv(), 2)
        late = nn.Sequential(nn.Linear(3, 2))
        late(torch.ones(1, 3))

    log = watch(program, every=1)
    assert log.texts("out")[-2:] == ["late.0:out", "late:out"]
    assert log.texts("in")[-2:] == ["late:in", "late.0:in"]


def trained_with_another_each_step(make: Callable[[], nn.Module], steps: int) -> None:
    """Train `net` through a module that is made anew in each step."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        make()(model(batch())).mean().backward()
        optimizer.step()


class ToZero(nn.MSELoss):
    """How far a value is from zero."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, torch.zeros_like(x))


def gets_a_module() -> None:
    """Append a module to a model between two steps."""
    model = net()
    descend(model, 6, between=lambda step: step == 3 and model.append(nn.Tanh()))


def is_wrapped() -> None:
    """Put a model into another after some steps."""
    model = net()
    descend(model, 3)
    descend(nn.DataParallel(model), 3)


def has_parametrizations() -> None:
    """PyTorch calls what makes a parameter when it is registered; the model comes later."""
    normal, spectral = (
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.spectral_norm(nn.Linear(4, 2)),
    )
    descend(nn.Sequential(normal, spectral), 3)


ROOTS = {
    "a-loss-made-anew-takes-the-place-of-the-one-before": (
        lambda: trained_with_another_each_step(ToZero, 6), 1, ["Sequential", "ToZero"],
        {"ToZero:out": [*range(6)]},
    ),
    "a-module-added-later-is-none-in-steps-between": (gets_a_module, 10, ["Sequential"], {"loss": [*range(6)]}),
    "what-a-model-is-wrapped-in-is-none": (is_wrapped, 1, ["Sequential"], {"0:out": [*range(6)]}),
    "what-makes-a-parameter-is-none": (
        has_parametrizations, 1, ["Sequential"],
        {"1:out": [*range(3)], "1.parametrizations.weight.0:out": [*range(3)]},
    ),
}  # fmt: skip
"""A program, how often it is measured, its roots, and the steps of some sites."""


@pytest.mark.parametrize(("program", "every", "roots", "steps"), ROOTS.values(), ids=ROOTS)
def test_what_is_a_root(
    program: Callable[[], None], every: int, roots: list[str], steps: dict[str, list[int]]
) -> None:
    """A model and its loss; not what is made, added or put around one on the way.

    Each step counts once.
    """
    log, hooked = Memory(), []

    def counted() -> None:
        program()
        hooked.append(len(log.watch.session.targets) if log.watch else 0)

    watch(counted, every=every, log=log)
    assert [root["name"] for root in log.roots] == roots
    assert hooked == [len(roots)]
    assert log.watch is not None
    assert {site: log.recording().rows(site).step.tolist() for site in steps} == steps
    assert log.watch.summary.steps == len(next(iter(steps.values())))


def test_modules_made_anew_in_each_step_are_few_roots() -> None:
    """A program that makes a layer for every step has as many roots as can be told apart, and a row in each step."""
    log = watch(lambda: trained_with_another_each_step(lambda: nn.Linear(2, 1), 40), every=1)
    assert [root["name"] for root in log.roots] == ["Sequential", *["Linear"] * 8]
    recording = log.recording()
    rows = [
        recording.rows(f"Linear{number}:out").step.tolist()
        for number in ("", *(f"_{i}" for i in range(2, 9)))
    ]
    assert sorted(step for steps in rows for step in steps) == list(range(40))
    assert silent(log) == {}


def test_attaching_takes_a_time_that_grows_with_the_model_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model of ten times as many layers takes ten times as many attachments, looks and hooks, not more."""

    def counted(layers: int) -> int:
        calls = 0
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))

        def profile(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        log = Memory()
        log.watch = Watcher(Meter(), log, n=10, budget=0.5)
        with log.watch:
            optimizer = torch.optim.SGD(model.parameters(), 0.01)
            sys.setprofile(profile)
            try:
                model(torch.randn(3, 2)).mean().backward()
                optimizer.step()
            finally:
                sys.setprofile(None)
        return calls

    counted(10)  # what is done once
    few, many = counted(100), counted(1000)
    assert many < 13 * few


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
            in_threads(
                *(lambda r=r, o=outs: o.append(r(torch.randn(4, 3))) for r in replicas_of(model, 2))
            )
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
