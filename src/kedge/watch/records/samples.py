"""Some elements of tensors, to see how large they are and whether they have changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge import native
from kedge.sites import leaves
from kedge.sites.leaves import own_part
from kedge.store.exponents import spacing
from kedge.torch_internals import modes

_LARGEST = torch.finfo(torch.float32).max
_SAMPLE = 1024


class Samples:
    """Copies of some elements of each of many parameters."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        wide = any(param.itemsize > 4 for param in params)
        dtype = np.float64 if wide else np.float32
        self.numbers = np.empty(_SAMPLE * len(params), dtype=dtype)
        self.counts = native.draw_many(self.numbers, params, _SAMPLE)
        self.tensors: list[Tensor] = []
        if not all(self.counts):
            self.tensors = [sample(param).clone() for param in params]

    def changes(self) -> tuple[Sequence[int], Sequence[float | Tensor]]:
        """Return how many elements of each parameter were compared, and the sum of squared changes.

        The sum of a parameter on a device stays there, since reading it would wait.
        """
        if native.squared_changes is not None and not self.tensors:
            return native.squared_changes(self.numbers, self.params, self.counts, _SAMPLE)
        pairs = zip(self.params, self.tensors, strict=True)
        changes = [(sample(param) - old).abs() for param, old in pairs]
        return [c.numel() for c in changes], _sums_of_squares(changes)


def _sums_of_squares(changes: list[Tensor]) -> list[float | Tensor]:
    sums: list[float | Tensor] = [0.0] * len(changes)
    on_devices: dict[torch.device, dict[int, Tensor]] = {}
    for i, change in enumerate(changes):
        if change.is_cpu:
            sums[i] = float(change.double().square().sum())
        else:
            on_devices.setdefault(change.device, {})[i] = change.float()
    for there in on_devices.values():
        for i, total in zip(there, _on_device(list(there.values())), strict=True):
            sums[i] = total
    return sums


def _on_device(changes: list[Tensor]) -> tuple[Tensor, ...]:
    """Return the sums in float32, since not every device has float64.

    A finite one too large for it becomes its largest.
    """
    squares = torch.stack([c.square().sum() for c in changes])
    largest = torch.stack([c.amax() if c.numel() else c.sum() for c in changes])
    capped = squares.clamp(max=_LARGEST)
    return torch.where(largest < math.inf, capped, squares).unbind()


def sample(param: Tensor) -> Tensor:
    """Return up to 1,024 elements of a parameter, evenly spread and always the same."""
    flat = own_part(param).detach().reshape(-1)
    return flat[:: spacing(flat.numel(), _SAMPLE)]


def tensors_in(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors in what a model takes or returns, by name.

    None if it cannot be searched, which its own site reports.
    """
    try:
        return leaves.find(value)
    except Exception:  # noqa: BLE001 - of a container of the program
        return []


def can_sample(value: Tensor) -> bool:
    """Whether `sample` can take elements of a tensor, and there are any."""
    if value.is_meta or value.layout is not torch.strided or value.is_quantized:
        return False
    if modes.is_fake(value) or modes.is_wrapped(value):
        return False
    return value.numel() > 0 and leaves.has_memory(value)


def compared(some: Sequence[Tensor], others: Sequence[Tensor]) -> list[Tensor] | None:
    """Compare samples with others, without waiting for a device.

    Returns:
        None if they are known to differ; else the answers that stay on devices, which are still to
        be asked: none if all are known to be equal.
    """
    kinds = [(value.shape, value.device, value.dtype) for value in some]
    if kinds != [(value.shape, value.device, value.dtype) for value in others]:
        return None
    answers = []
    for value, other in zip(some, others, strict=True):
        if not value.is_cpu:
            answers.append((value == other).all())
        elif not torch.equal(value, other):
            return None
    return answers
