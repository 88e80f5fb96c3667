"""Values and calls that are unusual: any kind of number, transforms, traces, compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from kedge.rules.registry import check
from kedge.watch.steps.budget import StepKind
from kedge.watch.watcher import Watcher
from tests.watch.watched import descend, net, watch, watched

Paced = Callable[..., None]
LEVELS = [(StepKind.GUARDED,), (StepKind.SKIPPED,), (StepKind.SKIPPED, StepKind.MEASURED, StepKind.GUARDED)]


class Odd(nn.Module):
    """Holds parameters of kinds that have no norm, as quantized models do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 2)
        self.whole = nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
        self.narrow = nn.Parameter(torch.ones(8).to(torch.float8_e4m3fn), requires_grad=False)
        self.none = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Complex(nn.Module):
    """Returns complex values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.complex64) @ self.weight


@pytest.mark.parametrize("levels", LEVELS)
@pytest.mark.parametrize(
    "make",
    [lambda: net().double(), lambda: net().half(), Odd, lambda: nn.Sequential(net(), nn.Linear(2, 4), Complex())],
)
def test_values_of_any_kind_of_number_are_no_failure(
    make: Callable[[], nn.Module], levels: tuple[StepKind, ...], paced: Paced, capsys: pytest.CaptureFixture[str]
) -> None:
    """Doubles, whole numbers, bytes, nothing and complex numbers are measured, or passed over."""
    paced(*levels)
    log = watched(lambda watch: descend(make(), 6))
    assert capsys.readouterr().err == ""
    assert log.watch is not None
    assert not log.watch.failed
    assert log.watch.summary.steps == 6


def test_a_large_double_is_finite(paced: Paced) -> None:
    """A norm that float32 could not hold is not taken for infinite."""
    paced(StepKind.GUARDED)
    model = nn.Linear(4, 2).double()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-60)
        for _ in range(3):
            optimizer.zero_grad()
            (model(torch.randn(5, 4, dtype=torch.float64)).sum() * 1e50).backward()
            optimizer.step()

    recording = watched(program).recording()
    assert [f for f in check(recording) if f.code == "NAN-BORN"] == []


class Holder(nn.Module):
    """Holds a network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def transformed(model: nn.Module) -> Any:
    """Call a model in every way that is no plain forward."""
    x, params = torch.ones(3, 4), {n: p.detach() for n, p in model.named_parameters()}
    found = [vmap(model)(x), functional_call(model, params, (x,))]
    found += vmap(grad(lambda p, x: functional_call(model, p, (x,)).sum()), (None, 0))(params, x).values()
    return [*found, make_fx(model)(x)(x), torch.jit.trace(model, x, check_trace=False)(x)]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("levels", LEVELS)
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


class Energy(Holder):
    """Differentiates a network inside of its forward, as models of physics do."""

    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(lambda x: self.net(x).sum()))(x)


@pytest.mark.parametrize("levels", LEVELS)
def test_a_transform_inside_of_a_forward_is_no_failure(levels: tuple[StepKind, ...], paced: Paced) -> None:
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


@pytest.mark.parametrize("level", [StepKind.SKIPPED, StepKind.GUARDED, StepKind.MEASURED])
def test_a_model_that_is_compiled_late_is_compiled_twice_at_most(level: StepKind, paced: Paced, compiled: Any) -> None:
    """Its steps count once, and it is compiled again only to get its hooks."""
    paced(level)
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def program(watch: Watcher) -> None:
        model = Holder()
        descend(model, 3)
        model.compile(backend=backend, fullgraph=True)
        descend(model, 9)

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.steps == 12
    assert len(log.watch.models.roots) == 1
    assert len(graphs) <= 2


def test_a_compiled_step_of_an_optimizer_is_a_step(paced: Paced, compiled: Any) -> None:
    """What is done at its end is not compiled with it."""
    paced(StepKind.GUARDED, StepKind.MEASURED)
    model = net()

    def program(watch: Watcher) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        step = compiled(optimizer.step, backend="eager")
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(5, 4)).mean().backward()
            step()

    log = watched(program)
    assert log.watch is not None
    assert log.watch.summary.levels == {"measured": 3, "guarded": 3, "skipped": 0}


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
    assert {"0.weight:param", "0.weight:update", "0.weight:param.grad", ":grad.norm"} <= set(log.texts())
