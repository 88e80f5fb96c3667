"""The audit of a tensor and of an autograd node: their own hooks, those of the graph behind them, and their state."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import kedge
from kedge.inspection.audit import audit

HERE = "tests/inspect/test_audit_graph.py"


def double(grad: Tensor) -> Tensor:
    """Double a gradient."""
    return grad * 2


def nothing(*_: Any) -> None:
    """Be a hook of any kind."""


def facts(found: Any) -> dict[str, str]:
    """Return what is known of an object."""
    return dict(found.facts)


class Net:
    """``loss = relu(x @ w + b).sum()``, with its tensors."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.x, self.w = torch.ones(5, 3), torch.ones(3, 4, requires_grad=True)
        self.b = torch.zeros(4, requires_grad=True)
        self.h = (self.x @ self.w + self.b).relu()
        self.loss = self.h.sum()

    @property
    def names(self) -> dict[str, Tensor]:
        """The tensors by their names."""
        return {"w": self.w, "b": self.b, "h": self.h}


def test_a_tensors_own_hooks_have_owner_order_and_line() -> None:
    """Also those of Kedge, with their site and action."""
    z = torch.ones(2, requires_grad=True)
    z.register_hook(double)
    z.register_post_accumulate_grad_hook(nothing)
    with kedge.hook(z, kedge.scale(2)):
        found = audit(z)
        z.sum().backward()
    assert [(e.kind, e.path, e.type, e.order, e.name, e.owner, e.notes) for e in found] == [
        ("tensor", "z", "Tensor", 0, "double", f"{HERE}:{double.__code__.co_firstlineno}", ()),
        ("tensor", "z", "Tensor", 1, "TensorGate.fire", "kedge", (":grad scale(2)",)),
        (
            "post-accumulate",
            "z",
            "Tensor",
            0,
            "nothing",
            f"{HERE}:{nothing.__code__.co_firstlineno}",
            (),
        ),
    ]
    assert str(found).startswith(
        "3 hooks on z: 2 tensor, 1 post-accumulate\n\nvalue    float32[2] on cpu\nleaf     yes\n"
    )
    assert "runs outside compiled code" in str(found)
    assert audit(z) != found
    assert "<table" in found._repr_html_()


def test_the_hooks_in_the_graph_are_listed_with_their_places() -> None:
    """On nodes, on leaves, and on tensors in the middle that have a name."""
    net = Net()
    net.h.register_hook(double)
    net.h.grad_fn.register_prehook(nothing)
    net.b.register_hook(double)
    net.b.register_post_accumulate_grad_hook(nothing)
    with kedge.hook(net.loss.grad_fn, ":post", kedge.record()):
        found = audit(net.loss, net.names)
        net.loss.backward()
    assert {(e.kind, e.path, e.name) for e in found} == {
        ("tensor", "ReluBackward0 #4", "double"),
        ("node-pre", "ReluBackward0 #4", "nothing"),
        ("tensor", "b", "double"),
        ("post-accumulate", "b", "nothing"),
        ("node-post", "SumBackward0 #5", "SumBackward0:post record()"),
    }
    assert found.leaves == ("w", "b")
    assert found.of("node-pre")[0].owner == f"{HERE}:{nothing.__code__.co_firstlineno}"
    assert len(audit(net.loss, {})) == 3
    assert audit(net.loss, {}).leaves == ("[3, 4]", "[4]")


def test_the_state_of_a_tensor_is_told() -> None:
    """Leaf or not, its gradient, its version, the view, the graph and what it holds."""
    net = Net()
    found = audit(net.h, net.names)
    assert (
        found.is_leaf,
        found.requires_grad,
        found.retains_grad,
        found.version,
        found.made_by,
    ) == (
        *(False, True, False, 0),
        "ReluBackward0",
    )
    assert facts(found) == {
        "value": "float32[5, 4] on cpu",
        "leaf": "no: made by ReluBackward0",
        "grad": "not kept: call retain_grad() or hook the tensor",
        "version": "0: never changed in place",
        "graph": "3 operations back to 2 leaves: w, b",
        "holds": "140 B for backward",
    }
    assert found.bytes == 140
    assert str(found).startswith("this tensor has no hooks\n\nvalue ")
    assert not found
    assert [node.name for node in found.nodes if node.kind == "operation"] == [
        "MmBackward0",
        "AddBackward0",
        "ReluBackward0",
    ]
    net.h.retain_grad()
    net.loss.backward()
    assert facts(audit(net.h))["grad"] == "kept in .grad, now float32[5, 4]"
    assert (
        facts(audit(net.h))["holds"]
        == "0 B for backward; a backward has freed the rest, and another one raises"
    )
    with torch.no_grad():
        net.x.add_(1)[0].mul_(2)
    plain = audit(net.x[0])
    assert (plain.is_leaf, plain.requires_grad, plain.version, plain.nodes, plain.leaves) == (
        True,
        False,
        2,
        (),
        (),
    )
    assert facts(plain)["version"] == "2: changed in place 2 times"
    assert (
        facts(plain)["view"] == "of a tensor float32[5, 3], with which it shares memory and version"
    )
    assert facts(plain)["leaf"].startswith("yes: it does not require grad")


