"""The graph of a forward without gradients: its operations, by module."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from kedge.errors import CannotDraw
from kedge.figures.graph import graph


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x):
        """Return the sum of the input and what the layer makes of it."""
        return functional.relu(self.a(x)) + x


class Net(nn.Module):
    """Two blocks, one of which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        """Return the softmax of three blocks."""
        return self.h[0](self.h[1](self.h[0](x))).softmax(-1)


@pytest.fixture
def model():
    """Give a model in evaluation mode."""
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def drawn(model):
    """Give the graph of its forward without gradients."""
    x = torch.ones(2, 4)
    with torch.no_grad():
        return graph(lambda: model(x), model)


def takes(drawn, number):
    """Return the names of the nodes that a node takes."""
    return [
        drawn.nodes[taken].leaf or drawn.nodes[taken].name for taken in drawn.nodes[number].takes
    ]


def test_operations_are_in_order_with_their_shapes(drawn):
    """Each operation is there once, in order, with the shape of its result."""
    operations = [node for node in drawn.nodes if node.kind == "operation"]

    assert [node.name for node in operations] == ["linear", "relu", "add"] * 3 + ["softmax"]
    assert {node.shape for node in operations} == {(2, 4)}
    assert not drawn.of_autograd
    assert str(drawn).startswith("10 operations; nothing requires grad\n")


def test_arrows_lead_from_the_operation_that_made_a_tensor(drawn):
    """An operation takes the results of those before it, parameters and inputs."""
    by_name = [node.number for node in drawn.nodes if node.kind == "operation"]
    linear, relu, add, second = by_name[:4]

    assert takes(drawn, linear) == ["input 0", "h.0.a.weight", "h.0.a.bias"]
    assert takes(drawn, relu) == ["linear"]
    assert takes(drawn, add) == ["relu", "input 0"]
    assert drawn.nodes[second].takes[0] == add


def test_operations_belong_to_the_calls_of_their_modules(drawn):
    """Each operation knows the calls of modules around it, and their numbers."""
    calls = [node.calls for node in drawn.nodes if node.name == "relu"]

    assert calls == [
        (("", 0), ("h.0", 0)),
        (("", 0), ("h.1", 0)),
        (("", 0), ("h.0", 1)),
    ]
    assert next(node.calls for node in drawn.nodes if node.name == "linear")[-1] == ("h.0.a", 0)


@pytest.mark.parametrize("has_dot", [True, False])
def test_it_is_drawn_folded(drawn, monkeypatch, has_dot):
    """It is drawn with dot and without, folded to the modules that are asked for."""
    if not has_dot:
        monkeypatch.setenv("PATH", "")
    svg = drawn.svg(depth=1)

    assert "h.0#1" in svg
    assert "softmax" in svg
    assert "relu" not in drawn.svg(depth=0)
    assert "linear" in drawn.svg(depth=1, expand="h.1.a")


def test_observing_changes_no_bit(model):
    """The model's result, its buffers and the random state are the same as without a graph."""
    model.train()
    x = torch.randn(2, 4)
    seen = []
    torch.manual_seed(1)
    with torch.no_grad():
        plain = functional.dropout(model(x))
        state = torch.get_rng_state()
        torch.manual_seed(1)
        graph(lambda: seen.append(functional.dropout(model(x))) or seen[0], model)

    assert torch.equal(seen[0], plain)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_function_without_a_model_is_drawn():
    """Operations outside of modules are drawn, also those that work in place."""

    def f():
        a = torch.ones(3)
        b = a * 2
        b += a
        return b.sum()

    drawn = graph(f)
    assert [node.name for node in drawn.nodes] == ["ones", "mul", "add_", "sum"]
    assert [node.takes for node in drawn.nodes] == [(), (0,), (1, 0), (2,)]


def test_attention_is_the_operations_inside_of_it():
    """A function whose operations are seen is not drawn beside them."""
    attention = nn.MultiheadAttention(4, 2)
    x = torch.randn(5, 1, 4)
    with torch.no_grad():
        drawn = graph(lambda: attention(x, x, x), attention)
    names = [node.name for node in drawn.nodes]

    assert "softmax" in names
    assert "multi_head_attention_forward" not in names


def test_with_gradients_it_is_autograds(model):
    """Where the result requires grad, the graph is the one that autograd has built."""
    drawn = graph(lambda: model(torch.ones(2, 4)), model)

    assert drawn.of_autograd
    assert "ReluBackward0" in [node.name for node in drawn.nodes]


def test_a_forward_without_an_operation_is_refused():
    """A function that makes no operation has no graph, and the message says so."""
    with pytest.raises(CannotDraw, match="no visible operation"):
        graph(lambda: None)
