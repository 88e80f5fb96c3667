"""Optimizers that exist and never step."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

from kedge.actions.measure.table import Departures, HostCopy
from kedge.sites.leaves import own_part
from kedge.torch_internals import modes
from kedge.watch.models.slots import TensorSlot, slots_in

_SMALL = 1 << 16
"""Most elements of a parameter that is compared."""
_COMPARED, _COMPARED_EVERY = 4, 10
"""Most compared parameters, and backward passes between two comparisons."""


class Unstepped:
    """Copies of some parameters of optimizers that have not stepped: the program may change these parameters itself.

    A comparison is read at the next one: by then its result has come from the device.
    """

    def __init__(self) -> None:
        self._in_vain = self._compared = 0
        self._before: list[tuple[TensorSlot, Tensor]] = []
        self._changed: list[HostCopy] = []

    @property
    def in_vain(self) -> int:
        """After how many backward passes the parameters were still unchanged; 0 if they have changed."""
        self._read()
        return self._in_vain

    def count_backward(self, passes: int, unstepped: Iterable[Optimizer]) -> None:
        """Count a backward pass before any optimizer has stepped.

        Args:
            passes: How many backward passes there were.
            unstepped: Optimizers without a step whose parameters are compared from this pass on.
        """
        small = [
            (slot, p)
            for optimizer in unstepped
            for slot, p in slots_in(optimizer)
            if p.numel() <= _SMALL and modes.has_data(p)
        ][:_COMPARED]
        self._before += [(slot, own_part(p).detach().clone()) for slot, p in small]
        if not self._before or passes % _COMPARED_EVERY:
            return
        self._read()
        alive = [
            (own_part(param).detach(), before)
            for slot, before in self._before
            if (param := slot()) is not None
        ]
        if not alive or any(
            param.shape != before.shape or param.device != before.device for param, before in alive
        ):
            self._before, self._in_vain = [], 0
            return
        departures = Departures()
        self._changed = [
            departures.add((param != before).any().float().reshape(1)) for param, before in alive
        ]
        departures.send()
        self._compared = passes

    def _read(self) -> None:
        """Read the last comparison."""
        changed, self._changed = self._changed, []
        if not changed:
            return
        self._in_vain = 0 if any(copy.numpy()[0] for copy in changed) else self._compared
        if not self._in_vain:
            self._before = []
