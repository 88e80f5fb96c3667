"""Modules in TorchScript, which runs them without Python and so without their hooks."""

from __future__ import annotations

from typing import Any

import torch


def takes_hooks(module: Any) -> bool:
    """Whether the hooks of a module are called.

    Of a traced model only those of the whole are, of a scripted one none.
    """
    whole: Any = torch.jit.TopLevelTracedModule  # type: ignore[attr-defined] # it is not in `__all__`
    return not isinstance(module, torch.jit.ScriptModule) or isinstance(module, whole)
