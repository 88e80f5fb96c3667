"""The user's limits, parsed."""

from __future__ import annotations

import math
import re

from kedge.errors import OffloadError
from kedge.offload.engine.policy import Planner
from kedge.offload.plan.learn import Learner
from kedge.offload.plan.tables import Limit

_UNITS = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def planner_for(max_memory: str | int | None, max_slowdown: float | None) -> Planner | None:
    """Return the planner for a limit; None without a limit.

    Raises:
        OffloadError: Both limits are given, or one is invalid.
    """
    if max_memory is not None and max_slowdown is not None:
        raise OffloadError(
            f"max_memory={max_memory!r} and max_slowdown={max_slowdown!r} exclude each other: "
            "the first limits memory at the least extra time, "
            "the second limits time at the least memory; give one"
        )
    if max_memory is not None:
        return Learner(Limit(memory=bytes_of("max_memory", max_memory)))
    if max_slowdown is not None:
        return Learner(Limit(slowdown=_ratio(max_slowdown)))
    return None


def bytes_of(name: str, given: str | int) -> int:
    """Return a number of bytes, given as one or as a text such as ``"2 GB"``.

    Args:
        name: The name of the argument, for the error.
        given: The argument.

    Raises:
        OffloadError: It is not a number of bytes.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return given
    if isinstance(given, str):
        found = _SIZE.fullmatch(given)
        if found is not None:
            number, unit = found.groups()
            unit = unit.lower() or "b"
            if unit in _UNITS:
                return round(float(number) * _UNITS[unit])
    raise OffloadError(
        f'{name}={given!r}: use a number of bytes, or a text such as "2 GB", "512 MiB"'
    )


def _ratio(given: float) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not 1 <= given < math.inf:
        raise OffloadError(
            f"max_slowdown={given!r}: use the factor by which a step may become longer, "
            "1 or more; 1.05 is 5 % longer"
        )
    return float(given)
