"""What it costs to measure one tensor, on the device and on the host, beside `torch.linalg.vector_norm`.

A model without computation hands out tensors that are there already, and hooks measure them, so
that what is timed is the way from PyTorch's call of a hook to the last kernel. On the device the
work is queued behind a kernel that waits, so that the host's time is not part of it. Each call of
the model is a step to Kedge, so a value has its share, one in 32, of what a step costs.
"""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import kedge
from on_card.bench import Bench
from on_card.device import Device

EACH = 32
"""The tensors that are measured in turn."""
WARM = 3
ROUNDS = 9
SIZES = (1 << 12, 1 << 20, 1 << 24, 1 << 27)
SMALL = (1 << 8,)


class Shelf(nn.Module):
    """Modules that return tensors that are there already."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Identity() for _ in range(EACH))

    def forward(self, values: Sequence[Tensor]) -> None:
        for module, value in zip(self.each, values, strict=True):
            module(value)


def kernel(bench: Bench) -> None:
    """Fill the table."""
    bench.sheet.line(_what_measures())
    table = bench.sheet.table("One value, µs; the host's time is over an empty hook")
    for count in SMALL if bench.tiny else SIZES:
        for dtype in (torch.float32, torch.bfloat16):
            row = f"{count:,} of {str(dtype).removeprefix('torch.')}"
            needed = 2 * EACH * count * dtype.itemsize
            if 0 < bench.on.size() < needed:
                bench.sheet.line(f"{row}: skipped, it takes {needed / 1e9:.1f} GB")
                continue
            with bench.sheet.trying(f"kernel: {row}"):
                for column, seconds in _times(bench.on, count, dtype).items():
                    table.put(row, column, f"{seconds * 1e6:.1f}")
            bench.on.clean()


def _what_measures() -> str:
    """Return the line of `kedge --version -v` about measuring on a device, where there is one."""
    try:
        described = importlib.import_module("kedge.native.on_device").described
    except (ImportError, AttributeError):
        return "kedge.native.on_device: not there"
    return str(described())


def _times(on: Device, count: int, dtype: torch.dtype) -> dict[str, float]:
    """Return the seconds of one value, by what was timed."""
    values = [torch.randn(count, device=on.device).to(dtype) for _ in range(EACH)]
    shelf = Shelf()

    def norms() -> Any:
        return [torch.linalg.vector_norm(value) for value in values]

    def show() -> None:
        shelf(values)

    seconds = {}
    seconds["vector_norm, device"] = _median(on.device_seconds, norms)
    seconds["vector_norm, host"] = _median(lambda work: on.host_seconds(work, 1), norms)

    hooks = [module.register_forward_hook(lambda *call: None) for module in shelf.each]
    empty = _median(lambda work: on.host_seconds(work, 1), show)
    for hook in hooks:
        hook.remove()
    for name, action in {"norm": kedge.measure("norm"), "all": kedge.measure()}.items():
        with kedge.hook(shelf, "each.*", action):
            seconds[f"Kedge, {name}, device"] = _median(on.device_seconds, show)
            host = _median(lambda work: on.host_seconds(work, 1), show)
            seconds[f"Kedge, {name}, host"] = host - empty
    return seconds


def _median(timed: Callable[[Callable[[], Any]], float], work: Callable[[], Any]) -> float:
    """Return the median of a time, of one of the tensors."""
    for _ in range(WARM):
        work()
    return statistics.median(timed(work) for _ in range(ROUNDS)) / EACH
