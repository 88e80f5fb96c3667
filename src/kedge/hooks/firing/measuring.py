"""The short way of a value that is only measured.

# Note [Values alone]
Most hooked values are only measured, and a hook for that has to be cheap. Where every action at a gate is
`Measuring` and asks for no leaf and no call, the value goes straight to what measures it (`measure_value`): no event
is made unless the session keeps a timeline, nothing is looked for that an action may have done to the value. What
a checkpoint or a backward runs again goes through `fire`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from kedge.flow import Event
from kedge.hooks.firing.fire import failed
from kedge.hooks.firing.owner import ShownTap
from kedge.hooks.firing.tap import Tap


def measure_value(
    taps: Sequence[Tap],
    value: Tensor,
    step: int,
    latest: deque[tuple[ShownTap, Event]] | None,
    make: Callable[..., Event],
    of: Sequence[Any],
) -> None:
    """Hand a value to taps that only measure it; see Note [Values alone].

    Args:
        taps: The taps.
        value: The value.
        step: The step under way.
        latest: Where the events are kept for a timeline; None where they are not.
        make: Makes the event, where one is needed after all: for a timeline or an error.
        of: What to make it of.
    """
    __tracebackhide__ = True
    for tap in taps:
        if tap.on and (measure := tap.measure) is not None:
            try:
                measure(value, step)
            except Exception as error:  # noqa: BLE001 - as of any action
                failed(tap, value, make(*of), error)
                continue
            tap.fired += 1
            if latest is not None:
                latest.append((tap, make(*of)))
