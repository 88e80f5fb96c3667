"""The trials that take steps of the optimizer: they come last, and each puts the training back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence

from torch import Tensor
from torch.optim import Optimizer

from kedge.examination import step_time, sweep
from kedge.examination.result import Result, in_short
from kedge.examination.state import TrainingState

SAME = 1e-3
"""The relative difference up to which a loss that was computed again is the same."""


def trials_of_steps(
    optimizers: Sequence[Optimizer],
    state: TrainingState,
    compute: Callable[[], Tensor],
    expected: float,
    samples: int | None,
    skip: Collection[str],
) -> Iterator[Result]:
    """Time steps, and train on one batch over and over; afterwards the training is put back.

    Args:
        optimizers: The optimizers that train.
        state: The state before the first step.
        compute: Computes the loss of the batch with the present weights.
        expected: The loss that it has to be at first.
        samples: How many samples the batch has; None if that is not known.
        skip: Names of trials to leave out.
    """
    why = _why_not(state, compute, expected)
    if why is not None:
        yield from without_steps(why, skip)
        return
    if step_time.TRIAL not in skip:
        yield step_time.step_time(optimizers, state, compute, samples)
    if sweep.TRIAL not in skip:
        yield sweep.one_batch(optimizers, state, compute)


def without_steps(why: str, skip: Collection[str]) -> Iterator[Result]:
    """Yield the results where no step can be repeated, for a reason."""
    if step_time.TRIAL not in skip:
        yield step_time.untimed(why)
    if sweep.TRIAL not in skip:
        yield sweep.untried(why)


def _why_not(state: TrainingState, compute: Callable[[], Tensor], expected: float) -> str | None:
    """Return why the loss cannot be computed again; None if it can, and is the same."""
    try:
        state.restore()
        first = float(compute().detach())
    except Exception as error:  # noqa: BLE001 - the program's own code, called by others than itself
        return f"the loss could not be computed again: {in_short(error)}"
    finally:
        state.restore()
    is_same = abs(first - expected) <= SAME * max(abs(expected), SAME)
    if math.isfinite(expected) and not is_same:
        return f"the loss was {expected:.6g}, and computed again it is {first:.6g}"
    return None
