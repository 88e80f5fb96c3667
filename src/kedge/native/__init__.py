"""All statistics of a value in one pass over its numbers: in compiled code, or by PyTorch's reductions without it.

The compiled part, `c/`, comes first. It reads plain numbers in this process's memory, and has the
driver of a CUDA or ROCm device launch a kernel for those there (`driver`). It refuses everything
else: values on other devices and in other layouts, subclasses of tensors, and values inside a
`torch.func` transform. For these, or if the compiled part was not built, `reductions` computes the
same statistics, or on some devices a kernel of Triton's (`on_device`).

# Note [How exact]
Sums of float64 values are added up in float64. Sums of the other formats add up 16 vectors in
float32, with at most 8 roundings, and then in float64: the error of the sum is at most ``2**-21``
of the sum of magnitudes, and that of the sum of squares ``2**-21`` of itself, for any number of
elements. Blocks whose squares would overflow or vanish in float32 are added up in float64. Extremes
and counts are exact. The result does not depend on the number of threads. On such a device groups
of 16 numbers are added up in float32, with at most 5 roundings, and then in float64, with the same
bounds.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.native import reductions

What = Literal["full", "norm", "finite"]

FIELDS = ("sum", "sumsq", "min", "max", "nonzero", "nonfinite", "nan", "count")
"""The columns of a row; NaN if the statistic was not measured.

