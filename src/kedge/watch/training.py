"""The watched parameters that each optimizer trains, and its parameters of no root so far.

As long as an optimizer holds parameters of no root, every step searches for new roots. If none is
found, a search of all objects finds the modules that hold these parameters, and parameters of no
module are watched as tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.by_identity import ByIdentity
from kedge.sites.leaves import own_part
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import parameters_in
from kedge.watch.models.holders import holders_of
from kedge.watch.models.models import Models
from kedge.watch.models.optimizers import KnownOptimizer, any_optimizer, params_of
from kedge.watch.models.roots import RootModule
from kedge.watch.models.slots import TensorSlot, slots_in
from kedge.watch.records.optimizer_updates import Updates
from kedge.watch.steps.steps import Steps

_SEARCHES = 20
"""Most times that all parameters of an optimizer are hooked again."""
_PATIENCE = 3
"""Steps of an optimizer to wait for the modules that its parameters belong to."""


class Training:
    """The connection between models and optimizers.

    Attributes:
        without_root: For each optimizer with parameters of no root, how often it has stepped.
    """

    def __init__(self, models: Models, updates: Updates, steps: Steps) -> None:
        self.models = models
        self.updates = updates
        self.steps = steps
        self.optimizers = steps.optimizers
        self.without_root: ByIdentity[Optimizer, int] = ByIdentity()

    def watch(self, module: nn.Module) -> RootModule:
        """Watch a new root.

        Optimizers may have stepped, or begun to, before it was first called.
        """
        root = self.models.watch(module)
        self.steps.add(root, self.models.roots)
        known = self.optimizers.known()
        if known:
            own = {id(p) for p in parameters_in(module).values()}
            for optimizer in known.values():
                if any(id(p) in own for p in params_of(optimizer)):
                    self._adopt(optimizer, self.optimizers.entry(optimizer))
        return root

    def watch_leaves(self, leaves: Sequence[Tensor]) -> None:
        """Watch the leaves of a program that has called no module, and has no optimizer for them.

        Then each further backward pass is a step.
        """
        if self.models.roots or any_optimizer():
            return
        tensors: list[Any] = [leaf for leaf in leaves if self.models.places.of(leaf) is None]
        if tensors:
            slots: dict[int, TensorSlot] = {id(leaf): weakref.ref(leaf) for leaf in tensors}
            self.models.watch_tensors(tensors, slots)

    def before_update(self, optimizer: Optimizer) -> KnownOptimizer:
        """Update the entry of an optimizer if it is new or may have changed, and return it."""
        entry = self.optimizers.entry(optimizer)
        if entry.grew(optimizer):
            self._adopt(optimizer, entry)
        if self.without_root and optimizer in self.without_root:
            self.without_root[optimizer] += 1
            if self.without_root[optimizer] >= _PATIENCE:
                self._watch_holders(optimizer, entry)
                self.without_root.pop(optimizer, None)
            elif not self.models.roots and any(p.grad is not None for p in params_of(optimizer)):
                self._watch_holders(optimizer, entry)
        if not self.updates.was_reached(optimizer):
            self._hook_all(optimizer, entry)
        return entry

    def _adopt(self, optimizer: Optimizer, entry: KnownOptimizer) -> None:
        self.models.release_gone()
        self.models.find_parameters()
        self.updates.learn(optimizer)
        for slot, param in slots_in(optimizer):
            place = self.models.places.of(param)
            if place is not None:
                root = place.root
                place.held = slot
                root.optimizers.add(entry.index)
                entry.roots.add(root.index)
        self._hook_all(optimizer, entry)
        if self._params_without_root(optimizer):
            self.without_root.setdefault(optimizer, 0)
        else:
            self.without_root.pop(optimizer, None)
        self.steps.budget.wish()

    def _params_without_root(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Return the parameters of an optimizer that belong to no root."""
        return [p for p in params_of(optimizer) if self.models.places.of(p) is None]

    def _hook_all(self, optimizer: Optimizer, entry: KnownOptimizer) -> None:
        """Hook all parameters of an optimizer that is new, or that no backward pass has reached."""
        if entry.searches < _SEARCHES:
            entry.searches += 1
            own = (param for param in params_of(optimizer) if own_part(param) is param)
            self.models.passes.listen(own, again=True)

    def _watch_holders(self, optimizer: Optimizer, entry: KnownOptimizer) -> None:
        """Watch an optimizer's parameters with a gradient that belong to no root.

        They are watched by modules that are not called, or as tensors.
        """
        without_root = self._params_without_root(optimizer)
        for holder in holders_of(p for p in without_root if p.grad is not None):
            # As a model is whose call is seen; its sites are those of the model inside.
            module = dynamo.unwrap(holder)
            if isinstance(module, torch.jit.ScriptModule):
                continue
            if module not in self.models.known:
                self.watch(module)
        rest = [p for p in self._params_without_root(optimizer) if p.grad is not None]
        if rest:
            slots = {id(param): slot for slot, param in slots_in(optimizer)}
            self.models.watch_tensors(rest, slots)
        self._adopt(optimizer, entry)
