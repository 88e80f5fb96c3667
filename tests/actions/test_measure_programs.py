"""`measure` in programs that work in place, differentiate twice, transform functions, or change PyTorch's defaults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.actions.measure.meter import Meter
from kedge.testing import assert_same_bits
from tests.marks import DEVICE, needs_device

_set_sync_debug_mode = DEVICE and getattr(
    torch.get_device_module(DEVICE), "set_sync_debug_mode", None
)


class Work(nn.Module):
    """A container that returns its last child's tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_a_tensor_that_passes_several_sites_is_measured_once() -> None:
    """Every site has its row, and a container that returns its child's tensor costs nothing more."""
    model, meter = Work(), kedge.measure()
    assert isinstance(meter, Meter)
    with kedge.hook(model, "**", meter) as stats:
        out = model(torch.randn(5, 3))
        assert meter._values.host.used == 2
    for site in ("body.1", "body", ":out"):
        assert stats[site].site.path == site.removesuffix(":out")
        assert (stats[site].calls, stats[site].count) == (1, 20)
        assert stats[site].rms == pytest.approx(out.square().mean().sqrt().item(), rel=1e-6)


@pytest.mark.parametrize("inference", [False, True])
def test_a_change_in_place_between_two_sites_is_measured_anew(inference: bool) -> None:
    """The same tensor object with other numbers is another value, also where PyTorch counts no versions."""
    model = nn.Sequential(nn.Linear(3, 50), nn.ReLU(inplace=True), nn.Identity())
    x = torch.randn(4, 3)
    with kedge.hook(model, "*", kedge.measure()) as stats:
        with torch.inference_mode(mode=inference):
            model(x)
    before = model[0](x)
    assert stats["0"].min == pytest.approx(before.min().item())
    assert stats["1"].min == stats["2"].min == 0.0
    assert stats["1"].nonzero == stats["2"].nonzero == int((before > 0).sum())


def test_gradients_are_measured() -> None:
    """Of outputs, inputs and parameters, each with its own sizes."""
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3, requires_grad=True)
    sites = "0:out.grad, 0:in.grad, 0.*:param.grad, 0.*:param.acc"
    with kedge.hook(model, sites, kedge.measure()) as stats:
        (model(x) * torch.arange(8.0).view(4, 2)).sum().backward()
    weight, bias = model[0].weight.grad, model[0].bias.grad
    assert stats["0:out.grad"].sum == 28.0
    assert stats["0:in.grad"].rms == pytest.approx(x.grad.square().mean().sqrt().item(), rel=1e-6)
    for kind in ("param.grad", "param.acc"):
        assert stats[f"0.weight:{kind}"].absmax == pytest.approx(weight.abs().max().item())
        assert (stats[f"0.bias:{kind}"].min, stats[f"0.bias:{kind}"].max) == (
            bias.min(),
            bias.max(),
        )


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_is_not_counted_twice(reentrant: bool) -> None:
    """What a checkpoint runs again in the backward is measured once, unless it is asked for."""

    class Checkpointed(Work):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=reentrant)

    for recomputes, calls in ((False, 1), (True, 2)):
        model = Checkpointed()
        with kedge.hook(model, "body.0", kedge.measure(recomputes=recomputes)) as stats:
            model(torch.randn(5, 3, requires_grad=True)).sum().backward()
        assert stats["body.0"].calls == calls


def test_what_was_made_in_inference_mode_serves_outside_of_it() -> None:
    """A validation in inference mode may come first, in the middle, or last."""
    model, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU()), torch.randn(4, 3)
    for order in ((True, False), (False, True), (True, True, False, True)):
        with kedge.hook(model, "**", kedge.measure(keep=None)) as stats:
            for inference in order:
                with torch.inference_mode(mode=inference):
                    model(x)
        assert {r.rms for r in stats.records("0")} == {stats["0"].rms}
        assert sum(r.calls for r in stats.records("0")) == len(order)


