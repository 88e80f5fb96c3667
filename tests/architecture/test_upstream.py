"""PyTorch's own list of hooks: Kedge uses each or says why not, so a new one does not go unnoticed."""

from __future__ import annotations

import ast
import re

import pytest
import torch
from torch.autograd import graph
from torch.nn.modules import module
from torch.optim import optimizer

OWNERS = {
    "Module": torch.nn.Module,
    "Tensor": torch.Tensor,
    "Node": graph.Node,
    "Optimizer": torch.optim.Optimizer,
    "torch.autograd.graph": graph,
    "torch.nn.modules.module": module,
    "torch.optim.optimizer": optimizer,
}

SUPPORTED = {
    "Module.register_forward_hook": "out, and out.grad of what comes out",
    "Module.register_forward_pre_hook": "in, param, and in.grad of what goes in",
    "Tensor.register_hook": "out.grad, in.grad, param.grad, and hooks on tensors",
    "Tensor.register_post_accumulate_grad_hook": "param.acc",
    "Node.register_hook": "in.share, and hooks on nodes",
    "Node.register_prehook": "hooks on nodes: what arrives there",
    "torch.nn.modules.module.register_module_forward_hook": "the digest log of a verified run, which leaves nothing on modules",
    "torch.nn.modules.module.register_module_forward_pre_hook": "finds root modules at their first call, for hooks on every model and for a watched script",
    "torch.nn.modules.module.register_module_module_registration_hook": "sees that a strict export begins",
    "torch.optim.optimizer.register_optimizer_step_post_hook": "counts steps, whichever optimizer takes them",
    "torch.optim.optimizer.register_optimizer_step_pre_hook": "the parameters before a step, to compare with",
}

_STATE = "state_dict is not a value that flows in a pass"
_BITS = "puts a node into the graph, which changes the bits of gradients and refuses in-place ops: tensor hooks do not"
_BUILDING = "fires while a model is built, before there is a site"
_GLOBAL_STEP = "the hook for all optimizers sees this one too"
DECLINED = {
    "Module.register_full_backward_hook": _BITS,
    "Module.register_full_backward_pre_hook": _BITS,
    "Module.register_backward_hook": "deprecated: it sees the gradients of the last operation alone",
    "Module.register_state_dict_pre_hook": _STATE,
    "Module.register_state_dict_post_hook": _STATE,
    "Module.register_load_state_dict_pre_hook": _STATE,
    "Module.register_load_state_dict_post_hook": _STATE,
    "Module._register_state_dict_hook": _STATE,
    "Module._register_load_state_dict_pre_hook": _STATE,
    "Node._register_hook_dict": "private: how a tensor shares its hooks with its node",
    "Optimizer.register_step_pre_hook": _GLOBAL_STEP,
    "Optimizer.register_step_post_hook": _GLOBAL_STEP,
    "Optimizer.register_state_dict_pre_hook": _STATE,
    "Optimizer.register_state_dict_post_hook": _STATE,
    "Optimizer.register_load_state_dict_pre_hook": _STATE,
    "Optimizer.register_load_state_dict_post_hook": _STATE,
    "torch.autograd.graph.register_multi_grad_hook": "fires once for several tensors; here each gradient is an event",
    "torch.autograd.graph._register_logging_hooks_on_whole_graph": "private: PyTorch's own log of a backward pass",
    "torch.nn.modules.module.register_module_backward_hook": _BITS,
    "torch.nn.modules.module.register_module_full_backward_hook": _BITS,
    "torch.nn.modules.module.register_module_full_backward_pre_hook": _BITS,
    "torch.nn.modules.module.register_module_buffer_registration_hook": _BUILDING,
    "torch.nn.modules.module.register_module_parameter_registration_hook": _BUILDING,
}


def every_way():
    """Return every way to register a hook that this version of PyTorch offers."""
    return {
        f"{name}.{way}"
        for name, owner in OWNERS.items()
        for way in dir(owner)
        if re.search("register_.*hook", way)
    }


@pytest.fixture(scope="module")
def offered():
    """Every way to register a hook that this version of PyTorch offers."""
    return every_way()


def test_every_hook_of_torch_is_supported_or_declined(offered):
    """A hook that is new in PyTorch is decided on, not overlooked."""
    assert offered - SUPPORTED.keys() - DECLINED.keys() == set()


def test_every_decision_is_about_a_hook_that_exists(offered):
    """A hook that PyTorch dropped is no longer spoken of, and none is decided on twice."""
    assert (SUPPORTED.keys() | DECLINED.keys()) - offered == set()
    assert SUPPORTED.keys() & DECLINED.keys() == set()


def test_what_is_supported_is_what_the_code_registers(sources):
    """Kedge's own code uses exactly the hooks that the table says it supports."""
    used = {
        node.attr if isinstance(node, ast.Attribute) else node.id
        for source in sources
        if source.folder in {"hooks", "inspection", "repro", "verify"}
        for node in ast.walk(source.tree)
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load)
    }

    assert {name for name in used if re.search("register_.*hook", name)} == {
        way.rpartition(".")[2] for way in SUPPORTED
    }
