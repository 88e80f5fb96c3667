"""Operations as features: what a forward computes between its modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import kedge
from kedge.errors import NotRecorded
from kedge.testing import assert_same_bits, assert_unhooked
from tests.gallery.models import Functional, resnet18


def test_a_functional_relu_and_a_module_are_taken_together() -> None:
    """M11: the pool's output and the F.relu before it, equal to a forward edited by hand, and the forward ends behind them."""
    torch.manual_seed(0)
    model, ran = Functional().eval(), []
    handle = model.fc.register_forward_hook(lambda *_: ran.append(1))
    features = kedge.extract(model, ["pool", "/relu", "/view:in"], rename={"/relu": "active"})
    for _ in range(3):
        x = torch.randn(1, 3, 8, 8)
        out = features(x)
        active = F.relu(model.conv(x)).detach()
        assert_same_bits(
            out, {"pool": model.pool(active), "active": active, "/view:in": model.pool(active)}
        )
        assert list(out["pool"].shape) == [1, 8, 4, 4]
        assert torch._C._len_torch_function_stack() == 0
    assert ran == [1]
    handle.remove()
    assert_unhooked(model)


@pytest.mark.parametrize("no_grad", [True, False])
def test_operations_of_a_block_called_twice_have_names_of_their_own(no_grad: bool) -> None:
    """Number of the operation and number of the call are told apart, and in-place operations behind overwrite nothing."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x) + x
            z = y + 1
            y.mul_(2)
            return z.relu_()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.block(self.block(x))

    model = Twice()
    features = kedge.extract(model, "block/add", no_grad=no_grad)
    for _ in range(3):
        x, expected = torch.randn(2, 3), {}
        value = x
        for call in range(2):
            y = (model.block.fc(value) + value).detach()
            expected |= {f"block#{call}/add#0": y, f"block#{call}/add#1": y + 1}
            value = (y + 1).relu()
        out = features(x)
        assert all(v.requires_grad is not no_grad for v in out.values())
        assert_same_bits({name: v.detach() for name, v in out.items()}, expected)


def test_an_operation_that_is_not_there_is_an_error_with_its_cause() -> None:
    """The message lists what the forward makes."""
    with pytest.raises(NotRecorded, match="conv2d|max_pool2d|relu"):
        kedge.extract(Functional().eval(), "/gelu")(torch.randn(1, 3, 8, 8))


def test_operations_of_a_residual_net() -> None:
    """The sum of a residual block is what its last ReLU is given, and it is in place."""
    torch.manual_seed(0)
    model, x = resnet18().eval(), torch.randn(1, 3, 32, 32)
    features = kedge.extract(model, ["layer2.1/add_", "layer2.1"])
    for _ in range(3):
        out = features(x)
        assert_same_bits(out["layer2.1/add_"].relu(), out["layer2.1"])
        assert out["layer2.1/add_"].lt(0).any()
