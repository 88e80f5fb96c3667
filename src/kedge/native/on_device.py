"""All statistics of a value on a device in one launch of a Triton kernel, `kedge.native.device_kernel`.

It measures what `kedge.native.driver` does not: on a CUDA or ROCm device values of subclasses of
tensors and of views that the driver's kernel does not read, or all if there is no such driver; on
XPU all. Triton is not a dependency. It is looked up when the first such value comes. Without it, or
if it fails, PyTorch's reductions measure as on other devices; `kedge --version -v` gives the
reason.

# Note [What the kernel costs the program]
The kernel is launched on the program's stream. It reads the value once, allocates nothing, and
nothing waits for it. Its block and its number of warps are fixed, as trying several would run in
the middle of somebody's training. Triton compiles it, in some tenths of a second, for each dtype
and each set of statistics, and again for values that do not begin at a multiple of 16 bytes; it
keeps the result on disk. While a graph is captured, nothing is compiled or loaded: values whose
kernel has not run before are left to PyTorch.

# Note [One launch for one value]
One launch for many small values would need their addresses on the device: for each call a copy from
pinned memory that is not overwritten before the copy has run, and values that live until then. A
captured graph would copy the addresses anew from memory that has other contents by then. It would
save the launches of parameters and gradients alone, as other values come one by one, and these only
in measured steps.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.native import driver
from kedge.torch_internals import accelerators

if TYPE_CHECKING:  # it needs Triton
    from kedge.native.device_kernel import statistics  # noqa: F401

KINDS = frozenset({"cuda", "xpu"})
"""The kinds of devices for which Triton compiles; ROCm is one of "cuda"."""
MOST = 256
"""The most programs, so the most rows, for a value: their number depends on the number of elements alone, as the result does."""
FOLD = 1 << 13
"""The numbers that a program reads at a time; see Note [Folds]."""
_COLUMNS = 7
_LOW, _HIGH = 2, 3
_WARPS = 4
_ALIGNED = 16
_READ = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_CORNER = "device_kernel"
_COSTS = "a value on a device takes a dozen of PyTorch's reductions, and sums are in float32."
_failed: dict[str, str] = {}
"""Why the kernel is not used, by kind of device."""
_ran: set[tuple[object, ...]] = set()
"""The variants of the kernel that have run, each as device, dtype, statistics, alignment and dtype of the table."""


@functools.cache
def _kernel() -> Any:
    """Return the kernel.

    Raises:
        ImportError: Triton is not installed, or does not compile.
    """
    statistics = importlib.import_module("kedge.native.device_kernel").statistics
    compiles = isinstance(statistics, importlib.import_module("triton").JITFunction)
    if not compiles:
        raise ImportError("TRITON_INTERPRET is set, so Triton would run kernels on the host")
    return statistics


def available(device: torch.device) -> bool:
    """Whether the kernel runs on a device; tried at the first call, without waiting for the result."""
    if device.type not in KINDS or device.type in _failed:
        return False
    if any(variant[0] == device for variant in _ran):
        return True
    try:
        one, table = (
            torch.ones(1, device=device),
            torch.empty(1, _COLUMNS, dtype=torch.float64, device=device),
        )
    except RuntimeError as error:  # not every device has float64
        _failed[device.type] = _first_line(error)
        return False
    return measure_into(table, 0, one, 0)


def why_not() -> dict[str, str]:
    """Return the reason why the kernel is not used, by kind of device; empty unless it was tried and failed."""
    return dict(_failed)


def described() -> str:
    """Return a line for `kedge --version -v`: what launches a kernel on the device that this process would use."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return f"{_CORNER}: not needed, without a device"
    index = torch.accelerator.current_device_index()
    if driver.open_device(found.type, index) is not None:
        return f"{_CORNER}: present, launched by the device's driver"
    without = ""
    if found.type in driver.why_not():
        without = f"; not by its driver: {driver.why_not()[found.type]}"
    if found.type not in KINDS:
        return f"{_CORNER}: not needed, without a device for which there is one{without}"
    if available(torch.device(found.type, index)):
        return f"{_CORNER}: present, launched by Triton{without}"
    return f"{_CORNER}: missing (Triton: {_failed[found.type]}{without}): {_COSTS}"


def rows_for(numbers: int) -> int:
    """Return how many rows a value takes in a table."""
    return min(-(-numbers // FOLD), MOST)


def measure_into(table: Tensor, first: int, numbers: Tensor, what: int) -> bool:
    """Measure a value into rows of a table, one for each program, which `folded` adds up.

    Args:
        table: The table, of float32 or float64, with seven columns in the order of
            `kedge.native.FIELDS`.
        first: The first of `rows_for` rows.
        numbers: The numbers, without gaps, in any order.
        what: A code of `kedge.native.CODES`.

    Returns:
        Whether it is measured; if not, the rows are unchanged.
    """
    kind = numbers.device.type
    if (
        kind in _failed
        or numbers.dtype not in _READ
        or type(numbers) is not Tensor
        or not numbers.is_contiguous()
    ):
        return False
    address = numbers.data_ptr()
    if not address:  # its memory was given back
        return False
    variant = numbers.device, numbers.dtype, what, address % _ALIGNED == 0, table.dtype
    if variant not in _ran and accelerators.is_capturing():
        return False
    try:
        with torch.accelerator.device_index(numbers.device.index):
            _kernel()[(rows_for(numbers.numel()),)](
                numbers, table, first, numbers.numel(), what, num_warps=_WARPS
            )
    except Exception as error:  # noqa: BLE001 - compilers raise anything; PyTorch's reductions raise again what is wrong with the device
        _failed[kind] = _first_line(error)
        return False
    _ran.add(variant)
    return True


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def folded(
    table: NDArray[Any], firsts: Sequence[int], counts: Sequence[int]
) -> NDArray[np.float64]:
    """Return the rows of values from a table with one or more rows for each.

    Args:
        table: The table.
        firsts: The first row of each value.
        counts: How many rows each value has, at least one.
    """
    begins, lengths = np.asarray(firsts, dtype=np.intp), np.asarray(counts, dtype=np.intp)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    with np.errstate(
        all="ignore"
    ):  # values with infinities, and of devices that write signaling NaNs
        if (lengths == 1).all():
            return table[begins].astype(np.float64)
        each = table[np.repeat(begins - starts, lengths) + np.arange(ends[-1])].astype(np.float64)
        rows: NDArray[np.float64] = np.add.reduceat(each, starts)
        rows[:, _LOW] = np.minimum.reduceat(each[:, _LOW], starts)
        rows[:, _HIGH] = np.maximum.reduceat(each[:, _HIGH], starts)
    return rows
