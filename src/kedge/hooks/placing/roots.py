"""The modules that a program calls itself, told from the parts of others; and their names.

A root is found at its first call, by a global forward-pre hook. Parts of a root are never roots.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from kedge.by_identity import ByIdentity
from kedge.torch_internals import dynamo
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.module_tables import is_replica, modules_in


class SeenModules(ByIdentity[nn.Module, None]):
    """Modules that have been called, or are part of a root; held weakly."""

    def __init__(self) -> None:
        super().__init__()
        self._never_roots: ByIdentity[nn.Module, None] = ByIdentity()

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Add modules, until they no longer exist."""
        self.update((module, None) for module in modules)

    def discard(self, module: nn.Module) -> None:
        """Forget a module, so that its next call counts as its first."""
        self.pop(module, None)

    def candidate(self, module: nn.Module) -> nn.Module | None:
        """Add a module at its first call.

        Returns:
            The module that may be a root: itself, or the model inside of it; None if there is none.
        """
        if module in self or self.is_never_root(module) or in_backward():
            return None
        self.add([module])
        inner = unwrapped(module)
        wrapped_late = inner is not module and inner in self
        captured = (
            isinstance(module, torch.fx.GraphModule) and dynamo.has_compiled()
        )  # a graph, not the user's module
        unhookable = isinstance(module, torch.jit.ScriptModule)
        return None if wrapped_late or captured or unhookable else inner

    def is_never_root(self, module: nn.Module) -> bool:
        """Whether a module never becomes a root.

        It may be a replica; or it may compute a parameter, for which PyTorch calls it while the
        owner is being built.
        """
        if isinstance(module, ParametrizationList):
            self._never_roots.update((inside, None) for inside in modules_in(module).values())
        return module in self._never_roots or is_replica(module)


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside a compiling or replicating wrapper."""
    module = dynamo.unwrap(module)
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return unwrapped(module.module) if isinstance(module, parallel) else module


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a class's name, with a number if it is taken: ``Linear``, ``Linear_2``, ``Linear_3``."""
    numbered = (f"{name}_{i}" for i in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)
