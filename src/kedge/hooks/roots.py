"""The models that a program calls itself, told from the parts of others: their names, and the hooks on them.

# Note [First calls]
A root is found at its first call, by a global forward-pre hook, and hooked before its forward runs.
Parts of a root are never roots. PyTorch has collected the hooks of that call before, so whoever
finds the root runs those forward-pre hooks that it has just registered.

# Note [Models that come and go]
Nothing here keeps a model alive. When one is gone, its hooks are removed, and another may have its
name and continue its counts.
"""

from __future__ import annotations

import inspect
import itertools
import sys
from collections.abc import Collection, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from kedge.by_identity import ByIdentity
from kedge.hooks.firing.owner import Owner
from kedge.hooks.placing.module_calls import given_to
from kedge.hooks.target import HookedModel
from kedge.torch_internals import dynamo
from kedge.torch_internals.graph_task import in_backward
from kedge.torch_internals.hook_tables import before_forward
from kedge.torch_internals.module_calls import module_frame
from kedge.torch_internals.module_tables import is_replica, modules_in
from kedge.torch_internals.torchscript import takes_hooks


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
        unhookable = not takes_hooks(module)
        if wrapped_late or captured or unhookable:
            return None
        return inner

    def is_never_root(self, module: nn.Module) -> bool:
        """Whether a module never becomes a root.

        It may be a replica; or it may compute a parameter, for which PyTorch calls it while the
        owner is being built.
        """
        if isinstance(module, ParametrizationList):
            self._never_roots.update((inside, None) for inside in modules_in(module).values())
        return module in self._never_roots or is_replica(module)


class HookedRoot:
    """The hooks on a root, removed together; see Note [Models that come and go].

    Args:
        owner: The session.
        model: The root.
        prefix: The first part of its sites' paths.

    Attributes:
        target: The hooked model.
    """

    def __init__(self, owner: Owner, model: nn.Module, prefix: str) -> None:
        self.owner = owner
        self._undo = ExitStack()
        with self.attaching():
            self.target = HookedModel(owner, model, prefix)
        self.target.held = None  # the program decides how long its models live

    def module(self) -> nn.Module | None:
        """Return the root, if it still exists."""
        return self.target.model()

    @contextmanager
    def attaching(self) -> Iterator[None]:
        """Install hooks that are removed with this root, all of them or none."""
        installed = self.owner.installed
        outer, installed.cleanup = installed.cleanup, self._undo
        try:
            with installed.attaching():
                yield
        finally:
            installed.cleanup = outer

    def begin_call(self, module: nn.Module, args: Any, hooks: Iterable[Any]) -> Any:
        """Run forward-pre hooks of a call that has begun without them, in PyTorch's way; see Note [First calls].

        Args:
            module: The module.
            args: The arguments of the call, by position.
            hooks: The hooks.

        Returns:
            The arguments by position if they changed, for PyTorch; else None.
        """
        given = args
        by_name: dict[str, Any] = (given_to(module) or (args, {}))[1]
        kwargs = by_name
        for hook in hooks:
            if len(inspect.signature(hook).parameters) > 2:
                args, kwargs = hook(module, args, kwargs) or (args, kwargs)
            else:
                hook(module, args)
            if hook is self.target.begin:
                # as if it had called the hook, for a model that calls itself
                self.target.passes.here.frame = module_frame(sys._getframe(1))
        if kwargs is not by_name:
            # PyTorch's own dict for this call, which a global hook cannot return
            by_name.clear()
            by_name.update(kwargs)
        return args if args is not given else None

    def release(self) -> None:
        """Remove all hooks."""
        self._undo.close()
        self.target.release()


def new_hooks(module: nn.Module, known: Collection[int]) -> list[Any]:
    """Return the forward-pre hooks of a module that were registered since it had those with the known keys."""
    return [hook for key, hook in before_forward(module).items() if key not in known]


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside a compiling or replicating wrapper."""
    module = dynamo.unwrap(module)
    parallel = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    if isinstance(module, parallel):
        return unwrapped(module.module)
    return module


def free_name(name: str, taken: Container[str]) -> str:
    """Return a name, with a number if it is taken: ``Linear``, ``Linear_2``, ``Linear_3``."""
    numbered = (f"{name}_{i}" for i in itertools.count(2))
    return next(each for each in itertools.chain([name], numbered) if each not in taken)
