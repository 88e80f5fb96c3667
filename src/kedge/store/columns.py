"""The columns of the statistics: their names, types, and the values of rows that were not measured."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.store.rows import FULL

#: The numeric columns in the order of the file, each with its type and its default value.
COLUMNS: dict[str, tuple[type[np.generic], float]] = {
    "step": (np.int64, 0),
    "site": (np.int32, 0),
    "calls": (np.int32, 1),
    "count": (np.int64, 0),
    "sum": (np.float64, np.nan),
    "sumsq": (np.float64, np.nan),
    "min": (np.float64, np.nan),
    "max": (np.float64, np.nan),
    "nonzero": (np.int64, -1),
    "nonfinite": (np.int64, -1),
    "nan": (np.int64, -1),
    "level": (np.int8, FULL),
    "sampled": (np.int32, -1),
    "saturated": (np.int32, -1),
}
#: The columns that recordings of older versions lack, in which nothing was measured there.
LATER = frozenset({"nan"})
#: The binary columns. Each is one array of bytes and, under its name with the ending ``OFFSETS``,
#: the ``n + 1`` places at which its rows start and end.
BINARY = ("active", "exponents")
OFFSETS = ".offsets"

Columns = dict[str, NDArray[Any]]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the columns of several parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    columns: dict[str, Any] = {}
    for name, first in parts[0].items():
        each = [part[name] for part in parts]
        if isinstance(first, list):
            columns[name] = list(chain.from_iterable(each))
        else:
            columns[name] = np.concatenate(each)
    return columns
