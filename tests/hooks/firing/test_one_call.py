"""An action of the user's own that answers for a whole call, as `docs/how-to/extending.md` says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

import kedge


class Pair(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the input twice."""
        return x + 0, x + 1


class Together:
    """Notes the calls, and the values that come in one."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    @contextmanager
    def one_call(self, events: Sequence[kedge.Event]) -> Iterator[None]:
        """Called around the leaves of one call."""
        self.log.append(f"begin {len(events)}")
        yield
        self.log.append("end")

    def __call__(self, value: Tensor) -> None:
        """Note a leaf."""
        self.log.append("whole")


def test_an_action_with_one_call_runs_after_the_others_have_had_every_leaf() -> None:
    """Without it, all actions see the first leaf before any sees the second."""
    log: list[str] = []
    model = Pair()
    with kedge.hook(model, ":out", lambda value: log.append("before"), Together(log)):
        model(torch.ones(1))

    assert log == ["before", "before", "begin 2", "whole", "whole", "end"]
