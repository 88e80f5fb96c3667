"""What a session keeps of hooks on graphs that come and go."""

from __future__ import annotations

import gc

import torch
from torch import nn

import kedge
from kedge.hooks.placing.installed import InstalledHook


def test_handles_of_graphs_that_are_gone_do_not_wait_for_one_that_stays() -> None:
    """A program that keeps the graph of its first pass has no more handles of later ones kept for it."""
    model, x = nn.Linear(3, 4), torch.randn(2, 3)
    with kedge.session() as s:
        s.hook(model, ":out.grad", lambda value: None)
        first = model(x)
        for _ in range(300):
            model(x).sum().backward()
        kept = [what for what in s.installed._passing if isinstance(what, InstalledHook)]
        assert len(kept) < 10
        first.sum().backward()
        assert s.ledger()[":out.grad"].fired == 301


def test_one_more_hooked_module_costs_few_objects() -> None:
    """Python's garbage collector searches all that a watched model keeps: it is as much as it was counted to be, a module."""

    def kept(modules: int) -> int:
        model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(modules)))
        with kedge.session() as s:
            s.hook(model, "**:out, **:in, **:out.grad", kedge.measure())
            model(torch.zeros(1, 2)).sum().backward()
            gc.collect()
            return len(gc.get_objects())

    kept(2)
    few, many = kept(10), kept(110)
    each = (many - few) / 100
    assert each < 180, each  # some 20 of them are the module's own; 290 with closures
