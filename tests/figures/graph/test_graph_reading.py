"""The graph that autograd has made, read: operations, bytes, calls and hooks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.errors import CannotDraw, NoSiteMatched
from kedge.figures.graph import graph


class Block(nn.Module):
    """A residual block that uses one ReLU twice."""

    def __init__(self, width=8):
        super().__init__()
        self.a, self.relu, self.b = (
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width, bias=False),
        )

    def forward(self, x):
        return self.relu(self.b(self.relu(self.a(x))) + x)


@pytest.fixture
def model():
    """Two blocks between two layers."""
    return nn.Sequential(nn.Linear(4, 8), Block(), Block(), nn.Linear(8, 2))


def step(model):
    """Make what runs a forward and returns its loss."""
    x = torch.randn(5, 4)
    return lambda: F.mse_loss(model(x), torch.zeros(5, 2))


def by_name(drawn, name):
    """Return the operations of a name."""
    return [node for node in drawn.nodes if node.name.startswith(name)]


def test_each_operation_is_known_to_be_of_a_call(model):
    """An operation belongs to the innermost call under way, with its number; a parameter to who takes it."""
    drawn = graph(step(model), model)
    relus = [node.calls[-1] for node in by_name(drawn, "Relu")]
    adds = [node.calls[-1] for node in by_name(drawn, "Add") if node.name == "AddBackward0"]

    assert drawn.followed
    assert relus == [("1.relu", 0), ("1.relu", 1), ("2.relu", 0), ("2.relu", 1)]
    assert adds == [("1", 0), ("2", 0)]
    assert by_name(drawn, "MseLoss")[0].calls == by_name(drawn, "MseLoss")[0].shape == ()
    assert [node.shape for node in by_name(drawn, "Addmm")] == [(5, 8), (5, 8), (5, 8), (5, 2)]
    assert {node.leaf: node.calls[-1][0] for node in drawn.nodes if node.kind == "parameter"} == {
        name: name.rpartition(".")[0] for name, _ in model.named_parameters()
    }


def test_a_graph_that_is_there_is_placed_by_parameters(model):
    """Without the forward, operations that take parameters are of the module that owns them, others of what is around."""
    followed, drawn = graph(step(model), model), graph(step(model)(), model)
    layers = {"AddmmBackward0", "MmBackward0", "TBackward0"}

    assert not drawn.followed
    assert [n.name for n in drawn.nodes] == [n.name for n in followed.nodes]
    assert [n.calls for n in drawn.nodes if n.name in layers] == [
        n.calls for n in followed.nodes if n.name in layers
    ]
    assert [node.calls[-1][0] for node in by_name(drawn, "Relu")] == ["1", "", "2", ""]


@pytest.mark.parametrize("make", ["blocks", "convolutions", "attention"])
def test_the_bytes_are_those_of_the_account(make):
    """What the graph saves is, to the byte, what the account of saved tensors says is held."""
    torch.manual_seed(0)
    net, x = {
        "blocks": lambda: (nn.Sequential(nn.Linear(4, 8), Block(), Block()), torch.randn(5, 4)),
        "convolutions": lambda: (
            nn.Sequential(
                nn.Conv2d(1, 4, 3),
                nn.BatchNorm2d(4),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(2),
                nn.Dropout(),
            ),
            torch.randn(2, 1, 8, 8),
        ),
        "attention": lambda: (
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
            torch.randn(2, 3, 8),
        ),
    }[make]()
    drawn = graph(lambda: net(x), net)

    assert drawn.bytes == kedge.saved(net)(x).total.bytes > 0


def test_reading_changes_no_bit_and_keeps_nothing(model):
    """Outputs and gradients are those of a forward that was not read, and the graph dies with its results."""
    twin, run = copy.deepcopy(model), step(model)
    torch.manual_seed(1)
    plain = step(twin)
    torch.manual_seed(1)
    run = step(model)
    losses = []
    drawn = graph(lambda: losses.append(run()) or losses[0], model)
    losses[0].backward()
    plain().backward()

    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True)
    )
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert len(drawn) > 20
    assert "Tensor" not in str(
        {type(value).__name__ for node in drawn.nodes for value in vars(node).values()}
    )


def test_reading_twice_gives_the_same(model):
    """The order of nodes is that of execution, leaves in the order of their use, and no accident of memory."""
    run = step(model)
    first, second = graph(run, model), graph(run, model)

    assert first.nodes == second.nodes
    assert first.dot() == second.dot()


def test_hooks_are_seen_where_they_are(model):
    """Hooks on nodes, on tensors and on leaves are named, Kedge's own by site and action; reading adds none."""
    made = []

    def mine(grad):
        return None

    def run():
        x = torch.randn(5, 4)
        hidden = model[0](x)
        hidden.register_hook(mine)
        loss = model[3](model[2](model[1](hidden))).sum()
        loss.grad_fn.register_prehook(lambda grads: None)
        model[3].bias.register_post_accumulate_grad_hook(mine)
        made.append(loss)
        return loss

    with kedge.session() as session:
        session.hook(model, "1.a:out.grad, 2:in.share", kedge.record())
        session.hook(model, "0.weight:param.grad", torch.zeros_like)
        drawn = graph(run, model)
        again = graph(made[0], model)
        made[0].backward()
    found = {str(hook) for node in drawn.nodes for hook in node.hooks}
    owned = {hook.name for node in drawn.nodes for hook in node.hooks if hook.owner == "kedge"}

    assert {name.split()[0] for name in owned} == {
        "1.a:out.grad",
        "2:in.share",
        "0.weight:param.grad",
    }
    assert any(
        hook.startswith("tensor: ") and "mine" in hook and "test_graph_reading.py" in hook
        for hook in found
    )
    assert any(hook.startswith("pre: ") and "lambda" in hook for hook in found)
    assert any(hook.startswith("accumulated: ") for hook in found)
    assert {node.number: node.hooks for node in again.nodes if node.kind != "operation"} == {
        node.number: node.hooks for node in drawn.nodes if node.kind != "operation"
    }


def test_what_is_freed_or_recomputed_is_not_unpacked(model):
    """A checkpoint's recompute is not run by reading, and what its graph will save is said to be recomputed."""
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append(1))
    x = torch.randn(5, 8, requires_grad=True)
    drawn = graph(lambda: checkpoint(model[1], x, use_reentrant=False).sum(), model[1])

    assert len(calls) == 1
    assert {field.why for node in drawn.nodes for field in node.saved if not field.bytes} >= {
        "checkpoint"
    }
    assert drawn.bytes == 0


def test_arguments_are_named_and_leaves(model):
    """An input that requires grad is a leaf under the name of its argument."""
    x = torch.randn(5, 4, requires_grad=True)
    (leaf,) = [node for node in graph(lambda: model(x), model).nodes if node.kind == "leaf"]

    assert (leaf.leaf, leaf.shape, leaf.calls) == ("0", (5, 4), ())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (lambda model: model, "a model has no graph until it is called"),
        (lambda model: torch.ones(3), r"float32\[3\]"),
        (lambda model: {"a": torch.ones(3)}, "nothing in it requires grad"),
    ],
)
def test_what_has_no_graph_is_refused(model, given, said):
    """What makes no graph is refused, and the message says what does."""
    with pytest.raises(CannotDraw, match=said):
        graph(given(model), model)


def test_a_selector_of_nothing_is_refused(model):
    """A selector that opens no module of the graph is an error that names some."""
    with pytest.raises(NoSiteMatched, match="matches no module that made a node"):
        graph(step(model), model).dot(expand="nowhere")
