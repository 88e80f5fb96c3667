"""`torch.jit.script` takes a hooked model as it takes it without hooks."""

from __future__ import annotations

import pickle
import warnings

import pytest
import torch
from torch import nn

import kedge


class Net(nn.Module):
    """Modules in a list that is not called itself, a module twice, a buffer, an attribute, and an empty place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.again = self.layers[0]
        self.act = nn.Sequential(nn.ReLU())
        self.register_module("nothing", None)
        self.factor = 3

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them all."""
        for layer in self.layers:
            x = layer(x)
        return self.again(self.act(x)) * self.factor


class Prepared(nn.Linear):
    """A module that prepares itself."""

    def __prepare_scriptable__(self) -> nn.Module:
        plain = nn.Linear(2, 2)
        plain.weight, plain.bias = self.weight, self.bias
        return plain


@pytest.fixture(autouse=True)
def deprecated() -> None:
    """Ignore PyTorch's own warnings about TorchScript."""
    warnings.filterwarnings("ignore", message=".*torch.jit.*", category=DeprecationWarning)


@pytest.mark.parametrize(
    "make", [Net, lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU()), lambda: Prepared(2, 2)]
)
def test_a_hooked_model_is_scripted_without_its_hooks(make) -> None:
    """It computes the same, shares its parameters, and the model keeps its modules and its hooks."""
    model, x = make().eval(), torch.randn(3, 2)
    expected, before = model(x), list(model.modules())
    plain = torch.jit.script(model)

    with kedge.hook(model, ":out", kedge.record()) as acts:
        scripted = torch.jit.script(model)
        assert torch.equal(scripted(x), expected)
        assert torch.equal(model(x), expected)
        assert torch.equal(acts[":out"], expected)  # seen once: by the model's own call

    assert all(a is b for a, b in zip(before, model.modules(), strict=True))
    assert [p.data_ptr() for p in scripted.parameters()] == [
        p.data_ptr() for p in plain.parameters()
    ]
    assert list(scripted.state_dict()) == list(plain.state_dict())


def test_nothing_stays_on_the_model() -> None:
    """A hooked model has no attribute that it does not have without hooks, and nor has one that is loaded."""
    model = Net()
    before = set(vars(model))

    with kedge.hook(model, "**:out", kedge.measure()):
        assert set(vars(model)) == before
        model(torch.randn(3, 2))
        copied = pickle.loads(pickle.dumps(model))

    assert set(vars(model)) == set(vars(copied)) == before
