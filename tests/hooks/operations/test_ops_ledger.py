"""Why an operation did not fire: each cause has its own words."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import kedge
from kedge.errors import NeverFired, NeverFiredWarning, NotRecorded


class Net(nn.Module):
    """Operations of its own, a child that is called, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.never = nn.Linear(3, 3), nn.ReLU()
        self.inner = nn.Sequential(nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(F.gelu(self.fc(x)) + 1 + x).detach() * 2


def cause(sites: str, *, call: bool = True) -> str:
    """Why the first of the sites did not fire in one forward."""
    net = Net()
    s = kedge.session()
    s.hook(net, sites, kedge.record())
    if call:
        net(torch.ones(2, 3))
    entry = next(iter(s.ledger()))
    s.end(quiet=True)
    assert entry.cause is not None
    return f"{entry.cause.why}; {entry.cause.remedy}"


@pytest.mark.parametrize(
    ("sites", "why"),
    [
        ("/relu:out", "its own forward called no relu: it called gelu, add, detach, mul; "),
        ("/gleu:out", 'did you mean "gelu"?'),
        ("/add#2:out", "it called 2 add; the numbers start at 0"),
        ("inner/*:out", "its own forward calls no operation, only modules"),
        ("never/relu:out", "never called while the hook was attached"),
        ("/add:out[0]", "its value has no tensor [0]; it has a bare tensor"),
        ("/mul:out.grad", "its value requires no grad"),
        ("/add#0:out.grad", "no backward reached a hook of this session"),
        ("#1/add:out", "no forward called it 2 times"),
    ],
)
def test_the_cause_is_named(sites: str, why: str) -> None:
    """What was asked, what there was instead, and what to do."""
    assert why in cause(sites)


def test_a_model_that_was_not_called() -> None:
    """Nothing is said about operations where there was no forward."""
    assert cause("/relu", call=False).startswith("the model was not called")


def test_modules_without_the_operation_are_no_news() -> None:
    """A pattern of modules warns only if none of them made it; a module that is named warns by itself."""
    net = Net()
    with kedge.hook(net, "**/gelu:out", kedge.record()):
        net(torch.ones(2, 3))
    with (
        pytest.warns(NeverFiredWarning, match="called no silu"),
        kedge.hook(net, "**/silu:out", kedge.record()),
    ):
        net(torch.ones(2, 3))
    with (
        pytest.warns(NeverFiredWarning, match="1 of 2"),
        kedge.hook(net, "/gelu, fc/gelu", kedge.record()),
    ):
        net(torch.ones(2, 3))
    with pytest.raises(NeverFired, match="fc/gelu"), kedge.session(strict=True) as s:
        s.hook(net, "fc/gelu", kedge.record())
        net(torch.ones(2, 3))


def test_reading_what_was_not_recorded_says_why() -> None:
    """The error of reading has the ledger's cause."""
    net = Net()
    with kedge.hook(net, "/gelu, **/relu", kedge.record()) as acts:
        net(torch.ones(2, 3))
    with pytest.raises(
        NotRecorded,
        match="fc/relu:out  never fired: its own forward called no relu: it called linear",
    ):
        acts["fc/relu"]
    assert acts.ledger()["/gelu"].fired == 1