`nonfinite` counts NaN and infinities, `nan` the NaN alone.
"""

DRAWN = reductions.DRAWN
CODES: dict[str, int] = {"full": 0, "norm": 1, "finite": 2}


def _load() -> tuple[ModuleType | None, str]:
    """Return the compiled part, or the reason why it cannot be used."""
    try:
        compiled = importlib.import_module("kedge.native._native")
    except ImportError as missing:
        return None, f"it was not built when Kedge was installed ({missing})"
    try:
        compiled.connect(
            Tensor, torch.nn.Parameter, Tensor.is_neg, Tensor.is_conj, torch.get_num_threads
        )
    except (AttributeError, RuntimeError, ValueError) as unknown:
        return None, f"this PyTorch does not describe its tensors to C ({unknown})"
    return compiled, ""


_compiled, _missing = _load()


def available() -> bool:
    """Whether the compiled part measures values."""
    return _compiled is not None


def why_not() -> str:
    """Return the reason why the compiled part is not used; empty if it is used."""
    return _missing


def instruction_sets() -> list[str]:
    """Return the instruction sets that this processor has and the compiled part knows, the best last."""
    return [] if _compiled is None else list(_compiled.instruction_sets())


def use(instruction_set: str) -> str:
    """Switch to one of `instruction_sets()` (the best is used by default); return the previous one."""
    if _compiled is None:
        raise ValueError(f"no instruction set can be chosen: {_missing}")
    return str(_compiled.use(instruction_set))


def table(rows: int) -> NDArray[np.float64]:
    """Return a table for `measure_into` with a row for each value, filled with NaN."""
    return np.full((rows, len(FIELDS)), np.nan)


def _refuse(_table: Any, _row: int, _tensor: Tensor, _what: int = 0) -> int:
    return 0


def _refuse_all(
    _table: Any, _first: int, tensors: Iterable[Tensor | None], _what: int = 0
) -> list[int]:
    return [i for i, tensor in enumerate(tensors) if tensor is not None]


def _draw_none(_numbers: Any, tensors: Iterable[Tensor], _most: int) -> list[int]:
    return [0 for _ in tensors]


def _know_none(tensors: Sequence[Tensor | None]) -> tuple[float, int, list[int]]:
    return 0.0, 0, _refuse_all(None, 0, tensors)


def _no_channels(_tensor: Tensor, _dim: int) -> bytes | None:
    return None


def _same_entries(tables: list[dict[Any, Any]], names: list[Any], values: list[Any]) -> bool:
    return (
        sum(map(len, tables)) == len(names)
        and all(map(operator.is_, chain.from_iterable(map(dict.values, tables)), values))
        and all(map(operator.is_, chain.from_iterable(map(dict.keys, tables)), names))
    )


#: ``same_entries(tables, names, values)`` tells whether dicts have just these names and values, one
#: after the other, the same objects, in the order of a plain dict. It has nothing to do with values.
same_entries: Callable[[list[dict[Any, Any]], list[Any], list[Any]], bool] = (
    _same_entries if _compiled is None else _compiled.same_entries
)

#: ``measure_into(table, row, tensor, what=0)`` measures a value into a row of a table, which is an
#: array from `table()` or, slightly faster, a memoryview of one. Returns the number of real numbers
#: measured; 0 if it refuses, and then the row is unchanged. `CODES` are the values of `what`:
#: "norm" is the sum of squares and the counts of non-finite numbers, and of a single number also
#: the sum; "finite" is the sum.
measure_into: Callable[..., int] = _refuse if _compiled is None else _compiled.measure_into

#: ``measure_many(table, first_row, tensors, what=0)`` measures many values, one row each; None
#: leaves its row unchanged. Returns the indices of the values that it refuses.
measure_many: Callable[..., list[int]] = (
    _refuse_all if _compiled is None else _compiled.measure_many
)

#: ``known_nonfinite(tensors)`` returns, for the values that it can read, the sum of squares and the
#: count of non-finite numbers; and the indices of those that it refuses.
known_nonfinite: Callable[[Sequence[Tensor | None]], tuple[float, int, list[int]]] = (
    _know_none if _compiled is None else _compiled.squares_and_nonfinite
)

#: ``channels_above_zero(tensor, dim)`` returns a bit for each channel, packed as by
#: `numpy.packbits`: whether one of its numbers is above zero. None if it refuses.
channels_above_zero: Callable[[Tensor, int], bytes | None] = (
    _no_channels if _compiled is None else _compiled.channels_above_zero
)

#: ``draw_many(numbers, tensors, most)`` copies up to `most` numbers of each of many tensors, evenly
#: spread, to an array of float32 or float64, one tensor after another. Returns the count for each
#: tensor; 0 for a tensor that it refuses.
draw_many: Callable[[Any, Iterable[Tensor], int], list[int]] = (
    _draw_none if _compiled is None else _compiled.draw_many
)

#: ``squared_changes(numbers, tensors, counts, most)`` draws again from tensors of which `draw_many`
#: drew `counts` numbers. Returns for each tensor the count of numbers compared and the sum of the
#: squared changes; 0 and NaN if its size has changed. None without the compiled part.
squared_changes: (
    Callable[[Any, Iterable[Tensor], Sequence[int], int], tuple[list[int], list[float]]] | None
) = None if _compiled is None else _compiled.squared_changes

#: ``histograms(buckets, rows)`` returns the histograms of magnitudes with their counts in the first
#: rows of an array of uint16, as `kedge.store.exponents.encode` writes them. None without the
#: compiled part.
histograms: Callable[[Any, int], list[bytes]] | None = (
    None if _compiled is None else _compiled.histograms
)

#: Class that measures a step's values into the arrays of a `kedge.actions.measure.host.HostTable`,
#: each once even if it is at several sites:
#: ``observe(tensor, site, role, what, draws)`` returns flags. None without the compiled part.
Measurer: Any = None if _compiled is None else _compiled.Measurer

#: Connects C to the driver of a kind of device; see `kedge.native.driver`, which alone calls it.
connect_driver: Any = None if _compiled is None else _compiled.connect_driver

#: ``stream_function()`` returns the address of PyTorch's function that tells the current stream of
#: a device; 0 without one.
stream_function: Callable[[], int] = int if _compiled is None else _compiled.stream_function

REFUSED, DONE, FRESH, NEW_SOURCE, NO_ROOM, NO_TABLE, CAPTURED, ACTIVE = 0, 1, 2, 4, 8, 16, 32, 64
"""The flags of `Measurer.observe`: the value cannot be read; it is noted at the site; it was measured now; its source differs
from the previous one; there is no room; its device has no table, or none with room; a graph of the device is being captured;
its channels above zero are known, too.
"""
AS_VALUE, AS_OUTPUT, AS_INPUT, AS_LASTING = 0, 1, 2, 3
"""The roles of a value: none of the others, the output of its site, an input, whose source is recorded, or one that
outlives its call, so that no weak reference to it may be kept.
"""


def row(tensor: Tensor, what: What = "full") -> NDArray[np.float64]:
    """Return the statistics of one tensor as a row of a table, from the part that can read it."""
    one = table(1)
    if not measure_into(one, 0, tensor, CODES[what]):
        one[0] = reductions.row(tensor, what)
    return one.reshape(-1)


def measure(tensor: Tensor, what: What = "full") -> dict[str, float]:
    """Return the statistics of one tensor by name, from the part that can read it."""
    return dict(zip(FIELDS, row(tensor, what).tolist(), strict=True))


def all_finite_and_norm(tensors: Sequence[Tensor | None]) -> tuple[float, int]:
    """Return the sum of squares of all tensors, and the count of their non-finite numbers; None entries are skipped."""
    squares, nonfinite, refused = known_nonfinite(tensors)
    for i in refused:
        tensor = tensors[i]
        if tensor is not None and tensor.numel():
            row = reductions.row(tensor, "norm")
            squares += row[1]
            nonfinite += int(row[5])
    return squares, nonfinite
