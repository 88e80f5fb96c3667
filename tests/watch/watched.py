"""Watching a program in the test's own process, and reading what was written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kedge.actions.measure.meter import Meter
from kedge.store.events import RunEvent
from kedge.store.recording import Recording
from kedge.watch.step import StepKind
from kedge.watch.steps.budget import Budget
from kedge.watch.watcher import Watcher

Paced = Callable[..., None]
"""What the fixture `paced` returns."""

MEASURED, GUARDED, SKIPPED = (
    (kind,) for kind in (StepKind.MEASURED, StepKind.GUARDED, StepKind.SKIPPED)
)
MIXED = (*SKIPPED, *MEASURED, *GUARDED)
LEVELS = [MEASURED, GUARDED, SKIPPED, MIXED]
"""Of which kinds the steps after the first are, in turn."""


def names(levels: Any) -> str:
    """Name the kinds of steps, as the id of a case."""
    return "-".join(level.name for level in levels)


def at_levels(*levels: tuple[StepKind, ...]) -> pytest.MarkDecorator:
    """Run a test with steps of one kind after the other: of each kind alone and of all in turn, if none are named."""
    return pytest.mark.parametrize("levels", levels or LEVELS, ids=names)


def fix_kinds(monkeypatch: pytest.MonkeyPatch, *kinds: StepKind) -> None:
    """Fix the kind of each step after the first, over and over."""
    order = itertools.cycle(kinds)

    def choose(self: Budget, step: int, now: float) -> StepKind:
        self.kind, self.run, self._planned, self._wished = next(order), 1, 1, False
        return self.kind

    monkeypatch.setattr(Budget, "_choose", choose)


class Memory:
    """A log that keeps what it is given."""

    def __init__(self) -> None:
        self.entries: list[Mapping[str, Any]] = []
        self.roots: list[Mapping[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.events: list[Mapping[str, Any]] = []
        self.watch: Watcher | None = None

    def sites(self, sites: list[Mapping[str, Any]], roots: list[Mapping[str, Any]]) -> None:
        self.entries, self.roots = sites, roots

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        for i in range(len(columns["site"])):
            self.rows.append(
                {"step": step, **{name: column[i] for name, column in columns.items()}}
            )

    def event(self, event: RunEvent) -> None:
        self.events.append(event.entry())

    def recording(self) -> Recording:
        return Recording.build(self.entries, self.rows, {"every": 10}, self.events, self.roots)

    def texts(self, kind: str | None = None) -> list[str]:
        return [e["site"] for e in self.entries if kind in (None, e["kind"])]

    def steps(self, level: int) -> list[int]:
        """List the steps that were written at a level, apart from the curves: the loss and the gradients' norm."""
        curves = {e["id"] for e in self.entries if e["kind"] in ("loss", "grad.norm")}
        return sorted(
            {
                row["step"]
                for row in self.rows
                if row["level"] == level and row["site"] not in curves
            }
        )


def watch(
    program: Callable[[], Any], *, every: int = 10, sites: str = "**", log: Any = None
) -> Any:
    """Run a program watched; returns the log, which knows its watch."""
    log = Memory() if log is None else log
    log.watch = Watcher(Meter(), log, sites=sites, n=every)
    with log.watch:
        program()
    return log


def watched(program: Callable[[Watcher], Any], log: Memory | None = None) -> Memory:
    """Run a program within a budget; it is given its watch."""
    log = Memory() if log is None else log
    log.watch = Watcher(Meter(), log, n=10, budget=0.5)
    with log.watch:
        program(log.watch)
    return log


def silent(log: Memory) -> dict[str, str]:
    """Read the ledger: what never fired, and why."""
    (ledger,) = [e for e in log.events if e["kind"] == "ledger"]
    return {entry["site"]: entry["cause"] for entry in ledger["sites"]}


def batch() -> Tensor:
    """Make an input of `net`."""
    return torch.randn(5, 4)


def net() -> nn.Sequential:
    """Make a small network."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def descend(
    model: nn.Module, steps: int, *, between: Callable[[int], Any] = lambda step: None
) -> list[Tensor]:
    """Train; returns the parameters."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    dtype = next(p.dtype for p in model.parameters() if p.requires_grad and not p.is_complex())
    for step in range(steps):
        between(step)
        optimizer.zero_grad()
        model(torch.randn(5, 4, dtype=dtype)).abs().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


class Conv(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.act = nn.ReLU()
        self.fc = nn.Linear(4 * 4 * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.act(self.conv(x)).flatten(1))


def images(n: int = 5) -> Tensor:
    """Draw a batch for `Conv`."""
    return torch.randn(n, 1, 6, 6)


def train(
    model: nn.Module, steps: int, lr: float = 0.1, batch: Callable[[], Tensor] = images
) -> None:
    """Train by the mean of squares."""
    optimizer = torch.optim.SGD(model.parameters(), lr)
    for _ in range(steps):
        optimizer.zero_grad()
        model(batch()).square().mean().backward()
        optimizer.step()


def norm(tensor: Tensor) -> float:
    """Compute a tensor's norm in double precision."""
    return float(tensor.detach().double().norm())


def norms(recording: Recording, site: str) -> list[float]:
    """Read the norm of a site, step by step."""
    return np.sqrt(recording.rows(site).sumsq).tolist()
