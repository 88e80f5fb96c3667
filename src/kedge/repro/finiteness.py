"""Checks whether values are finite, one after the other."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kedge.repro.calls import RecordedCall
from kedge.sites.leaves import own_part
from kedge.torch_internals.graph_task import graph_task
from kedge.torch_internals.tensors import version_of

Bad = Literal["inf", "nan"]
Where = Literal["in", "out", "out.grad", "in.grad", "param.grad"]

#: Devices on which reading a sum does not wait.
AT_ONCE = frozenset({"cpu"})
_TOGETHER = 64


class FinitenessCheck(NamedTuple):
    """A value whose sum was started, perhaps on a device that has not computed it yet.

    Attributes:
        where: The side of a call.
        calls: The call; for a parameter's gradient all calls that used it, the newest first.
        value: The value.
        total: Its sum.
        task: The number of the backward pass, -1 for none.
    """

    where: Where
    calls: tuple[RecordedCall, ...]
    value: Tensor
    total: Tensor
    task: int


class PendingChecks:
    """Values whose sums are not read yet, in the order of the program.

    Args:
        report: Receives each check whose value is not finite, with the kind of value.

    Attributes:
        together: How many sums are read together on a device other than the CPU, where reading
            waits for the device.
    """

    together = _TOGETHER

    def __init__(self, report: Callable[[FinitenessCheck, Bad], None]) -> None:
        self._report = report
        self._waiting: list[FinitenessCheck] = []
        self._when_read: list[Callable[[], None]] = []
        self._returned: dict[int, tuple[weakref.ref[Tensor], int]] = {}

    def add(self, where: Where, calls: tuple[RecordedCall, ...], value: Tensor) -> None:
        """Start the sum of a value.

        An input is skipped if it was summed up when a module returned it.
        """
        if not _measurable(own_part(value)) or (where == "in" and self._is_known(value)):
            return
        # A parameter gets no weak reference: the program may swap it, which PyTorch refuses then.
        if where == "out" and not (value.is_leaf and value.requires_grad):
            self._returned[id(value)] = weakref.ref(value), version_of(value)
        if value.requires_grad:  # a gradient, which has none, must keep its identity
            value = value.detach()
        part = own_part(value)
        if part.is_complex():
            part = torch.view_as_real(part.resolve_conj())
        total = _countable(part).sum(dtype=torch.float32)
        self._waiting.append(FinitenessCheck(where, calls, value, total, graph_task()))
        if value.device.type in AT_ONCE or len(self._waiting) >= self.together:
            self.read()

    def read(self) -> None:
        """Read the sums, in the order of the values."""
        checks = self._waiting
        self._waiting = []
        by_device: dict[torch.device, list[Tensor]] = {}
        for check in checks:
            by_device.setdefault(check.total.device, []).append(check.total)
        totals = {device: torch.stack(each).tolist() for device, each in by_device.items()}
        for check in checks:
            total = totals[check.total.device].pop(0)
            if total - total == 0:  # it is finite
                continue
            kind = bad(check.value)
            if kind is not None:
                self._report(check, kind)

        ready = self._when_read
        self._when_read = []
        for work in ready:
            work()

    def when_read(self, work: Callable[[], None]) -> None:
        """Call a function once all sums so far are read."""
        self._when_read.append(work)
        if not self._waiting:
            self.read()

    def forget(self) -> None:
        """Drop all checks and known values."""
        self._waiting.clear()
        self._when_read.clear()
        self._returned.clear()

    def _is_known(self, value: Tensor) -> bool:
        """Whether a tensor is the output of a module, unchanged since."""
        ref, version = self._returned.get(id(value), (None, -1))
        return ref is not None and ref() is value and version == version_of(value) >= 0


def bad(value: Tensor) -> Bad | None:
    """Return "nan" if a tensor holds a NaN, "inf" if only infinities, and None if all is finite."""
    value = _countable(own_part(value))
    if bool(value.isfinite().all()):
        return None
    if bool(value.isnan().any()):
        return "nan"
    return "inf"


def counts(value: Tensor) -> dict[str, int]:
    """Return the numbers of NaN, of infinities and of all elements in a tensor."""
    value = _countable(own_part(value))
    return {
        "nan": int(value.isnan().sum()),
        "inf": int(value.isinf().sum()),
        "elements": value.numel(),
    }


def _countable(value: Tensor) -> Tensor:
    """Return the same numbers in a format that PyTorch can compare: not in eight-bit floats."""
    if value.itemsize == 1:
        return value.float()
    return value


def _measurable(value: Tensor) -> bool:
    numbers = value.is_floating_point() or value.is_complex()
    there = value.layout is torch.strided and not value.is_meta and not value.is_nested
    return numbers and there and value.numel() > 0
