"""The time of a training step: its forward with the loss, its backward, and the optimizer.

The first step also pays for what happens once, such as the state of the optimizer, so it does not
count. Of the others each part has its median. Where the optimizer computes the loss itself, only
the whole is known. What reading the data takes is no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from time import monotonic, perf_counter

import torch
from torch import Tensor
from torch.optim import Optimizer

from kedge.examination.gradients import held_by
from kedge.examination.result import Result, in_short
from kedge.examination.state import TrainingState
from kedge.examination.sweep import wants_closure
from kedge.short_text import compact, thousands
from kedge.torch_internals import accelerators

TRIAL = "time"
MOST_STEPS = 6
"""Steps that are taken, the first of which does not count."""
MOST_SECONDS = 1.5
"""Seconds after which no further step is begun."""
DID = "timed steps on this batch"
PARTS = ("forward", "backward", "optimizer")


def step_time(
    optimizers: Sequence[Optimizer],
    state: TrainingState,
    compute: Callable[[], Tensor],
    samples: int | None,
) -> Result:
    """Take some steps, and return how long they took; the training is put back.

    Args:
        optimizers: The optimizers that train.
        state: The state before the first step.
        compute: Computes the loss of the batch with the present weights.
        samples: How many samples the batch has; None if that is not known.
    """
    if any(map(wants_closure, optimizers)):
        return untimed("an optimizer computes the loss itself, several times in a step")
    device = next((param.device for param in held_by(optimizers)), torch.device("cpu"))
    times: list[tuple[float, ...]] = []
    began = monotonic()
    try:
        state.restore()
        while len(times) < MOST_STEPS and (len(times) < 2 or monotonic() - began < MOST_SECONDS):
            times.append(_timed(optimizers, compute, device))
    except Exception as error:  # noqa: BLE001 - the program's own code, called by others than itself
        return untimed(f"the loss could not be computed again: {in_short(error)}")
    finally:
        state.restore()

    whole = median(map(sum, times[1:]))
    parts = dict(zip(PARTS, map(median, zip(*times[1:], strict=True)), strict=True))
    listed_parts = ", ".join(f"{name} {_milliseconds(part)}" for name, part in parts.items())
    came = f"{_milliseconds(whole)} a step, the median of {len(times) - 1}: {listed_parts}"
    numbers = {"step": whole, **parts}
    if samples is not None and whole > 0:
        came += f"; {thousands(round(samples / whole))} samples a second, without reading them"
        numbers["samples_per_second"] = samples / whole
    return Result(TRIAL, "ok", DID, came, numbers=numbers)


def untimed(why: str) -> Result:
    """Return the result where no step can be repeated."""
    return Result(TRIAL, "untried", "wanted to time steps on this batch", why)


def _timed(
    optimizers: Sequence[Optimizer], compute: Callable[[], Tensor], device: torch.device
) -> tuple[float, ...]:
    """Take a step; returns the seconds of its parts."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    marks = [_now(device)]
    loss = compute()
    marks.append(_now(device))
    loss.backward()
    marks.append(_now(device))
    for optimizer in optimizers:
        optimizer.step()
    marks.append(_now(device))
    return tuple(last - first for first, last in pairwise(marks))


def _milliseconds(duration: float) -> str:
    return f"{compact(1000 * duration)} ms"


def _now(device: torch.device) -> float:
    """Return the time at which a device has done what it was given."""
    accelerators.synchronize(device)
    return perf_counter()
