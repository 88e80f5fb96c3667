"""Optimizers that a program makes while it is watched, or had before: whose steps count, and what is measured of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kedge.actions.measure.meter import Meter
from kedge.watch.models import optimizers
from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import Memory, Paced, batch, descend, net, norm, watch, watched


def test_a_new_optimizer_has_its_next_step_measured_and_no_other() -> None:
    """A step in which a new optimizer steps is counted as the kind it was; the one after it is measured."""
    kinds: list[StepKind] = []

    def program() -> None:
        for _ in range(3):
            descend(net(), 4, between=lambda step: kinds.append(log.watch.budget.kind))

    log = Memory()
    watch(program, every=1000, log=log)
    measured, guarded = StepKind.MEASURED, StepKind.GUARDED
    assert kinds == [
        measured,
        measured,
        guarded,
        guarded,
        *[guarded, measured, guarded, guarded] * 2,
    ]
    assert log.watch.summary.levels == {"measured": 4, "guarded": 8, "skipped": 0}


def test_passes_are_no_steps_where_an_optimizer_is_made_meanwhile() -> None:
    """One that the program makes after watching has begun is waited for, however many passes come before its step."""
    model = net()
    with Watcher(Meter(), Memory(), n=1) as watch:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for _ in range(3):
            for _ in range(2):
                model(batch()).mean().backward()
            optimizer.step()
    assert watch.summary.steps == 3


@pytest.mark.parametrize(("batches", "searches"), [(1, 0), (2, 1)])
def test_an_optimizer_that_was_there_before_is_searched_for_only_if_it_does_not_step(
    batches: int, searches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search through all objects takes as long as hundreds of small steps; gradients that are added up need one."""
    calls: list[Any] = []
    monkeypatch.setattr(optimizers, "_is_held", lambda model: calls.append(model) or True)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with Watcher(Meter(), Memory(), n=1) as watch:
        for _ in range(3):
            for _ in range(batches):
                model(batch()).mean().backward()
            optimizer.step()
    assert len(calls) == searches
    assert watch.summary.steps == 3


def test_passes_are_steps_where_an_optimizer_is_another_models() -> None:
    """A model that is first called with gradients and then without has none to wait for."""
    model, other = net(), net()
    optimizer = torch.optim.SGD(other.parameters(), 0.01)
    with Watcher(Meter(), Memory(), n=1) as watch:
        model(batch()).mean().backward()
        with torch.no_grad():
            for _ in range(4):
                model(batch())
    assert optimizer.param_groups
    assert watch.summary.steps == 5


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
    rows = recording.rows(f"{recording.roots[1].prefix}.1:out")
    assert rows.step.tolist() == [4]
    seen = {step + 1: norm(out) ** 2 for step, other, out in outs if other}
    for step, value in zip(rows.step.tolist(), rows.sumsq.tolist(), strict=True):
        assert value == pytest.approx(seen[step], rel=1e-5)
    assert set(rows.step.tolist()) <= set(log.steps(level=2))
    assert len(log.steps(level=2)) == summary.sampled