def test_a_node_has_its_hooks_what_it_takes_and_what_it_saved() -> None:
    """A `GradientEdge` stands for its node; the node of a leaf passes nothing on."""
    net = Net()
    node = net.h.grad_fn
    node.register_prehook(nothing)
    node.register_hook(nothing)
    found = audit(node, net.names)
    assert [(e.kind, e.path, e.order, e.name) for e in found] == [
        ("node-pre", "ReluBackward0", 0, "nothing"),
        ("node-post", "ReluBackward0", 0, "nothing"),
    ]
    assert [field.name for field in found.node.saved] == ["result"]
    assert [node.name for node in found.takes] == ["AddBackward0"]
    assert facts(found) == {
        "takes": "AddBackward0 #3",
        "saved": "result [5, 4]; 80 B held by it first",
        "graph": "3 operations back to 2 leaves: w, b",
        "holds": "140 B for backward",
    }
    assert audit(get_gradient_edge(net.h), net.names) == found
    net.loss.backward()
    assert facts(audit(node))["saved"] == "nothing any more: a backward has freed it"

    of_leaf = audit(get_gradient_edge(net.w).node, net.names)
    assert facts(of_leaf)["takes"] == "nothing: it passes no gradient on"
    assert of_leaf.leaves == ("w",)
    assert str(of_leaf).startswith("this node has no hooks")


def test_nothing_is_unpacked_run_or_kept() -> None:
    """Packed tensors and checkpoints stay as they are, and the objects go as before."""
    unpacked: list[Tensor] = []
    w = torch.ones(3, requires_grad=True)
    with saved_tensors_hooks(lambda t: t, lambda t: unpacked.append(t) or t):
        out = w.exp()
    calls: list[int] = []
    again = checkpoint(lambda t: (calls.append(0), t.exp())[1], out, use_reentrant=False)
    found = audit(again), audit(out.grad_fn)
    assert (unpacked, calls) == ([], [0])
    ref = weakref.ref(again)
    gc.collect()
    gc.disable()
    try:
        del again
        assert ref() is None
    finally:
        gc.enable()
    assert found[0].made_by == "ExpBackward0"


def test_a_model_gives_the_leaves_their_names() -> None:
    """So do the variables of the program, see the documentation."""
    model = nn.Linear(3, 2)
    assert audit(model(torch.ones(1, 3)), model).leaves == ("weight", "bias")
    assert audit(model(torch.ones(1, 3)).grad_fn, model).leaves == ("weight", "bias")


GLOBAL = nn.Linear(2, 2)


def test_global_variables_give_leaves_their_names() -> None:
    """Without an argument for them; the tensor itself has the name in the call."""
    made = GLOBAL(torch.ones(1, 2))
    assert audit(made).leaves == ("GLOBAL.weight", "GLOBAL.bias")
    assert audit(made).model == "made"
    assert audit(made * 2).model == "tensor"


@pytest.mark.parametrize("leaf", [True, False])
def test_the_effect_on_copies_is_as_said(leaf: bool) -> None:
    """A copied tensor lacks its hooks; pickle warns about those of `register_hook` alone."""
    z = torch.ones(2, requires_grad=True)
    z.register_hook(double) if leaf else z.register_post_accumulate_grad_hook(nothing)
    (entry,) = audit(z)
    said = next(effect.what for effect in entry.effects if effect.on == "pickle")
    assert said == "a pickled or deep-copied tensor lacks it" + (
        ", and pickle warns about that" if leaf else ""
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        copies = [pickle.loads(pickle.dumps(z)), copy.deepcopy(z)]
    assert ["hook" in str(w.message) for w in caught] == [True] * leaf
    assert not any(map(audit, copies))


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested tensors|sparse)")
def test_a_leaf_without_views_is_audited_as_others() -> None:
    """Sparse and nested leaves have a node that accumulates, too."""
    made = [
        torch.ones(2, 2).to_sparse(),
        torch.ones(2, 2).to_sparse_csr(),
        torch.nested.nested_tensor([torch.ones(2)]),
    ]
    for leaf, shape in zip(made, [(2, 2), (2, 2), ((2,),)], strict=True):
        found = kedge.audit(leaf.requires_grad_())
        assert [(node.name, node.kind, node.shape) for node in found.nodes] == [
            ("AccumulateGrad", "leaf", shape)
        ]
    assert kedge.audit(made[0] * 2, {"a": made[0]}).leaves == ("a",)


def test_a_tensor_hooked_under_another_name_shows_that_name() -> None:
    """The site that the ledger has is the one in the audit."""
    w = torch.ones(3, requires_grad=True)
    z = w * 2
    s = kedge.session()
    s.hook({"result": z}, kedge.scale(2))
    s.hook(z, kedge.scale(3))
    assert [e.notes for e in kedge.audit(z)] == [("result:grad scale(2)",), (":grad scale(3)",)]
    s.end(quiet=True)
