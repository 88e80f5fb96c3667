"""The private attributes of PyTorch's objects are read in one folder, and set nowhere else."""

from __future__ import annotations

import ast
import inspect
import re

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers
from torch.utils import data, hooks

from kedge.torch_internals import corners

SHARED = {
    "_fields",
    "_replace",
    "_asdict",
}  # of named tuples, which return types of PyTorch are too
NEVER_GONE = {
    *("_getframe", "_current_frames"),  # of Python
    "_replicate_for_data_parallel",  # PyTorch asks for it, and so has it
}
NAMED = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}


class _Own(torch.autograd.Function):
    """A function of a program, whose nodes have names that no other has."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, g):
        return g


def _under(thing):
    return {name for name in dir(thing) if name.startswith("_") and not name.startswith("__")}


@pytest.fixture(scope="module")
def private():
    """Every name with one underscore that an object of PyTorch has, or a module that holds its global tables."""
    layer = nn.Linear(1, 1)
    own = _Own.apply(torch.ones(1, requires_grad=True)).grad_fn
    nodes = [kind for kind in vars(torch._C._functions).values() if inspect.isclass(kind)]
    things = [
        *(Tensor, nn.Parameter, DTensor, torch.UntypedStorage, torch.TypedStorage),
        *(layer, nn.LSTM(1, 1), nn.DataParallel, torch.optim.SGD(layer.parameters(), 0.1)),
        *(Node, own, type(own), *nodes),
        *(hooks.RemovableHandle, data.DataLoader),
    ]
    everywhere = {
        name for each in (modules, optimizers) for name in vars(each) if name.startswith("_global")
    }
    names = (
        set().union(*map(_under, things))
        | everywhere
        | {"_orig_mod", "_is_replica", "_is_flat_param"}
    )
    assert {
        "_version",
        "_base",
        "_backward_hooks",
        "_sequence_nr",
        "_saved_self",
        "_parameters",
    } <= names
    return names - SHARED


def _reached(tree):
    """Yield every attribute of something that is not the object itself, and every name that is asked for as text."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
                yield node, node.attr
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in NAMED:
            own = isinstance(node.args[0], ast.Name) and node.args[0].id in {"self", "cls"}
            yield from ((a, a.value) for a in node.args if isinstance(a, ast.Constant) and not own)
        elif isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            yield node, node.left.value  # "_parameters" in vars(module)
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            yield node, node.slice.value  # vars(module)["_parameters"]


def test_private_attributes_of_torch_s_objects_are_read_in_one_folder(sources, private):
    """A tensor, a module, a node, an optimizer, a storage: what is hidden in one has a function in ``torch_internals``."""
    found = {
        f"{source.at(node)} {name}"
        for source in sources
        if not source.name.startswith("torch_internals/")
        for node, name in _reached(source.tree)
        if isinstance(name, str) and name in private
    }
    assert found == set()


def test_no_module_of_torch_is_named_as_text_elsewhere(sources):
    """Private modules that Kedge waits for, or looks for among those imported, are named in that folder too."""
    found = {
        f"{source.at(node)} {node.value}"
        for source in sources
        if not source.name.startswith("torch_internals/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith("torch._")
    }
    assert found == set()


def test_what_may_be_gone_is_in_a_corner_or_has_a_default(sources):
    """A release of PyTorch that lacks a private attribute costs a feature, and raises nothing."""
    listed = {
        name.removesuffix("()")
        for corner in corners.CORNERS
        for path in corner.privates
        for name in re.split(r"[:. ]", path)
    }
    found = {
        f"{source.at(node)} {node.attr}"
        for source in sources
        if source.name.startswith("torch_internals/")
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and re.match("_[a-zA-Z]", node.attr)
        if node.attr not in listed | _asked_for(source.tree) | _own(source.tree) | NEVER_GONE
    }
    assert found == set(), (
        "add these to a Corner with what their absence costs, or ask by getattr with a default"
    )


def _asked_for(tree):
    """Return the names that a file asks for in a way that does without them."""
    return {
        node.args[1].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if (node.func.id, len(node.args)) in {("hasattr", 2), ("getattr", 3)}
        if isinstance(node.args[1], ast.Constant)
    }


def _own(tree):
    """Return the attributes that a file itself sets, and the methods that it defines."""
    nodes = list(ast.walk(tree))
    made = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    return made | {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }


@pytest.mark.parametrize(
    "text",
    [
        "x._version",
        "value._base is None",
        "getattr(p, '_post_accumulate_grad_hooks', None)",
        "'_buffers' in vars(m)",
    ],
)
def test_such_a_use_would_be_seen(text, private):
    """Whether by a dot, by its name as text, or in a module's own table."""
    assert any(name in private for _, name in _reached(ast.parse(text)))
