"""One batch learned over and over, at the program's own learning rate and at others.

A model that cannot learn a single batch by heart has a fault that more data does not mend (Karpathy,
"A Recipe for Training Neural Networks", 2019); the course of its loss over several rates shows
whether the rate is the reason (Smith, "Cyclical Learning Rates for Training Neural Networks", 2017).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from kedge.examination.gradients import has_gradient, held_by
from kedge.examination.result import OWN, Rates, Result, Verdict, in_short
from kedge.examination.state import TrainingState
from kedge.short_text import compact, counted, percent

TRIAL = "one-batch"
FACTORS = (OWN, 0.01, 0.1, 10.0, 100.0)
"""The factors on the program's own rate, in the order in which they are tried."""
FARTHEST = 1e-8
"""The smallest factor that is tried where the loss does not fall at others; its inverse is the largest."""
MOST_STEPS = {True: 60, False: 20}
"""Steps at the program's own rate, and at another."""
MOST_SECONDS = {True: 5.0, False: 1.0}
"""Seconds for them."""
MOST_SECONDS_IN_ALL = 9.0
"""Seconds after which no further rate is tried."""
ENOUGH = 10
"""Fewest steps from which it is said that the loss does not fall."""
LEARNED = 0.2
"""The share of its first value by which the loss has to fall."""
NOTHING = 0.02
"""The share under which it has not fallen."""
MOSTLY = 0.5
"""The share of numbers that a step does not change from which on it is rounded away."""
HALVES = (torch.bfloat16, torch.float16)
FAR_BELOW = 10.0
"""Times its first magnitude by which a loss below zero falls on without an end."""
_DID = "trained on one batch over and over, with the same random numbers"


@dataclass
class _Course:
    """The losses of repeated steps at one rate.

    Attributes:
        factor: The factor on the program's own rate.
        losses: The loss before each step.
    """

    factor: float
    losses: list[float] = field(default_factory=list)

    @property
    def fall(self) -> float:
        """By which share of its first value the loss has fallen; minus infinity if it is not finite."""
        first, last = self.losses[0], self.losses[-1]
        if not math.isfinite(last) or not math.isfinite(first):
            return -math.inf
        return (first - last) / max(abs(first), 1e-12)


def one_batch(
    optimizers: Sequence[Optimizer],
    state: TrainingState,
    compute: Callable[[], Tensor],
) -> Result:
    """Train on one batch over and over, and return what came of it; the training is put back.

    Args:
        optimizers: The optimizers that train.
        state: The state before the first step.
        compute: Computes the loss of the batch with the present weights.
    """
    if not all("lr" in group for each in optimizers for group in each.param_groups):
        return untried("an optimizer has no learning rate")
    try:
        sweep = _Sweep(optimizers, state, compute)
        sweep.run()
        return sweep.result()
    except Exception as error:  # noqa: BLE001 - the program's own code, called by others than itself
        return untried(f"the loss could not be computed again: {in_short(error)}")
    finally:
        state.restore()


def untried(why: str) -> Result:
    """Return the result where no step can be repeated."""
    return Result(TRIAL, "untried", "wanted to train on one batch over and over", why)


