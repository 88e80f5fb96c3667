"""Forwards that torch.func transforms or a tracer follows: let alone, with the same result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from kedge.watch.step import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import (
    GUARDED,
    MIXED,
    SKIPPED,
    Paced,
    at_levels,
    descend,
    net,
    watch,
    watched,
)


def transformed(model: nn.Module) -> Any:
    """Call a model in every way that is no plain forward."""
    x, params = torch.ones(3, 4), {n: p.detach() for n, p in model.named_parameters()}
    found = [vmap(model)(x), functional_call(model, params, (x,))]
    found += vmap(grad(lambda p, x: functional_call(model, p, (x,)).sum()), (None, 0))(
        params, x
    ).values()
    return [*found, make_fx(model)(x)(x), torch.jit.trace(model, x, check_trace=False)(x)]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@at_levels(GUARDED, SKIPPED, MIXED)
def test_transforms_and_traces_go_on_as_they_would(
    levels: tuple[StepKind, ...], paced: Paced, capsys: pytest.CaptureFixture[str]
) -> None:
    """A forward that is vectorized, differentiated or traced is let alone, with the same result."""

    def run(watch: Watcher | None = None) -> list[Tensor]:
        torch.manual_seed(1)
        model, seen = net(), []
        model(torch.ones(1, 4))
        params = descend(model, 5, between=lambda step: seen.extend(transformed(model)))
        return [*params, *(t.detach() for t in seen)]

    plain = run()
    paced(*levels)
    results: list[Tensor] = []
    watched(lambda watch: results.extend(run()))
    assert all(torch.equal(a, b) for a, b in zip(plain, results, strict=True))
    assert capsys.readouterr().err == ""


class Energy(nn.Module):
    """Differentiates a network inside of its forward, as models of physics do."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(lambda x: self.net(x).sum()))(x)


@at_levels(GUARDED, SKIPPED, MIXED)
def test_a_transform_inside_of_a_forward_is_no_failure(
    levels: tuple[StepKind, ...], paced: Paced
) -> None:
    """What was wrapped for a transform is searched, when that is over, as what it was inside."""
    paced(*levels)
    model = Energy()

    def spoil(step: int) -> None:
        if step == 4:
            with torch.no_grad():
                model.net[0].bias[0] = float("nan")

    log = watched(lambda watch: descend(model, 6, between=spoil))
    assert log.watch is not None
    assert not log.watch.failed


@pytest.mark.parametrize("transformed", [False, True])
def test_parameters_that_torch_func_replaced_are_found_at_the_optimizer(transformed: bool) -> None:
    """A model met in `functional_call`, with other weights in place: the optimizer makes the steps, and what it holds is watched."""

    def program() -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(6):
            weights = {n: p * 1.0 for n, p in model.named_parameters()}

            def loss(x: Tensor, weights: dict[str, Tensor] = weights) -> Tensor:
                return functional_call(model, weights, (x,)).square().mean()

            x = torch.randn(3, 8, 4)
            optimizer.zero_grad()
            (vmap(loss)(x).mean() if transformed else loss(x[0])).backward()
            optimizer.step()

    log = watch(program, every=1)
    assert log.watch.step() == 6
    assert {"0.weight:param", "0.weight:update", "0.weight:param.grad", ":grad.norm"} <= set(
        log.texts()
    )