@pytest.fixture
def doubles() -> Iterator[None]:
    """Make double precision the default."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("doubles")
def test_another_default_precision_changes_nothing() -> None:
    """Tables are float32 whatever new tensors are."""
    for dtype in (torch.float32, torch.float64):
        with kedge.hook(model := nn.Identity(), ":out", kedge.measure()) as stats:
            model(torch.tensor([3.0, 4.0], dtype=dtype))
        assert (stats[":out"].sumsq, stats[":out"].nonzero) == (25.0, 2)


def test_another_default_device_changes_nothing() -> None:
    """Numbers are counted where they are, not where new tensors are made."""
    with kedge.hook(model := nn.Identity(), ":out", kedge.measure()) as stats, torch.device("meta"):
        model(torch.tensor([3.0, 0.0], dtype=torch.float32, device="cpu"))
        model(torch.tensor([3.0, 0.0], dtype=torch.float64, device="cpu"))
    assert [r.nonzero for r in stats.records(":out")] == [1, 1]


def test_under_vmap_all_samples_are_measured() -> None:
    """The values of all samples are one value, and what is computed stays what it was."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.randn(5, 3)
    with kedge.hook(model, "**", kedge.measure()) as stats:
        out = torch.vmap(model)(x)
    assert_same_bits(out, torch.vmap(model)(x))
    assert stats["0"].count == 10
    assert stats["0"].rms == pytest.approx(model[0](x).square().mean().sqrt().item(), rel=1e-6)
    assert stats["1"].nonzero == int((out > 0).sum())


def test_gradients_of_samples_can_be_taken_while_measuring() -> None:
    """`torch.func.grad` under `vmap` gives what it gives unmeasured, over several steps."""
    model, x = nn.Linear(3, 2), torch.randn(5, 3)
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, params, x).square().sum()

    each = torch.vmap(torch.func.grad(loss), (None, 0))
    with kedge.hook(model, ":out, :in", kedge.measure()) as stats:
        found = [each(params, x) for _ in range(3)]
    for grads in found:
        assert_same_bits(grads, each(params, x))
    assert stats.records(":out")[-1].rms == pytest.approx(
        model(x).square().mean().sqrt().item(), rel=1e-6
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_graph_holds_nothing_of_the_measuring() -> None:
    """`torch.jit.trace` of a measured model gives the graph of the model alone."""
    model, x = nn.Sequential(nn.Linear(3, 2), nn.ReLU()), torch.randn(5, 3)
    plain = torch.jit.trace(model, x).code
    with kedge.hook(model, "**", kedge.measure()) as stats:
        model(x)
        traced = torch.jit.trace(model, x)
    assert traced.code == plain
    assert stats["0"].count == 10


def test_autocast_is_measured_in_its_own_precision() -> None:
    """Outputs in bfloat16 are measured as such, and gradients in float32."""
    model = nn.Sequential(nn.Linear(3, 2))
    with kedge.hook(model, "0:out, 0.weight:param.grad", kedge.measure()) as stats:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(torch.randn(5, 3))
        out.float().sum().backward()
    seats = {str(seat.site): seat.dtype for seat in stats.actions[0].sites.seats.values()}
    assert seats == {"0:out": "bfloat16", "0.weight:param.grad": "float32"}
    assert stats["0"].rms == pytest.approx(out.float().square().mean().sqrt().item(), rel=1e-5)


@needs_device
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64]
)
def test_a_gpu_measures_what_a_cpu_does(dtype: torch.dtype) -> None:
    """The same statistics, to the precision of float32; counts are equal."""
    value = torch.randn(1000, 300).relu().to(dtype)
    value[3, 5] = float("nan")
    for x in (value, value[1:10].T, value[:0], value[4]):
        found = []
        for device in ("cpu", DEVICE):
            with kedge.hook(model := nn.Identity(), ":out", kedge.measure()) as stats:
                model(x.to(device))
            found.append(stats[":out"])
        here, there = found
        for name in ("count", "nonzero", "nonfinite"):
            assert getattr(there, name) == getattr(here, name)
        for name in ("sum", "sumsq", "min", "max"):
            assert getattr(there, name) == pytest.approx(getattr(here, name), rel=1e-4, nan_ok=True)


@pytest.mark.skipif(
    not callable(_set_sync_debug_mode), reason="needs a device that can refuse to synchronise"
)
def test_a_measured_step_never_waits_for_the_gpu() -> None:
    """PyTorch itself raises if anything between the first forward and the end of a step synchronises."""
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 1)).to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.randn(8, 30, device=DEVICE)
    with kedge.hook(model, "**, **:out.grad, **:param.grad", kedge.measure()) as stats:
        for step in range(6):
            _set_sync_debug_mode("error" if step else "default")
            try:
                model(x).sum().backward()
                optimizer.step()
            finally:
                _set_sync_debug_mode("default")
    assert [r.step for r in stats.records("0")] == list(range(6))
