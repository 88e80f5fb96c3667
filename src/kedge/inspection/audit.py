"""The existing hooks on a model, a tensor, a node or an optimizer: their owners and effects.

It calls and changes nothing: it reads the tables of hooks, and the hooks' own source and
attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node
from torch.nn.utils import parametrize
from torch.optim import Optimizer

from kedge.calls.arguments import called_as, described, not_a_model
from kedge.errors import WrongCall
from kedge.hooks.gates.variables import UNNAMED, name_of_argument, variables_around
from kedge.inspection.audit_graph import NodeAudit, TensorAudit, audit_node, audit_tensor
from kedge.inspection.audit_optimizer import OptimizerAudit, audit_optimizer
from kedge.inspection.effects import CopyTrial, FoundHook, Standing, standings
from kedge.inspection.hook_entries import EVERY_OPTIMIZER, KINDS, Audit, HookEntry, entry_of
from kedge.torch_internals import dynamo, hook_tables
from kedge.torch_internals.module_tables import buffers_in, modules_in, parameters_in

__all__ = ["EVERY_MODULE", "EVERY_OPTIMIZER", "KINDS", "Audit", "HookEntry", "audit"]

EVERY_MODULE = "every module"
Names = nn.Module | Mapping[str, Tensor] | None


@overload
def audit(target: nn.Module, names: Names = None) -> Audit: ...


@overload
def audit(target: Tensor, names: Names = None) -> TensorAudit: ...


@overload
def audit(target: Node | GradientEdge, names: Names = None) -> NodeAudit: ...


@overload
def audit(target: Optimizer, names: Names = None) -> OptimizerAudit: ...


@called_as("kedge.audit(model)")
def audit(target: Any, names: Names = None) -> Audit:
    """List every hook that is already on a model, a tensor, an autograd node or an optimizer.

    The result has, for each hook, its owner, its place in the firing order, and its effects.

    On a model, it finds the hooks of modules, parameters and buffers, global hooks of modules and
    optimizers, parametrizations, a replaced ``forward``, and `torch.compile`. It does not find
    hooks on autograd nodes (`torch.nn.parallel.DistributedDataParallel` has its own there), nor
    those on a single optimizer: audit these themselves.

    For a tensor or a node, the result also describes the graph behind it and the hooks there; for
    an optimizer, the parameters that it holds.

    Args:
        target: A model, also a compiled one; a tensor; an autograd node or a `GradientEdge`; or an
            optimizer.
        names: For tensors, nodes and optimizers: a model or a dict of tensors, which gives leaves
            and parameters their names. By default these are the global variables of the program
            and, from Python 3.13 on, the variables of the calling function.

    Returns:
        The hooks, as an `Audit` that prints; empty if there are none.

    Raises:
        WrongCall: If the target is something else.

    Examples:
        >>> print(kedge.audit(model))
        this model has no hooks
    """
    if not (names is None or isinstance(names, (nn.Module, Mapping))):
        raise WrongCall(
            f"audit(names={described(names)}): "
            "names is a model, or a dict of tensors by their names"
        )
    if isinstance(target, nn.Module):
        return _audit_model(target)
    if isinstance(target, Tensor):
        name = name_of_argument("audit", "target", target)
        named = _named(names)
        if name == UNNAMED:
            known = (name for name, tensor in named.items() if tensor is target)
            name = next(known, UNNAMED)
        return audit_tensor(target, name, named)
    if isinstance(target, GradientEdge):
        return audit_node(target.node, _named(names))
    if isinstance(target, Node):
        return audit_node(target, _named(names))
    if isinstance(target, Optimizer):
        return audit_optimizer(target, _named(names))

    wrong = not_a_model(target)
    if isinstance(target, (list, tuple, dict)):
        wrong += "; audit several one by one"
    raise WrongCall(
        f"audit takes a torch.nn.Module, a tensor, an autograd node or an optimizer, not {wrong}"
    )


def _named(names: Names) -> Mapping[str, Tensor]:
    if names is None:
        return variables_around()
    if isinstance(names, nn.Module):
        return parameters_in(dynamo.unwrap(names))
    return names


def _audit_model(model: nn.Module) -> Audit:
    inner = dynamo.unwrap(model)
    named = list(modules_in(inner).items())
    if inner is not model:
        named.insert(0, ("", model))

    where = standings(module for _, module in named)
    around: Standing = "inside" if where else ""
    found = [*_on_modules(named, where), *_on_tensors(inner), *_on_everything(around)]
    trial = CopyTrial({id(module) for _, module in named})
    entries = tuple(entry_of(each, trial) for each in found)
    return Audit(type(inner).__name__, entries, audited=weakref.ref(inner))


def _on_modules(
    named: list[tuple[str, nn.Module]], where: Mapping[int, Standing]
) -> Iterator[FoundHook]:
    for path, module in named:
        for found in _on_module(module):
            name = f"{path}{found.path}".removeprefix(".")
            yield replace(found, path=name, compiled=where.get(id(module), ""))


def _on_module(module: nn.Module) -> Iterator[FoundHook]:
    """Yield the hooks on one module, as if it were the whole model."""
    own = vars(module)
    name = type(module).__name__
    if dynamo.unwrap(module) is not module:
        yield FoundHook("compiled", "torch.compile", "", name, module=module)
    elif "forward" in own and not isinstance(module, torch.jit.ScriptModule):
        yield FoundHook("replaced-forward", own["forward"], "", name, module=module)
    if dynamo.is_compiled_in_place(module):
        yield FoundHook("compiled", "Module.compile", "", name, module=module)
    if parametrize.is_parametrized(module):
        for tensor, several in module.parametrizations.items():  # type: ignore[operator,union-attr]
            for i, one in enumerate(several):
                yield FoundHook("parametrization", one, f".{tensor}", "parametrized", i, module)
    for one in hook_tables.hooks_on_module(module):
        yield FoundHook(one.kind, one.hook, "", name, one.order, module, one.flags)


def _on_tensors(model: nn.Module) -> Iterator[FoundHook]:
    kinds: dict[str, Mapping[str, Tensor]] = {
        "Parameter": parameters_in(model),
        "buffer": buffers_in(model),
    }
    for type_, tensors in kinds.items():
        for name, tensor in tensors.items():
            for one in hook_tables.hooks_on_tensor(tensor):
                yield FoundHook(one.kind, one.hook, name, type_, one.order)


def _on_everything(standing: Standing) -> Iterator[FoundHook]:
    for one in hook_tables.hooks_on_every_module():
        where = "" if one.kind == "registration" else standing
        yield FoundHook(one.kind, one.hook, EVERY_MODULE, "", one.order, None, one.flags, where)
    for one in hook_tables.hooks_on_every_optimizer():
        yield FoundHook(one.kind, one.hook, EVERY_OPTIMIZER, "", one.order)
