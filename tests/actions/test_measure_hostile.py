"""What programs may do while a value is measured, and values that few have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kedge.actions.measure.meter import Meter, measure
from kedge.sites.site import Site


def rows(meter: Meter) -> dict[str, list[dict[str, Any]]]:
    """The rows that a meter has kept, by the path of their site."""
    meter.finish()
    names = {seat.id: seat.site.path for seat in meter.sites.seats.values()}
    found: dict[str, list[dict[str, Any]]] = {}
    for parts in meter.kept.steps.values():
        for part in parts:
            for i, site in enumerate(part["site"].tolist()):
                found.setdefault(names[site], []).append(
                    {name: part[name][i] for name in ("max", "saturated", "sampled", "active")}
                )
    return found


@pytest.mark.parametrize("before", [0, 200, 253, 254, 255])
@pytest.mark.parametrize("name", ["is_neg", "__get__"])
def test_a_mode_may_call_what_is_measured_from_within(name: str, before: int) -> None:
    """As a mode that runs a probe at each call does: nothing is overwritten, also where the table grows in the midst."""
    meter = measure(keep=None)
    outer, inner = (meter.bind_value(Site(path, "out")) for path in ("outer", "inner"))
    outer(torch.ones(5), 0)
    inner(torch.full((5,), 2.0), 0)
    kept = [torch.ones(5) for _ in range(before + 100)]
    probes: list[Tensor] = []

    class Probing(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if getattr(function, "__name__", "") == name and len(probes) < 300:
                probes.append(torch.full((5,), 2.0))
                inner(probes[-1], 0)
            return function(*args, **(kwargs or {}))

    for value in kept[:before]:
        outer(value, 0)
    with Probing():
        for value in kept[before:]:
            outer(value, 0)
    found = rows(meter)
    assert [row["max"] for row in found["outer"]] == [1.0] * (len(kept) + 1)
    assert [row["max"] for row in found["inner"]] == [2.0] * (len(probes) + 1)
    assert len(probes) >= 100


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("border", [0.7, 0.9, 1.0])
def test_what_is_cut_off_is_saturated_in_every_format(border: float, dtype: torch.dtype) -> None:
    """The border is a number that the format has."""
    meter = measure()
    meter.draws = True
    meter.sites.saturates("act", "between", (-border, border))
    value = nn.Hardtanh(-border, border)(torch.linspace(-2, 2, 100).to(dtype))
    meter.bind_value(Site("act", "out"))(value, 0)
    cut = int((value.abs() == value.abs().max()).sum())
    assert [row["saturated"] for row in rows(meter)["act"]] == [cut]
    assert cut >= 50


def test_how_an_activation_saturates_may_be_known_late() -> None:
    """What comes from then on is counted."""
    meter = measure()
    meter.draws = True
    act = meter.bind_value(Site("act", "out"))
    act(torch.ones(10), 0)
    meter.sites.saturates("act", "tanh", ())
    act(torch.ones(10), 1)
    assert [row["saturated"] for row in rows(meter)["act"]] == [-1, 10]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(4, 0),
        torch.ones(3, 3).to_sparse(),
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(2, 3, dtype=torch.complex64),
        torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
    ],
    ids=["empty", "sparse", "whole", "complex", "nested"],
)
def test_a_softmax_of_what_has_no_largest_is_passed_over(value: Tensor) -> None:
    """And what comes next is measured."""
    meter = measure()
    meter.draws = True
    meter.sites.saturates("act", "softmax", (-1,))
    act = meter.bind_value(Site("act", "out"))
    act(torch.tensor([[0.1, 0.9999]]), 0)
    act(value, 1)
    act(torch.tensor([[0.1, 0.9999], [0.5, 0.5]]), 2)
    assert [row["saturated"] for row in rows(meter)["act"]][::2] == [1, 1]


@pytest.mark.parametrize("inside", [0, 1])
def test_an_input_has_its_source_on_both_sides_of_a_transform(inside: int) -> None:
    """What a module outside made and one inside is given, and the other way round."""
    meter = measure(keep=None)
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    outs = [meter.bind_value(Site(f"{i}", "out")) for i in range(2)]
    second = meter.bind_value(Site("1", "in"))

    def call(i: int, x: Tensor) -> Tensor:
        if i == 1:
            second(x, 0)
        y = layers[i](x)
        outs[i](y, 0)
        return y

    x = torch.randn(4, 3)
    for i in range(2):
        x = torch.vmap(lambda row, i=i: call(i, row))(x) if i == inside else call(i, x)
    sources = {str(seat.site): seat.sources for seat in meter.sites.seats.values()}
    assert sources["1:in"] == (meter.sites.seats[Site("0", "out")].id,)


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("what", ["full", "norm", "finite"])
@pytest.mark.parametrize("scale", [0.25, float("inf")])
def test_a_quantized_value_is_measured_as_what_it_stands_for(what: str, scale: float) -> None:
    """The statistics of a quantized tensor are those of its dequantized values, also where these are not finite."""
    numbers = torch.linspace(-3, 3, 64)
    values = [
        torch.quantize_per_tensor(numbers, scale, 0, torch.qint8),
        torch.quantize_per_channel(
            numbers.view(8, 8), torch.full((8,), scale), torch.zeros(8).long(), 0, torch.quint8
        ),
    ]
    for value in values:
        found = []
        for each in (value, value.dequantize()):
            meter = measure(what)  # type: ignore[arg-type]
            act = meter.bind_value(Site("", "out"))
            assert act is not None
            act(each, 0)
            found.append(meter.read(":out", str))
        assert str(found[0]) == str(found[1])
        assert found[0].count == 64


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("what", "followed"), [("full", True), ("norm", False)])
def test_the_channels_of_a_quantized_activation_are_followed(what: str, followed: bool) -> None:
    """Which of them have a number above zero is told as of other activations, where everything is measured."""
    numbers = torch.tensor([[1.0, -1.0, 0.0], [-1.0, -1.0, 2.0]])
    meter = measure(what)  # type: ignore[arg-type]
    meter.sites.channel_dims["act"] = None
    act = meter.bind_value(Site("act", "out"))
    act(torch.quantize_per_tensor(numbers, 0.25, 0, torch.qint8), 0)
    active = rows(meter)["act"][0]["active"]
    assert active == (bytes([0b10100000]) if followed else b"")