class _Sweep:
    """Repeated steps on one batch, at several rates.

    Args:
        optimizers: The optimizers.
        state: The state before the first step.
        compute: Computes the loss of the batch with the present weights.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        state: TrainingState,
        compute: Callable[[], Tensor],
    ) -> None:
        self._optimizers = optimizers
        self._state = state
        self._compute = compute
        self._own_rates = [[_own_rate(g) for g in o.param_groups] for o in optimizers]
        self._courses: list[_Course] = []
        self._moves = False
        self._has_gradient = False
        self._rounded = 0.0

    def run(self) -> None:
        """Take the steps at each rate, the program's own first."""
        began = monotonic()
        for factor in FACTORS:
            self._train_at(factor)
            if monotonic() - began > MOST_SECONDS_IN_ALL:
                return
        further = self._further()
        while further is not None and monotonic() - began < MOST_SECONDS_IN_ALL:
            self._train_at(further)
            further = self._further()

    def _train_at(self, factor: float) -> None:
        self._state.restore()
        self._set_rates(factor)
        course = _Course(factor)
        self._courses.append(course)
        is_own = factor == OWN
        end = monotonic() + MOST_SECONDS[is_own]
        while len(course.losses) < MOST_STEPS[is_own]:
            course.losses.append(self._step())
            if is_own and len(course.losses) == 1:
                held = held_by(self._optimizers)
                self._has_gradient = any(map(has_gradient, held))
                self._moves = any(map(self._state.has_changed, held))
                self._rounded = _rounded_away(held, self._state)
            if monotonic() > end or not math.isfinite(course.losses[-1]):
                return

    def _set_rates(self, factor: float) -> None:
        for optimizer, rates in zip(self._optimizers, self._own_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def _further(self) -> float | None:
        """Return a rate beyond those that were tried, if the loss may yet fall there; None if not."""
        ordered = sorted(self._courses, key=lambda course: course.factor)
        best = max(ordered, key=lambda course: course.fall)
        if best.fall >= LEARNED or not self._moves:
            return None
        lowest, highest = ordered[0], ordered[-1]
        if best is highest and highest.factor < 1 / FARTHEST:
            return highest.factor * 10
        if lowest.fall <= 0 and lowest.factor > FARTHEST:
            return lowest.factor / 10
        return None

    def _step(self) -> float:
        """Take one step; returns the loss before it."""

        def closure() -> Tensor:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss = self._compute()
            loss.backward()
            return loss

        loss = closure()
        for optimizer in self._optimizers:
            if wants_closure(optimizer):
                optimizer.step(closure)  # type: ignore[arg-type]
            else:
                optimizer.step()
        return float(loss.detach())

    def result(self) -> Result:
        """Return what came of it."""
        own = self._courses[0]
        if not math.isfinite(own.losses[0]):
            means = "The loss is not finite before anything is learned."
            return Result(TRIAL, "wrong", _DID, "the first loss is NaN or infinite", means)

        rate = max(rate for rates in self._own_rates for rate in rates)
        ordered = sorted(self._courses, key=lambda course: course.factor)
        figure = Rates({course.factor: tuple(course.losses) for course in ordered}, rate)
        best = max(self._courses, key=lambda course: course.fall)
        came = (
            f"{compact(own.losses[0])} -> {compact(own.losses[-1])} in "
            f"{counted(len(own.losses) - 1, 'step')} at the rate {compact(rate)}"
        )
        if best.fall > own.fall + NOTHING:
            steps = len(best.losses) - 1
            came += f", to {compact(best.losses[-1])} in {steps} at {compact(rate * best.factor)}"

        verdict: Verdict = "look"
        if own.losses[-1] < -FAR_BELOW * max(abs(own.losses[0]), 1.0):
            means = "The loss falls far below zero. If it has a lower end, its sign is wrong."
        elif self._rounded > MOSTLY:
            means = (
                f"{percent(self._rounded)} of the numbers with a gradient did not change in the "
                "first step: it is below the digits that they have. Keep the weights in float32, "
                "and compute under autocast; or raise the rate."
            )
        elif own.fall >= LEARNED:
            verdict = "ok"
            means = ""
        elif rate == 0:
            means = "The rate is zero at the first step, and no schedule says what it will be."
        elif not self._has_gradient:
            means = "No parameter of the optimizer gets a gradient other than zero from this batch."
        elif not self._moves:
            means = (
                "There are gradients, and no parameter changes: the steps are rounded away, or "
                "the model fits this batch as well as it can."
            )
        elif best.fall >= LEARNED and best.factor > OWN:
            means = (
                f"At {compact(rate * best.factor)} the same batch is learned. Unless a schedule "
                "raises the rate after the first step, it is too small."
            )
        elif not math.isfinite(own.losses[-1]):
            means = "The loss becomes NaN or infinite"
            if best.fall > 0 and best.factor < OWN:
                means += f", and falls at {compact(rate * best.factor)}: the rate is too large."
            else:
                means += " at every rate that was tried, or does not fall."
        elif best.fall >= LEARNED:
            means = f"At {compact(rate * best.factor)} the same batch is learned: the rate is too large."
        elif len(own.losses) < ENOUGH:
            verdict = "untried"
            means = ""
            came += ", which is too few to say whether it is learned"
        elif best.fall < NOTHING:
            means = (
                f"Nor does it fall at rates from {compact(rate * ordered[0].factor)} to "
                f"{compact(rate * ordered[-1].factor)}. If the model is fresh, and the loss no large "
                "constant, a model that cannot learn one batch has a fault and not a bad rate: see "
                "whether the loss has the right sign and a slope, and what its gradient reaches."
            )
        else:
            means = "It is learned slowly at every rate that was tried."
        return Result(TRIAL, verdict, _DID, came, means, figure=figure)


def _rounded_away(held: Sequence[Tensor], state: TrainingState) -> float:
    """Return the share of the numbers with a gradient, in 16 bits, that a step did not change."""
    asked = unmoved = 0
    for param in held:
        if param.grad is None or param.grad.is_sparse or param.dtype not in HALVES:
            continue
        has_slope = param.grad != 0
        asked += int(has_slope.sum())
        unmoved += int((has_slope & ~state.changes(param)).sum())
    if asked == 0:
        return 0.0
    return unmoved / asked


def _own_rate(group: Mapping[str, Any]) -> float:
    """Return the rate of a group of parameters: that of its schedule, which may begin with a warm-up."""
    return float(group.get("initial_lr", group["lr"]))


def wants_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer computes the loss itself, several times in a step."""
    first = next(iter(inspect.signature(optimizer.step).parameters.values()), None)
    return (
        first is not None
        and first.default is first.empty
        and first.kind is not first.VAR_POSITIONAL
    )
