"""Optimizers that exist and never step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice

from torch import Tensor
from torch.optim import Optimizer

from kedge.actions.measure.table import Departures, HostCopy
from kedge.sites.leaves import own_part
from kedge.torch_internals import modes
from kedge.watch.models.slots import TensorSlot, slots_in

_SMALL = 1 << 16
"""Most elements of a parameter that is compared."""
_COMPARED = 4
"""Most compared parameters."""
_COMPARED_EVERY = 10
"""Backward passes between two comparisons."""


class Unstepped:
    """Copies of some parameters of optimizers that have not stepped.

    The program may change these parameters itself.
    A comparison is read at the next one: by then its result has come from the device.
    """

    def __init__(self) -> None:
        self._in_vain = self._compared = 0
        self._before: list[tuple[TensorSlot, Tensor]] = []
        self._changed: list[HostCopy] = []

    @property
    def in_vain(self) -> int:
        """After how many backward passes the parameters were unchanged; 0 if they have changed."""
        self._read()
        return self._in_vain

    def count_backward(self, passes: int, unstepped: Iterable[Optimizer]) -> None:
        """Count a backward pass before any optimizer has stepped.

        Args:
            passes: How many backward passes there were.
            unstepped: Optimizers without a step whose parameters are compared from this pass on.
        """
        slots = chain.from_iterable(map(slots_in, unstepped))
        small = ((s, p) for s, p in slots if p.numel() <= _SMALL and modes.has_data(p))
        for slot, param in islice(small, _COMPARED):
            self._before.append((slot, own_part(param).detach().clone()))
        if not self._before or passes % _COMPARED_EVERY:
            return

        self._read()
        pairs = []
        for place, before in self._before:
            current = place()
            if current is not None:
                pairs.append((own_part(current).detach(), before))
        if not pairs or not all(_are_alike(now, before) for now, before in pairs):
            self._forget()
            return

        departures = Departures()
        for now, before in pairs:
            is_changed = (now != before).any().float().reshape(1)
            self._changed.append(departures.add(is_changed))
        departures.send()
        self._compared = passes

    def _read(self) -> None:
        """Read the last comparison."""
        changed = self._changed
        if not changed:
            return
        self._changed = []
        if any(copy.numpy()[0] for copy in changed):
            self._forget()
        else:
            self._in_vain = self._compared

    def _forget(self) -> None:
        self._before = []
        self._in_vain = 0


def _are_alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.device == other.device
