"""`kedge.operations`: what operations a model's forwards make, with shapes and source lines."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kedge.inspection.operations import operations
from kedge.testing import assert_hooks_restored, assert_same_bits


class Net(nn.Module):
    """A block that is called twice, with a buffer, dropout, and several ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        for _ in range(2):
            x = self.drop(self.norm(self.fc(x)))
        x = F.relu(x) + F.relu(-x)  # the line of four
        return torch.cat([x, x]) * scale


def test_the_table_names_shapes_and_lines() -> None:
    """Each operation stands in the order of the forward with what goes in, what comes out, and its line."""
    table = operations(Net(), torch.randn(3, 4), scale=2.0)
    names = [table.name(row) for row in table]
    assert names == [
        "fc#0/linear", "norm#0/add_", "norm#0/batch_norm", "drop#0/dropout",
        "fc#1/linear", "norm#1/add_", "norm#1/batch_norm", "drop#1/dropout",
        "/relu#0", "/neg", "/relu#1", "/add", "/cat", "/mul",
    ]  # fmt: skip
    relu = table["/relu#1"]
    assert (relu.inputs, relu.outputs) == ({"0": (3, 4)}, {"": (3, 4)})
    assert relu.source is not None
    assert relu.source.text == "x = F.relu(x) + F.relu(-x)  # the line of four"
    assert table["/cat"].inputs == {"0.0": (3, 4), "0.1": (3, 4)}
    assert len(table) == len(names)
    lines = str(table).splitlines()
    assert lines[0].split() == ["operation", "in", "out", "line"]
    assert lines[13].split()[:5] == ["/cat", "[3,", "4]", "[3,", "4]"]
    assert lines[1].endswith("return F.linear(input, self.weight, self.bias)")
    assert "torch/nn/modules/linear.py:" in lines[1]
    assert "site-packages" not in lines[1]
    assert "<table" in table._repr_html_()


def test_every_name_selects_its_operation() -> None:
    """What the table calls an operation is a selector under which it is recorded."""
    import kedge

    net, x = Net(), torch.randn(3, 4)
    for row in (table := operations(net, x)):
        with kedge.hook(net, table.name(row), kedge.record()) as acts:
            net(x)
        assert tuple(acts[table.name(row)].shape) == row.outputs[""]


def test_the_model_is_as_before() -> None:
    """Buffers, gradients, random numbers, versions of parameters and hooks are what they were."""
    net, x = Net(), torch.randn(3, 4)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    rng, versions = torch.get_rng_state(), [p._version for p in net.parameters()]
    with assert_hooks_restored(net):
        operations(net, x)
    assert_same_bits(state, dict(net.state_dict()))
    assert torch.equal(rng, torch.get_rng_state())
    assert [(p._version, p.grad) for p in net.parameters()] == [
        (version, None) for version in versions
    ]


def test_an_error_of_the_forward_comes_through() -> None:
    """What the forward raises is raised, and nothing stays behind."""
    net = Net()
    with (
        assert_hooks_restored(net),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        operations(net, torch.randn(3, 5))
    assert not net.norm.num_batches_tracked


def test_a_name_that_is_not_there() -> None:
    """The error names some that are."""
    with pytest.raises(KeyError, match="no operation is called"):
        operations(Net(), torch.randn(3, 4))["/gelu"]


def test_a_model_without_operations_says_so() -> None:
    """An identity has nothing to list."""
    assert str(operations(nn.Identity(), torch.ones(1))) == "its forward makes no visible operation"


def test_the_inside_of_attention_has_lines_of_its_own() -> None:
    """Operations inside of attention show the line of the function that makes them."""
    table = operations(nn.MultiheadAttention(8, 2), *[torch.randn(5, 5, 8)] * 3)
    source = table["/softmax"].source
    assert source is not None
    assert source.file.endswith("functional.py")
    assert source.text is not None
    assert "softmax(" in source.text
