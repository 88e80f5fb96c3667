"""What operations hold on to: nothing after a forward, nothing more with each step."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge


class Net(nn.Module):
    """Two linear layers and operations between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.seen: list[weakref.ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.a(x)) + 1
        self.seen.append(weakref.ref(y))
        return self.b(y).sum()


def test_a_forward_leaves_no_tensor_behind() -> None:
    """What a hooked forward was given and made is freed when the program lets go of it, without the collector."""
    net = Net()
    with kedge.hook(net, "**/*:out, **/*:in, **/*:out.grad", lambda v: None):
        x = torch.randn(3, 4)
        given = weakref.ref(x)
        gc.disable()
        try:
            net(x).backward()
            del x
            assert given() is None
            assert net.seen[0]() is None
        finally:
            gc.enable()


def test_an_error_leaves_no_tensor_behind() -> None:
    """Nor does a forward that fails, once its traceback is gone."""
    net = Net()
    net.b = nn.Linear(5, 4)
    with kedge.hook(net, "/relu", lambda v: None):
        with pytest.raises(RuntimeError):
            net(torch.randn(3, 4))
        gc.collect()
        assert net.seen[0]() is None


def test_many_steps_hold_no_more_than_few() -> None:
    """After a thousand steps there are as many objects as after a hundred, but for lists that are cleared now and then."""
    net = Net()

    def steps(n: int) -> int:
        for _ in range(n):
            net(torch.randn(3, 4)).backward()
            net.zero_grad()
            net.seen.clear()
        gc.collect()
        return len(gc.get_objects())

    with kedge.session() as s:
        s.hook(net, "**/*:out, **/*:in", kedge.record())
        s.hook(net, "**/relu:out", lambda v: v * 1)
        s.fired = type(s.fired)(maxlen=10)
        first = steps(100)
        assert steps(900) - first < 3_000  # thirty are recorded in a step


def test_the_end_of_a_session_lets_the_model_go() -> None:
    """After the session nothing of Kedge's holds the model."""
    net: Any = Net()
    s = kedge.session()
    s.hook(net, "**/relu:out", kedge.record())
    net(torch.randn(3, 4)).backward()
    s.end(quiet=True)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None
