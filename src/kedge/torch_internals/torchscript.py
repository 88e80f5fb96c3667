"""Modules in TorchScript, which runs them without Python and so without their hooks.

# Note [Called by TorchScript]
PyTorch calls the hooks of a traced model where Python calls it as a whole. Those of the modules
inside, and of everything that was scripted, frozen or loaded, are never called: TorchScript runs
them as one program. A traced model inside a scripted one is run by that, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from kedge.torch_internals.module_tables import modules_in


def is_scripted(module: Any) -> bool:
    """Whether a module is in TorchScript: scripted, traced, frozen or loaded."""
    return isinstance(module, torch.jit.ScriptModule)


def takes_hooks(module: Any) -> bool:
    """Whether the hooks of a module are called, if Python calls it.

    See Note [Called by TorchScript].
    """
    whole: Any = torch.jit.TopLevelTracedModule  # type: ignore[attr-defined] # it is not in `__all__`
    return not is_scripted(module) or isinstance(module, whole)


def called_by_torchscript(modules: Mapping[str, nn.Module]) -> set[int]:
    """Return the ids of a model's modules whose hooks are never called.

    See Note [Called by TorchScript].

    Args:
        modules: All modules of the model, by every path that they have.
    """
    if not any(map(is_scripted, modules.values())):
        return set()
    by_python = set()
    for path, module in modules.items():
        outside = not any(is_scripted(modules.get(each)) for each in _around(path))
        if outside and takes_hooks(module):
            by_python.add(id(module))
    return {id(module) for module in modules.values()} - by_python


def whole_around(path: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the path of the traced model that a module is in, or is, if Python calls its hooks; else None.

    Args:
        path: The path of the module.
        modules: All modules of the model, by every path that they have.
    """
    silent = called_by_torchscript(modules)
    for each in (*_around(path), path):
        module = modules.get(each)
        if is_scripted(module) and id(module) not in silent:
            return each
    return None


def _around(path: str) -> list[str]:
    """Return the paths of the modules around one, with that of the model, which is empty."""
    if not path:
        return []
    names = path.split(".")
    return [".".join(names[:end]) for end in range(len(names))]


def is_frozen(module: Any) -> bool:
    """Whether `torch.jit.freeze` took a module, whose parameters and modules are constants since."""
    if not is_scripted(module):
        return False
    # Its mode is gone, too, until `train` or `eval` of a model around it gives it an attribute.
    return "training" in vars(module) or not hasattr(module, "training")


def has_mode(module: nn.Module) -> bool:
    """Whether a module says whether it is in training mode; a frozen one need not."""
    return hasattr(module, "training")


def modes_of(model: nn.Module) -> dict[nn.Module, bool]:
    """Return what each module of a model says of its mode, if it says so."""
    return {each: each.training for each in modules_in(model).values() if has_mode(each)}


def is_training(module: nn.Module) -> bool:
    """Whether a module is in training mode.

    A frozen one computes as in evaluation.
    """
    return not is_frozen(module) and module.training


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class; in TorchScript, of the class that it was made from."""
    if is_scripted(module):
        return str(getattr(module, "original_name", type(module).__name__))
    return type(module).__name__
