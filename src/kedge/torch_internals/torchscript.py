"""Hooked models that the program passes to `torch.jit.script`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from kedge.torch_internals.module_tables import own_children

Unhooked = Callable[[Mapping[str, Any]], dict[str, Any]]


def twin_of(module: nn.Module, unhooked: Unhooked, known: dict[int, nn.Module] | None = None) -> nn.Module:
    """Return a module without Kedge's hooks that shares parameters and buffers; so do all modules inside it.

    The inner modules have to be twins too: scripting replaces modules by their prepared form in their container, which
    must not be the program's own model.
    """
    known = {} if known is None else known
    if isinstance(module, torch.jit.ScriptModule):
        return module
    if id(module) not in known:
        twin = known[id(module)] = type(module).__new__(type(module))
        twin.__dict__ = {
            name: dict(held) if name in ("_parameters", "_buffers") else held
            for name, held in unhooked(module.__dict__).items()
        }
        twin.__dict__["_modules"] = {
            name: inner if inner is None else twin_of(inner, unhooked, known)
            for name, inner in own_children(module).items()
        }
    return known[id(module)]
