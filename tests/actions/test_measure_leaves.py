"""Outputs of several tensors: a row for each, and none of them mixed into another's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.rules.registry import check
from tests.watch.watched import watch


class Returns(nn.Module):
    """Returns what a function makes of its input."""

    def __init__(self, make: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> object:
        """Return the structure."""
        return self.make(x)


def rms(value: Tensor) -> float:
    """Return the root mean square of a value."""
    return float(value.detach().square().mean().sqrt())


def test_the_states_of_a_recurrent_net_are_not_mixed_into_its_output() -> None:
    """The row of the module is that of its first tensor, and each state has a row under its own name."""
    torch.manual_seed(0)
    net = nn.LSTM(4, 8)
    with kedge.hook(net, ":out, :out.grad", kedge.measure()) as stats:
        output, (hidden, cell) = net(torch.rand(5, 3, 4))
        (output.sum() + 7 * cell.sum()).backward()
    for name, value in ((":out", output), (":out[1.0]", hidden), (":out[1.1]", cell)):
        assert stats[name].rms == pytest.approx(rms(value))
        assert stats[name].count == value.numel()
    assert (stats[":out.grad"].count, stats[":out.grad[1.1]"].mean) == (output.numel(), 7)


@pytest.mark.parametrize("only", [":out", ":out.grad"])
def test_rows_are_few_however_many_tensors_a_module_returns(only: str) -> None:
    """Those after the first few share one row, which holds all their numbers."""
    model = Returns(lambda x: {f"k{i}": x * (i + 1) for i in range(300)})
    with kedge.hook(model, only, kedge.measure()) as stats:
        x = torch.ones(2, requires_grad=True)
        for _ in range(2):
            sum(model(x).values()).sum().backward()
    found = stats.records(f"{only}[rest]")
    assert len(stats.names()) == 10
    assert sum(one.count for one in found) == 2 * 2 * (300 - 9)


def test_gradients_have_the_names_of_the_values() -> None:
    """However late a tensor of the output is used, its gradient stands beside it; those of the rest are the rest's."""
    model = Returns(lambda x: [x * i for i in range(20)])
    with kedge.hook(model, ":out, :out.grad", kedge.measure()) as stats:
        values = model(torch.ones(2, requires_grad=True))
        (values[19] * 3 + values[2] * 5 + values[0]).sum().backward()
    gradients = {
        name: stats[name].mean for name in (":out.grad", ":out.grad[2]", ":out.grad[rest]")
    }
    assert gradients == {":out.grad": 1, ":out.grad[2]": 5, ":out.grad[rest]": 3}


def test_a_module_that_returns_one_tensor_or_several_keeps_the_row_of_the_first() -> None:
    """As one with auxiliary outputs in training alone."""
    model = Returns(lambda x: (x, x * 9) if x.sum() > 0 else x)
    with kedge.hook(model, ":out", kedge.measure()) as stats:
        for x in (-torch.ones(2), torch.ones(2), -torch.ones(2)):
            model(x)
    assert [one.count for one in stats.records(":out")] == [2, 2, 2]
    assert stats[":out[1]"].mean == 9


def test_a_nan_in_a_later_tensor_is_a_finding_of_its_module() -> None:
    """Rules see every row of an output: the module made it, though the first tensor is finite."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
            self.two = Returns(lambda x: (x * 2, (x - 1e9).sqrt() if self.bad else x))
            self.bad = False

        def forward(self, x: Tensor) -> Tensor:
            first, second = self.two(self.fc(x))
            return self.head(first + second)

    def program() -> None:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for step in range(6):
            model.bad = step == 4
            optimizer.zero_grad()
            model(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()

    recording = watch(program, every=1).recording()
    assert recording.rows("two:out").clean[:5].all()
    assert recording.rows("two:out[1]").nan.tolist()[4] == 20
    (finding,) = [f for f in check(recording) if f.code == "NAN-BORN"]
    assert (finding.site, finding.step, finding.evidence.module) == ("two:out[1]", 4, "two")


class Weighs(nn.Module):
    """Takes three tensors that mean different things."""

    def forward(self, query: Tensor, key: Tensor, *, mask: Tensor) -> Tensor:
        """Use the last first."""
        return mask * 3 * (key * 5 + query)


@pytest.mark.parametrize("only", ["in, :in.grad", "in.grad"])
def test_the_inputs_of_a_module_are_not_mixed(only: str) -> None:
    """The first in the forward has the plain name, the others have their own, for values and gradients."""
    query, key, mask = (torch.full((2,), float(i), requires_grad=True) for i in (2, 3, 4))
    model = Weighs()
    with kedge.hook(model, f":{only}", kedge.measure()) as stats:
        for _ in range(2):
            model(query, key, mask=mask).sum().backward()
    if only != "in.grad":
        values = {name: stats[name].mean for name in (":in", ":in[key]", ":in[mask]")}
        assert values == {":in": 2, ":in[key]": 3, ":in[mask]": 4}
    gradients = {name: stats[name].mean for name in (":in.grad", ":in.grad[key]", ":in.grad[mask]")}
    assert gradients == {":in.grad": 12, ":in.grad[key]": 60, ":in.grad[mask]": 51}


@pytest.mark.parametrize("kinds", [":in", ":in.grad", ":in, :in.grad"])
def test_one_input_has_the_plain_name(kinds: str) -> None:
    """However it is given, and also beside an action that takes events."""
    model = nn.Linear(3, 3)
    with kedge.session() as s:
        stats = s.hook(model, kinds, kedge.measure())
        s.hook(model, kinds, lambda value, event: None)
        alone = s.hook(model, kinds, kedge.measure())
        for given in ({"input": torch.ones(2, 3, requires_grad=True)},):
            model(**given).sum().backward()
            model(*given.values()).sum().backward()
        wanted = kinds.split(", ")
        assert list(stats) == list(alone) == wanted
