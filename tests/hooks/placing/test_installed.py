"""What a session keeps of hooks on graphs that come and go."""

from __future__ import annotations

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
