"""Tensors that hold nothing are passed over: those of FakeTensorMode like those on the meta device."""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import kedge


def test_fake_tensors_are_passed_over() -> None:
    """The program goes on as without Kedge, nothing is measured of them, and real ones are measured before and after."""
    model, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU()), torch.ones(4, 2)
    with kedge.hook(model, "**:out", kedge.measure()) as stats:
        real = model(x)
        assert stats["0"].count == 12
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for _ in range(3):
                dreamt = model(mode.from_tensor(x))
        assert (type(dreamt).__name__, tuple(dreamt.shape)) == ("FakeTensor", (4, 3))
        assert stats["0"].count == 0
        assert torch.equal(model(x), real)
        assert stats["0"].count == 12
        assert stats["1"].nonfinite == 0
