"""The operations of a function: by name and line, with statistics of their results."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import kedge
from kedge.torch_internals import modes


def scaled(x: Tensor, by: float = 1.0) -> Tensor:
    """Call one function on two lines, one of them in a loop."""
    y = torch.relu(x * by)
    for _ in range(3):
        y = torch.relu(y - 1)
    y[0] = math.inf
    return y.sum()


def test_each_function_has_a_row_for_each_line_with_its_shapes_and_statistics() -> None:
    """Non-finite numbers are counted, and left out of the rest."""
    x = torch.tensor([1.0, -2, 3, 5])
    found = kedge.operations(scaled, x, by=2.0)

    assert [(row.name, row.calls) for row in found] == [
        ("mul", 1), ("relu#0", 1), ("sub", 3), ("relu#1", 3), ("setitem", 1), ("sum", 1),
    ]  # fmt: skip
    mul = found["mul"]
    assert (mul.inputs, mul.outputs, mul.count) == ([(4,)], [(4,)], 4)
    assert (mul.mean, mul.least, mul.largest) == (3.5, -4, 10)
    assert mul.rms == pytest.approx((x * 2).square().mean().sqrt().item())
    assert (found["sub"].count, found["sub"].largest) == (12, 9)
    assert (found["setitem"].nonfinite, found["setitem"].largest) == (1, 7)
    assert math.isnan(found["sum"].mean)
    assert found["relu#1"].source.text == "y = torch.relu(y - 1)"
    assert str(found).splitlines()[0].split() == [
        *("operation", "calls", "in", "out", "mean", "rms", "min", "max", "nonfinite", "line"),
    ]
    assert str(found).splitlines()[-1].split()[:8] == ["sum", "1", "[4]", "[]", "-", "-", "-", "-"]
    assert "<table" in found._repr_html_()
    with pytest.raises(KeyError, match='no operation is called "tanh"; there are mul, relu#0'):
        found["tanh"]


def test_only_what_is_outside_of_modules_backwards_and_optimizers_counts() -> None:
    """A module has its own list, see ``kedge.operations(model, x)``."""
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        out = model(torch.ones(2, 3))
        out.register_hook(lambda grad: grad * 2)
        (out * 2).sum().backward()
        optimizer.step()

    assert [row.name for row in kedge.operations(step)] == ["ones", "mul", "sum"]
    assert str(kedge.operations(lambda: None)) == "it makes no operation outside of modules"
    assert "no operation" in kedge.operations(lambda: None)._repr_html_()


class Counting(TorchFunctionMode):
    """A mode of the program."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        """Note a call."""
        self.seen.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_nothing_is_changed_or_kept() -> None:
    """Results, random numbers and gradients are as without; other modes see the program's calls and stay; tensors go."""
    x, made = torch.ones(3, requires_grad=True), []

    def draws() -> None:
        y = (x * torch.rand(3)).sum()
        made.append(weakref.ref(y))

    state = torch.get_rng_state()
    gc.collect()
    gc.disable()
    try:
        with Counting() as mine:
            kedge.operations(draws)
            assert {"rand", "mul", "sum"} < set(mine.seen)
            assert "isfinite" not in mine.seen
        assert made[-1]() is None
    finally:
        gc.enable()
    assert modes.function_modes() == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_an_error_of_the_function_is_its_own() -> None:
    """And the mode is gone."""
    with pytest.raises(RuntimeError, match="must match"):
        kedge.operations(lambda: torch.ones(2) + torch.ones(3))
    assert modes.function_modes() == 0


def test_values_that_cannot_be_read_are_left_alone() -> None:
    """Integers have no statistics; sparse and meta tensors no row; a transform is passed over."""
    found = kedge.operations(
        lambda: (torch.arange(3), torch.ones(2, device="meta"), torch.eye(2).to_sparse() * 2)
    )
    assert [(row.name, row.count) for row in found] == [("arange", 0), ("eye", 4)]
    kedge.operations(lambda: torch.func.grad(lambda t: t.exp().sum())(torch.ones(2)))


@pytest.mark.parametrize("what", [3, nn.Linear, torch.ones(2)])
def test_anything_else_is_refused(what: object) -> None:
    """With what to give."""
    with pytest.raises(
        TypeError,
        match="operations takes a torch.nn.Module or a function, then its arguments, not (3|the class Linear|a Tensor)",
    ):
        kedge.operations(what)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_pass_through_an_operation() -> None:
    """One that makes them has no numbers to show; one that takes them has the shapes of their parts."""
    parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    found = kedge.operations(lambda: (parts * 2).to_padded_tensor(0.0))
    assert [(row.name, row.inputs, row.outputs) for row in found] == [
        ("to_padded_tensor", [((2,), (3,))], [(2, 3)])
    ]
