"""Values that are no dense tensors: sparse and nested ones are captured as they are, and stored only once they are dense."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import ExtractionFailed

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta:UserWarning"),
]
Make = Callable[[Tensor], Tensor]


def nested(x: Tensor) -> Tensor:
    """Return rows of several lengths as one tensor."""
    return torch.nested.as_nested_tensor([x[0, :2], *x[1:]])


def jagged(x: Tensor) -> Tensor:
    """Return parts of several lengths as one tensor, in the other layout of nested tensors."""
    return torch.nested.as_nested_tensor([x[:2], *[x] * (len(x) - 1)], layout=torch.jagged)


SPARSE: dict[str, Make] = {
    "coo": lambda x: x.relu().to_sparse(),
    "csr": lambda x: x.relu().to_sparse_csr(),
    "csc": lambda x: x.relu().to_sparse_csc(),
    "bsr": lambda x: x.relu().to_sparse_bsr((2, 2)),
}
NESTED: dict[str, Make] = {"nested": nested, "jagged": jagged}
KINDS = pytest.mark.parametrize(
    "make", [*SPARSE.values(), *NESTED.values()], ids=[*SPARSE, *NESTED]
)


def dense(value: Tensor) -> list[Tensor]:
    """Return the numbers of a tensor as dense ones."""
    return [
        part.detach().cpu() for part in (value.unbind() if value.is_nested else [value.to_dense()])
    ]


def same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are of one kind and have the same bits."""
    assert (one.layout, one.is_nested) == (other.layout, other.is_nested)
    return all(map(torch.equal, dense(one), dense(other)))


class Layer(nn.Module):
    """A module of one function."""

    def __init__(self, run: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor) -> Any:
        return self.run(x)


class Changed(nn.Module):
    """A model that changes in place what its inner module has returned."""

    def __init__(self, make: Make) -> None:
        super().__init__()
        self.inner = Layer(make)

    def forward(self, x: Tensor) -> Tensor:
        made = self.inner(x)
        (made.values() if made.layout in (torch.sparse_csc, torch.sparse_bsr) else made).mul_(2)
        return x


@KINDS
@pytest.mark.parametrize("no_grad", [True, False], ids=["no grad", "graph"])
def test_values_are_captured_as_they_are(make: Make, no_grad: bool) -> None:
    """In the first forward and later ones, as outputs and as inputs, with or without an early end."""
    net = nn.Sequential(nn.Linear(4, 4), Layer(make), Layer(lambda v: v))
    x = torch.randn(4, 4)
    features = kedge.extract(net, ["1", "2:in"], no_grad=no_grad)
    for _ in range(3):
        found = features(x)
        assert same(found["1"], make(net[0](x)))
        assert same(found["2:in"], found["1"])
        assert found["1"].requires_grad is not no_grad


@KINDS
def test_they_are_arguments_like_others(make: Make) -> None:
    """Lengths differ from batch to batch; a plan for one serves the next."""
    features = kedge.extract(nn.Sequential(Layer(lambda v: v), nn.Identity()), "0")
    for seed in range(3):
        given = make(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        assert same(features(given)["0"], given)
    assert len(features.work.plans) == 1


@KINDS
@pytest.mark.parametrize("part", [None, "values", "list"])
def test_a_change_in_place_does_not_reach_what_was_captured(make: Make, part: str | None) -> None:
    """Also of a part of it, which does not count the changes that the whole undergoes."""
    x = torch.randn(4, 4)
    values: Make = lambda v: (
        v.unbind()[1] if v.is_nested else (v.coalesce() if v.is_sparse else v).values()
    )
    taken = {None: lambda v: v, "values": values, "list": lambda v: [values(v)]}[part]
    features = kedge.extract(
        Changed(make), {"inner": None if part is None else taken}, early_stop=False
    )
    wanted = make(x)
    for _ in range(3):
        found = features(x)["inner"]
        if part is None:
            assert same(found, wanted)
        else:
            assert torch.equal(found[0] if part == "list" else found, values(wanted))


@KINDS
def test_a_data_set_of_them_names_the_transform(make: Make, tmp_path: Any) -> None:
    """Rows of a folder are dense; the message says what makes them so, and with it they are stored."""
    net, loader = nn.Sequential(Layer(make)), [torch.randn(4, 4)]
    with pytest.raises(
        ExtractionFailed, match="'0' is a .* tensor, and samples are stored as rows"
    ) as error:
        kedge.extract(net, "0").dataset(loader, tmp_path / "features")
    (remedy,) = re.findall(r"lambda v: (v\.\S+)$", str(error.value))
    stored = kedge.extract(net, {"0": lambda v: eval(remedy)}).dataset(
        loader, tmp_path / "features"
    )
    assert len(stored["0"]) == 4


def test_nested_values_of_a_device_are_captured(sim: Any) -> None:
    """As on the CPU, with the same bits; the simulated device has no other kind."""
    net, x = nn.Sequential(Layer(jagged), Layer(lambda v: v)), torch.randn(4, 4)
    wanted = jagged(x)
    features = kedge.extract(net, ["0", "1:in"])
    changed = kedge.extract(Changed(jagged), {"inner": lambda v: v.values()}, early_stop=False)
    for seed in range(4):
        sim.set_seed(seed)
        found = features(x.to("sim"))
        assert found["0"].device.type == "sim"
        assert same(found["0"], wanted)
        assert same(found["1:in"], wanted)
        assert torch.equal(changed(x.to("sim"))["inner"].cpu(), wanted.values())
