"""The state of a training, kept and put back: weights, buffers, gradients, optimizers and modes."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.torch_internals.module_tables import buffers_in, modules_in, parameters_in


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
        self._optimizers: list[tuple[Optimizer, dict[str, Any]]] = []
        self.keep(models, optimizers)

    def keep(self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> None:
        """Keep more, as it is now; what is kept already stays as it was."""
        for model in models:
            for value in (*parameters_in(model).values(), *buffers_in(model).values()):
                if id(value) not in self._tensors:
                    self._tensors[id(value)] = value, value.detach().clone()
            for module in modules_in(model).values():
                self._modes.setdefault(module, module.training)
        self._optimizers += [(each, copy.deepcopy(each.state_dict())) for each in optimizers]

    def restore(self) -> None:
        """Put everything back, without a gradient."""
        with torch.no_grad():
            for value, before in self._tensors.values():
                value.copy_(before)
                value.grad = None
        for module, mode in self._modes.items():
            module.training = mode
        for optimizer, options in self._optimizers:
            optimizer.load_state_dict(copy.deepcopy(options))

    def has_changed(self, value: Tensor) -> bool:
        """Whether a tensor differs from its copy."""
        known = self._tensors.get(id(value))
        return known is not None and not torch.equal(known[0], known[1])
