"""The fast path for values that are only measured.

# Note [Values alone]
Most hooked values are only measured, and such a hook must be cheap. If every action at a gate is
`Measuring` and names no leaf and no call, the value goes straight to the measuring functions
(`measure_values`): without an event, which a timeline makes when somebody looks at it, and without a
check whether an action changed the value. Values that a checkpoint or a backward computes again go
through `fire`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kedge.flow import Event
from kedge.hooks.firing.fire import failed
from kedge.hooks.firing.gate import Found
from kedge.hooks.firing.owner import Fired, Owner, known
from kedge.hooks.firing.tap import Tap


def measure_values(
    taps: Sequence[Tap],
    found: Found,
    step: int,
    latest: deque[Fired] | None,
    make: Callable[..., Event],
    of: Sequence[Any],
) -> None:
    """Hand the values of one place to taps that only measure them; see Note [Values alone].

    Args:
        taps: The taps.
        found: The values, by the names of their leaves.
        step: The current step.
        latest: The firings kept for a timeline; None without one.
        make: Returns the event of a value, whenever a timeline or an error needs it.
        of: The arguments of `make` after the name of the leaf.
    """
    __tracebackhide__ = True
    for leaf, value in found:
        for tap in taps:
            if tap.on and (measure := tap.measure) is not None:
                try:
                    measure(value, step, leaf)
                except Exception as error:  # noqa: BLE001 - as for any action
                    failed(tap, value, make(leaf, *of), error)
                    continue
                tap.fired += 1
                if latest is not None:
                    latest.append((tap, make, (leaf, *of)))


def measure_passing(
    taps: Sequence[Tap],
    value: Tensor,
    owner: Owner,
    make: Callable[..., Event],
    of: Sequence[Any],
    leaf: str = "",
) -> None:
    """Hand over a value as `measure_values` does, where `make` returns the right event only now.

    A timeline is looked at when this moment is over; so the event is made if there is one.
    """
    __tracebackhide__ = True
    latest = owner.fired
    if latest is not None:
        of = (make(*of),)
        make = known
    found = [(leaf, value)]
    measure_values(taps, found, owner.clock.step, latest, _without_leaf, (make, *of))


def _without_leaf(_leaf: str, make: Callable[..., Event], *of: Any) -> Event:
    return make(*of)
