"""The simulated accelerator itself: it computes what the CPU does, and shows what a real card would."""

from __future__ import annotations

import torch


def test_results_are_the_cpus(sim):
    """An operator on the device gives the CPU's bits."""
    x = torch.randn(4, 5)
    assert torch.equal((x.to("sim") @ x.t().to("sim")).cpu(), x @ x.t())
