"""What stands in PyTorch's hook tables, and in which order."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as optim_module

MODULE_TABLES = [
    name for name, table in vars(nn.Module()).items() if "hook" in name and hasattr(table, "items")
]
TENSOR_TABLES = ("_backward_hooks", "_post_accumulate_grad_hooks")


def global_tables() -> dict[str, list[Any]]:
    """Every hook that PyTorch calls for all modules and all optimizers."""
    found: dict[str, list[Any]] = {}
    for module in (nn_module, optim_module):
        tables = {
            n: t
            for n, t in vars(module).items()
            if n.startswith("_global_") and "hooks" in n and hasattr(t, "items")
        }
        found |= {n: list(t.items()) for n, t in tables.items()}
    return found


def hook_tables(*things: nn.Module | torch.Tensor) -> dict[str, Any]:
    """Everything hooked on models and tensors and globally, with the names of the models' attributes."""
    found: dict[str, Any] = dict(global_tables())
    for n, thing in enumerate(things):
        tensors = (
            {"": thing}
            if isinstance(thing, torch.Tensor)
            else dict(thing.named_parameters(remove_duplicate=False))
        )
        modules = (
            {}
            if isinstance(thing, torch.Tensor)
            else dict(thing.named_modules(remove_duplicate=False))
        )
        for name, module in modules.items():
            found |= {f"{n}.{name}.{t}": list(vars(module)[t].items()) for t in MODULE_TABLES}
            found[f"{n}.{name}.__dict__"] = list(vars(module))
        for name, tensor in tensors.items():
            found |= {
                f"{n}.{name}.{t}": list((getattr(tensor, t) or {}).items()) for t in TENSOR_TABLES
            }
    return found
