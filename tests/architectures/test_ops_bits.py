"""On real architectures: observing the operations inside forwards changes no bit, and they are what modules show."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
import kedge
from tests.architectures.training import plain, train, unlike
from tests.architectures.zoo import BY_NAME, Architecture, architectures

EVERY_OP = "**/*:out, **/*:in, **/*:out.grad, **/*:in.grad"
OBSERVERS: dict[str, Callable[[], Any]] = {"record": kedge.record, "measure": kedge.measure}
TWINS = {
    "Linear": "linear", "LayerNorm": "layer_norm", "Embedding": "embedding", "Conv1d": "conv1d", "Conv2d": "conv2d",
    "BatchNorm1d": "batch_norm", "BatchNorm2d": "batch_norm", "GroupNorm": "group_norm", "Dropout": "dropout",
    "GELU": "gelu", "GELUActivation": "gelu", "ReLU": "relu", "ReLU6": "hardtanh", "SiLU": "silu", "SiLUActivation": "silu",
    "Tanh": "tanh", "Sigmoid": "sigmoid", "Softmax": "softmax", "LogSoftmax": "log_softmax", "Flatten": "flatten",
    "MaxPool1d": "max_pool1d", "MaxPool2d": "max_pool2d", "AvgPool1d": "avg_pool1d",
    "AdaptiveAvgPool1d": "adaptive_avg_pool1d", "AdaptiveAvgPool2d": "adaptive_avg_pool2d", "ConvTranspose1d": "conv_transpose1d",
}  # fmt: skip
"""Modules, by type, that call one function, and what that is called."""
LEAST = {
    "Linear": 400, "LayerNorm": 100, "Embedding": 40, "Conv1d": 4, "Conv2d": 100, "BatchNorm2d": 80, "GroupNorm": 1,
    "Dropout": 100, "GELUActivation": 40, "ReLU": 24, "ReLU6": 40, "SiLUActivation": 4, "MaxPool2d": 1, "Flatten": 1,
    "AdaptiveAvgPool1d": 1, "AdaptiveAvgPool2d": 2,
}  # fmt: skip
"""How many values of each type, and as many gradients, have to be compared over all architectures."""
LEAST_OF_EACH = 10
"""How many there have to be in each architecture."""
pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")


@pytest.mark.parametrize("observer", OBSERVERS)
@architectures
def test_observing_every_operation_changes_no_bit(
    architecture: Architecture, observer: str
) -> None:
    """Outputs, loss, gradients, generators and weights of two steps are those of a model nobody watches."""
    bare = plain(architecture)
    model = architecture.build()
    with kedge.session() as s:
        s.hook(model, EVERY_OP, OBSERVERS[observer]())
        watched = train(architecture, model)
    assert unlike(bare, watched) == []


@functools.cache
def compared(name: str, *, training: bool) -> Counter[str]:
    """Compare, bit for bit, each module that is one function with the operation that it calls; returns how many values by type."""
    architecture = BY_NAME[name]
    model, batch = architecture.build().train(training), architecture.inputs()
    return compare(model, lambda: architecture.loss(model(**batch)).backward())


def compare(model: nn.Module, step: Callable[[], Any]) -> Counter[str]:
    """Compare values and gradients of a step, at every module of `TWINS` and at the operation inside it."""
    twins = {
        path: TWINS[type(m).__name__]
        for path, m in model.named_modules()
        if type(m).__name__ in TWINS
    }
    count: Counter[str] = Counter()
    with kedge.session() as s:
        ops = s.hook(model, "**/*:out, **/*:out.grad", kedge.record(copy=True))
        modules = s.hook(model, "**:out, **:out.grad", kedge.record(copy=True))
        step()
        for path, twin in twins.items():
            for kind in ("out", "out.grad"):
                mine, theirs = (
                    ops.records(f"{path}/{twin}:{kind}"),
                    modules.records(f"{path}:{kind}"),
                )
                assert [times(a) for a in mine] == [times(b) for b in theirs], (path, twin, kind)
                assert all(
                    torch.equal(a.value, b.value) for a, b in zip(mine, theirs, strict=True)
                ), (path, kind)
                count[f"{type(model.get_submodule(path)).__name__}:{kind}"] += len(mine)
    return count


def times(record: Any) -> tuple[int, int, int]:
    """When a value was seen."""
    return record.event.call, record.event.pass_, record.event.backward


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@architectures
def test_operations_are_what_their_modules_show(architecture: Architecture, training: bool) -> None:
    """Where a module is one function, that operation's value and gradient are the module's own, and there is something to compare."""
    assert compared(architecture.name, training=training).total() >= LEAST_OF_EACH


@pytest.mark.full
def test_every_kind_of_module_was_compared_somewhere() -> None:
    """Over all architectures so many values of each kind were compared that a name that no longer fits would be noticed."""
    found = sum(
        (compared(name, training=training) for name in BY_NAME for training in (True, False)),
        Counter(),
    )
    kinds = {
        f"{name}:{kind}": least for name, least in LEAST.items() for kind in ("out", "out.grad")
    }
    assert {kind: found[kind] for kind, least in kinds.items() if found[kind] < least} == {}


class Chained(nn.Module):
    """Modules that are one function each and that the architectures lack."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.silu, self.mean = nn.Conv1d(3, 4, 3), nn.SiLU(), nn.AvgPool1d(2)
        self.most, self.softmax, self.drop = nn.MaxPool1d(2), nn.Softmax(-1), nn.Dropout(0.5)
        self.tanh, self.sigmoid, self.norm = nn.Tanh(), nn.Sigmoid(), nn.BatchNorm1d(4)
        self.up, self.log = nn.ConvTranspose1d(4, 2, 3), nn.LogSoftmax(1)

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x)
        return x


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_operations_of_modules_that_the_architectures_lack_are_what_they_show(
    training: bool,
) -> None:
    """Softmax, pooling and their like, each compared with its gradient."""
    torch.manual_seed(0)
    model = Chained().train(training)
    count = compare(
        model, lambda: model(torch.randn(2, 3, 16, requires_grad=True)).square().sum().backward()
    )
    assert count == {
        f"{type(m).__name__}:{kind}": 1 for m in model.children() for kind in ("out", "out.grad")
    }
