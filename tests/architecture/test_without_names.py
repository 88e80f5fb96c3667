"""What a PyTorch without one of the names costs: that feature, as `kedge --version -v` says, and nothing beside it."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
import torch
from torch import nn

from kedge.torch_internals import tensors
from tests import forked

PROGRAM = """
import json, sys
from kedge.torch_internals import corners
case, *blind = sys.argv[1:]
resolve, gone = corners._resolve, {path for c in corners.CORNERS if c.name in blind for path in c.privates}
corners._resolve = lambda path: None if path in gone else resolve(path)

import torch
from torch import nn
import kedge

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.act, self.last = nn.Linear(3, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False)
    def forward(self, x):
        return self.last(torch.tanh(self.act(self.linear(x))))

torch.manual_seed(0)
model, x = Net(), torch.randn(5, 3)

def held_by(node):
    return type(node._raw_saved_self.data).__name__

def offloaded():
    with kedge.offload(model, to=kedge.Disk(), min_bytes=1):
        return held_by(model(x).grad_fn) != "Tensor"

def versions():
    with kedge.session() as session:
        kept = session.hook(model, "last:out", kedge.record())
        same = model(x).data_ptr() == kept["last"].data_ptr()
    return same, offloaded()

def storages():
    from kedge.sites.leaves import storage_of
    return storage_of(x) == storage_of(x[1:]) != storage_of(x.clone()), offloaded()

def aliases():
    seen = []
    with kedge.session() as session:
        session.hook(model, "linear:out.grad", lambda grad: seen.append("plain"))
        session.hook(model, "last:out.grad", lambda grad: seen.append("changed"))
        out = model(x)
        out.add_(1)
        out.sum().backward()
    return sorted(seen)

def zeros():
    from kedge.torch_internals.tensors import is_only_zeros
    return is_only_zeros(torch._efficientzerotensor((2,))), is_only_zeros(x), is_only_zeros(x[:0])

def hook_tables():
    from kedge.testing import assert_unhooked
    given = x.clone().requires_grad_()
    model.linear.weight.register_hook(lambda grad: None)
    model.linear.weight.register_post_accumulate_grad_hook(lambda param: None)
    model.linear.register_forward_hook(lambda *_: None)
    kinds = [(e.kind, e.path) for e in kedge.audit(model)]
    with kedge.session() as session:
        session.hook(model, ":in.grad", kedge.scale(2.0))
        for _ in range(3):
            model(given).sum().backward()
        assert any(e.owner == "kedge" for e in kedge.audit(model))
    assert [(e.kind, e.path) for e in kedge.audit(model)] == kinds
    return kinds, given.grad.tolist()

def wrapped_hooks():
    from kedge.inspection.effects import function_in
    def loading(module, *args): pass
    model._register_load_state_dict_pre_hook(loading, with_module=True)
    (hook,) = model._load_state_dict_pre_hooks.values()
    return type(function_in(hook)).__name__

def module_tables():
    from kedge.torch_internals import module_tables as tables
    norm = nn.BatchNorm1d(3)
    with kedge.session() as session:
        kept = session.hook(model, "linear.weight:param", kedge.record())
        model(x)
    before = dict(tables.own_buffers(norm))
    norm.running_mean = torch.ones(3)
    norm.register_buffer("more", torch.ones(1))
    tables.put_back(norm, before)
    assert norm.running_mean is before["running_mean"] and not hasattr(norm, "more")
    return tables.is_made(norm), tables.is_made(nn.Module.__new__(nn.Module)), kept["linear.weight"].tolist()

def compiled_entries():
    compiled = []
    def backend(graph, inputs):
        compiled.append(graph)
        return graph
    other, alone = torch.compile(nn.Linear(3, 3), backend=backend), nn.Linear(3, 3)
    other(x)
    with kedge.hook(alone, ":out", kedge.record()):
        alone(x)
    other(x)
    return len(compiled)

def module_calls():
    with kedge.session() as session:
        kept = session.hook(model, "/tanh:out", kedge.record())
        model(x)
        return kept["/tanh"].tolist()

def autograd_nodes():
    from kedge.inspection.autograd_graph import read_graph
    nodes = read_graph(model(x).sum())
    assert all(before < node.number for node in nodes for before in node.takes if node.kind == "operation")
    return [node.name for node in nodes]

def saved_fields():
    from kedge.hooks.saved.reference import KeptByReference
    from kedge.offload.held.handle import HandleByReference
    from kedge.offload.rebuild import find
    given = x.clone().requires_grad_()
    return find(nn.functional.gelu(given), lambda saved: HandleByReference(KeptByReference(given))) is not None

print(json.dumps(globals()[case]()))
"""

LOST = {
    "versions": ([True, True], [False, False]),
    "storages": ([True, True], [True, False]),
    "aliases": (["changed", "plain"], ["plain"]),
    "saved_fields": (True, False),
    "compiled_entries": (1, 2),
    "wrapped_hooks": ("function", "_WrappedHook"),
}
"""What is seen with the names and without them, where that differs."""

THE_SAME = ("zeros", "hook_tables", "module_tables", "module_calls")
"""Corners for which there is another way, which takes longer."""


def _run(case: str, *blind: str) -> Any:
    command = [sys.executable, "-c", PROGRAM, case, *blind]
    ran = forked.run(command)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("corner", LOST)
def test_without_its_names_a_corner_s_feature_is_lost(corner):
    """And goes without a word: nothing is raised."""
    seen, lost = LOST[corner]
    assert _run(corner) == seen
    assert _run(corner, corner) == lost


@pytest.mark.parametrize("corner", THE_SAME)
def test_without_its_names_a_corner_s_feature_takes_another_way(corner):
    """With the same result."""
    assert _run(corner, corner) == _run(corner)


def test_nodes_without_numbers_are_put_in_an_order_in_which_each_follows_what_it_needs():
    """A graph that is read without them names the same nodes; what is a leaf comes first there."""
    assert sorted(_run("autograd_nodes", "autograd_nodes")) == sorted(_run("autograd_nodes"))


def test_what_is_here_of_a_tensor_is_had_by_its_public_name_too():
    """A tensor that is spread over several processes shows its part under two names; a plain one has neither."""

    class Spread:
        def to_local(self):
            return torch.ones(2)

    assert torch.equal(tensors.part_here(Spread()), torch.ones(2))
    assert tensors.part_here(nn.Parameter(torch.ones(1))) is None
