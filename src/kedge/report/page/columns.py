"""Numbers as base64 text, each table in the smallest form that is exact enough to be drawn.

# Note [Forms]
``f8`` and ``f4`` are IEEE floats. ``b2`` is the upper half of a float32: its whole range,
infinities and NaN in two bytes, with an error of at most 0.4 %, too small to be seen. ``u1`` is a
share between 0 and 1 in 254 parts, rounded so that only 0 itself is 0 and only 1 itself is 254; 255
stands for NaN. ``n1`` are small integers. All are little-endian.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.store.rows import Floats

Form = str

_SINGLE = np.finfo(np.float32)
_SHARE_PARTS = 254
_SHARE_ABSENT = 255


def packed(values: NDArray[Any], form: Form) -> str:
    """Return numbers in one of the forms of Note [Forms]."""
    return b64encode(np.ascontiguousarray(_FORMS[form](values)).tobytes()).decode("ascii")


def form_of(values: Floats, *, share: bool, brief: bool) -> Form:
    """Return the form for a table.

    Args:
        values: The table.
        share: Whether its values lie between 0 and 1.
        brief: Whether two or three digits are enough.
    """
    if share and brief:
        return "u1"
    if _is_wide(values):
        return "f8"
    if brief:
        return "b2"
    return "f4"


def _is_wide(values: Floats) -> bool:
    """Whether a number is beyond the range of the narrower forms."""
    size = np.abs(values[np.isfinite(values) & (values != 0)])
    if not len(size):
        return False
    # Half of a float32 is rounded up by less than a 256th.
    most = _SINGLE.max / (1 + 2**-8)
    return bool(size.max() > most or size.min() < _SINGLE.tiny)


def _half_of_single(values: Floats) -> NDArray[Any]:
    bits = values.astype("<f4").view("<u4").astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype("<u2")


def _share(values: Floats) -> NDArray[Any]:
    parts = np.clip(np.rint(values * _SHARE_PARTS), 1, _SHARE_PARTS - 1)
    parts[values <= 0] = 0
    parts[values >= 1] = _SHARE_PARTS
    parts[np.isnan(values)] = _SHARE_ABSENT
    return parts.astype(np.uint8)


_FORMS: dict[Form, Callable[[Floats], NDArray[Any]]] = {
    "f8": lambda values: values.astype("<f8"),
    "f4": lambda values: values.astype("<f4"),
    "b2": _half_of_single,
    "u1": _share,
    "n1": lambda values: values.astype(np.uint8),
}
