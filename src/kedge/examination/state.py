"""The state of a training, kept and put back: weights, buffers, attributes, gradients, optimizers and modes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.examination.gradients import held_by
from kedge.offload.recompute.state import StateToPutBack
from kedge.sites import leaves
from kedge.torch_internals.module_tables import buffers_in, parameters_in
from kedge.torch_internals.torchscript import modes_of


class TrainingState:
    """A copy of what a training step changes.

    Args:
        models: Models, as they are now.
        optimizers: Optimizers, as they are now.
    """

    def __init__(
        self, models: Iterable[nn.Module] = (), optimizers: Iterable[Optimizer] = ()
    ) -> None:
        self._tensors: dict[int, tuple[Tensor, Tensor]] = {}
        self._modes: dict[nn.Module, bool] = {}
        self._optimizers: list[_OptimizerState] = []
        self._attributes: dict[nn.Module, StateToPutBack] = {}
        self.keep(models, optimizers)

    def keep(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Keep more, as it is now; what is kept already stays as it was."""
        optimizers = list(optimizers)
        for model in models:
            if model not in self._attributes:
                self._attributes[model] = StateToPutBack(model)
            self._keep_tensors((*parameters_in(model).values(), *buffers_in(model).values()))
            for module, mode in modes_of(model).items():
                self._modes.setdefault(module, mode)
        self._keep_tensors(held_by(optimizers))
        self._optimizers += map(_OptimizerState, optimizers)

    def _keep_tensors(self, tensors: Iterable[Tensor]) -> None:
        for value in tensors:
            if id(value) not in self._tensors:
                self._tensors[id(value)] = value, value.detach().clone()

    def restore(self) -> None:
        """Put everything back, without a gradient."""
        for attributes in self._attributes.values():
            attributes.put_back()
        with torch.no_grad():
            for value, before in self._tensors.values():
                value.copy_(before)
                value.grad = None
        for module, mode in self._modes.items():
            module.training = mode
        for each in self._optimizers:
            each.restore()

    def has_changed(self, value: Tensor) -> bool:
        """Whether a tensor differs from its copy."""
        known = self._tensors.get(id(value))
        return known is not None and not torch.equal(known[0], known[1])

    def changes(self, value: Tensor) -> Tensor:
        """Return where a tensor that is kept differs from its copy."""
        now, before = self._tensors[id(value)]
        return now != before


class _OptimizerState:
    """The options of an optimizer and what it keeps for each parameter; `load_state_dict` would cast that."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._groups = [_options(group) for group in optimizer.param_groups]
        self._state = {param: copy.deepcopy(kept) for param, kept in optimizer.state.items()}

    def restore(self) -> None:
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=False):
            group.update(copy.deepcopy(options))
        self._optimizer.state.clear()
        for param, kept in self._state.items():
            self._optimizer.state[param] = copy.deepcopy(kept)


def state_bytes(optimizers: Iterable[Optimizer]) -> int:
    """Return the bytes of the tensors that optimizers keep for their parameters."""
    kept = [dict(leaves.find(list(each.state.values()))).values() for each in optimizers]
    return sum(value.numel() * value.element_size() for values in kept for value in values)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy({name: value for name, value in group.items() if name != "params"})
