"""Finds a tensor of the program again without a weak reference to it.

# Note [No weak reference]
`torch.utils.swap_tensors` refuses a tensor with a weak reference, and programs swap their parameters
and gradients: `model.double()` after ``torch.__future__.set_swap_module_params_on_conversion(True)``,
quantization, FSDP. So Kedge refers weakly only to what holds a tensor, a module or an optimizer, and
looks there. That a number from `id` is taken again cannot be mistaken then: of two tensors that stand in
one slot, one after the other, the second is not taken for the first unless it has its number, too, and
even so it has the first one's name and its hooks are looked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.torch_internals.module_tables import own_buffers, own_parameters


class TensorSlot(Protocol):
    """Where a tensor of the program stands; see Note [No weak reference]."""

    def __call__(self) -> Tensor | None:
        """Return the tensor; None if it stands there no longer, or what holds it no longer exists."""


class ParameterSlot:
    """A parameter's entry in the module that holds it."""

    __slots__ = ("_id", "_module", "_name")

    def __init__(self, module: nn.Module, name: str, param: Tensor) -> None:
        self._module = weakref.ref(module)
        self._name = name
        self._id = id(param)

    def __call__(self) -> Tensor | None:
        """Return the parameter.

        By now the module may hold it under another name, as after pruning.
        """
        module = self._module()
        if module is None:
            return None
        table = own_parameters(module)
        if self._name in table:
            param = table[self._name]
            if id(param) == self._id:
                return param
        return next((p for p in table.values() if id(p) == self._id), None)


def holder(inside: Mapping[str, nn.Module], path: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor, and the tensor's name in it.

    Args:
        inside: The modules, by their paths.
        path: The tensor's path.
    """
    of, _, name = path.rpartition(".")
    return inside[of], name


class OptimizerSlot:
    """A parameter's entry in an optimizer."""

    __slots__ = ("_group", "_id", "_index", "_optimizer")

    def __init__(self, optimizer: Optimizer, group: int, index: int, param: Tensor) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._group = group
        self._index = index
        self._id = id(param)

    def __call__(self) -> Tensor | None:
        """Return the parameter."""
        groups: list[dict[str, Any]] = getattr(self._optimizer(), "param_groups", [])
        try:
            param: Tensor = groups[self._group]["params"][self._index]
        except IndexError:
            return None
        if id(param) != self._id:
            return None
        return param


def slots_in(optimizer: Optimizer) -> Iterator[tuple[OptimizerSlot, nn.Parameter]]:
    """Yield an optimizer's parameters with their entries.

    One whose constructor failed holds none.
    """
    for group, each in enumerate(getattr(optimizer, "param_groups", ())):
        for index, param in enumerate(each["params"]):
            yield OptimizerSlot(optimizer, group, index, param), param


class BufferSlot:
    """A buffer's entry in the module that holds it, whose tensor a forward may replace."""

    __slots__ = ("_module", "_name")

    def __init__(self, module: nn.Module, name: str) -> None:
        self._module = weakref.ref(module)
        self._name = name

    def __call__(self) -> Tensor | None:
        """Return what stands there now."""
        module = self._module()
        if module is None:
            return None
        table = own_buffers(module)
        if self._name not in table:  # a scripted module's table has no `get`
            return None
        return table[self._name]
