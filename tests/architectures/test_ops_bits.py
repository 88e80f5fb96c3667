"""On real architectures: observing the operations inside forwards changes no bit, and they are what modules show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")
from training import train, unlike
from zoo import ZOO, Architecture

import kedge

EVERY_OP = "**/*:out, **/*:in, **/*:out.grad, **/*:in.grad"
OBSERVERS: dict[str, Callable[[], Any]] = {"record": kedge.record, "measure": kedge.measure}
pytestmark = pytest.mark.filterwarnings("ignore::kedge.errors.NeverFiredWarning")
architectures = pytest.mark.parametrize("architecture", ZOO, ids=lambda a: a.name)


@pytest.mark.parametrize("observer", OBSERVERS)
@architectures
def test_observing_every_operation_changes_no_bit(architecture: Architecture, observer: str) -> None:
    """Outputs, loss, gradients, generators and weights of two steps are those of a model nobody watches."""
    bare = train(architecture, architecture.build())
    model = architecture.build()
    with kedge.session() as s:
        s.hook(model, EVERY_OP, OBSERVERS[observer]())
        watched = train(architecture, model)
    assert unlike(bare, watched) == []


@architectures
def test_operations_are_what_their_modules_show(architecture: Architecture) -> None:
    """What the last operation of a module's own forward returns is, bit for bit, what the module returns, where it returns that."""
    model, batch = architecture.build(), architecture.inputs()
    leaves = {n: m for n, m in model.named_modules() if type(m) in (nn.Linear, nn.LayerNorm, nn.Embedding, nn.GELU)}
    names = {nn.Linear: "linear", nn.LayerNorm: "layer_norm", nn.Embedding: "embedding", nn.GELU: "gelu"}
    compared = 0
    with kedge.session() as s:
        ops = s.hook(model, "**/*:out, **/*:out.grad", kedge.record(copy=True))
        modules = s.hook(model, "**:out, **:out.grad", kedge.record(copy=True))
        architecture.loss(model(**batch)).backward()
        for path, module in leaves.items():
            site = kedge.sites(model)[path].path
            for kind in ("out", "out.grad"):
                mine = ops.records(f"{site}/{names[type(module)]}:{kind}")
                theirs = modules.records(f"{site}:{kind}")
                assert len(mine) == len(theirs)
                for a, b in zip(mine, theirs, strict=True):
                    assert (a.event.call, a.event.pass_, a.event.backward) == (
                        b.event.call,
                        b.event.pass_,
                        b.event.backward,
                    )
                    assert torch.equal(a.value, b.value)
                    compared += isinstance(a.value, Tensor)
    assert compared or not leaves
