"""When the sites and roots of a run are written, and which of their entries are made for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tests.watch.watched import Memory, batch, descend, net, watch


class Lists(Memory):
    """A log that keeps every list of sites, by the number of optimizers then."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: dict[int, list[Mapping[str, Any]]] = {}

    def sites(self, sites: list[Mapping[str, Any]], roots: list[Mapping[str, Any]]) -> None:
        super().sites(sites, roots)
        self.lists[len(roots[0]["optimizers"])] = sites


def test_an_optimizer_that_comes_later_changes_the_roots_alone() -> None:
    """The list of sites stays the same object, so that a writer need not write it anew."""
    model = net()
    log = Lists()

    def program() -> None:
        descend(model, 3)
        descend(model, 3)

    watch(program, every=1, log=log)
    assert log.lists[2] is log.lists[1]


def test_only_the_entries_of_new_sites_are_made() -> None:
    """A layer that is trained later adds its sites; the entries of all others stay."""
    model = net()
    log = Lists()

    def step(params: nn.Module) -> None:
        optimizer = torch.optim.SGD(params.parameters(), 0.01)
        for _ in range(3):
            model(batch()).abs().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def program() -> None:
        model[0].requires_grad_(False)
        step(model[2])
        model[0].requires_grad_(True)
        step(model)

    watch(program, every=1, log=log)
    before, after = log.lists[1], log.lists[2]
    assert len(after) > len(before)
    assert all(old is new for old, new in zip(before, after, strict=False))
