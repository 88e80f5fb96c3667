"""One batch learned over and over, at the program's own learning rate and at others.

A model that cannot learn a single batch by heart has a fault that more data does not mend (Karpathy,
"A Recipe for Training Neural Networks", 2019); the course of its loss over several rates shows
whether the rate is the reason (Smith, "Cyclical Learning Rates for Training Neural Networks", 2017).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.examination.result import Rates, Result
from kedge.examination.state import TrainingState
from kedge.short_text import compact, counted

TRIAL = "one-batch"
SAME = 1e-3
"""The relative difference up to which a loss that was computed again is the same."""
OWN = 1.0
FACTORS = (OWN, 0.01, 0.1, 10.0, 100.0)
"""The factors on the program's own rate, in the order in which they are tried."""
MOST_STEPS = {True: 60, False: 20}
"""Steps at the program's own rate, and at another."""
MOST_SECONDS = {True: 5.0, False: 1.5}
"""Seconds for them."""
FEWEST_STEPS = 3
LEARNED = 0.2
"""The share of its first value by which the loss has to fall."""
NOTHING = 0.02
"""The share under which it has not fallen."""
_DID = "trained on one batch over and over, with the same random numbers"


@dataclass
class _Course:
    factor: float
    began: float
    losses: list[float] = field(default_factory=list)

    @property
    def is_over(self) -> bool:
        own = self.factor == OWN
        if len(self.losses) < FEWEST_STEPS:
            return bool(self.losses) and not math.isfinite(self.losses[-1])
        if not math.isfinite(self.losses[-1]):
            return True
        full = len(self.losses) >= MOST_STEPS[own]
        return full or monotonic() - self.began > MOST_SECONDS[own]

    @property
    def fall(self) -> float:
        """By which share of its first value the loss has fallen; minus infinity if it is not finite."""
        first, last = self.losses[0], self.losses[-1]
        if not math.isfinite(last) or not math.isfinite(first):
            return -math.inf
        return (first - last) / max(abs(first), 1e-12)


def one_batch(
    models: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    state: TrainingState,
    compute: Callable[[], Tensor],
    expected: float,
) -> Result:
    """Train on one batch over and over, and return what came of it; the training is put back.

    Args:
        models: The models that are trained.
        optimizers: Their optimizers.
        state: The state before the first step.
        compute: Computes the loss of the batch with the present weights.
        expected: The loss that it has to be at first.
    """
    try:
        state.restore()
        first = float(compute().detach())
        is_same = abs(first - expected) <= SAME * max(abs(expected), SAME)
        if math.isfinite(expected) and not is_same:
            return untried(
                f"the loss was {compact(expected)} and is {compact(first)} when it is computed again"
            )
        sweep = _Sweep(models, optimizers, state)
        sweep.run(compute)
        return sweep.result()
    except Exception as error:  # noqa: BLE001 - the program's own code, called by others than itself
        reason = str(error).strip().partition("\n")[0][:160]
        return untried(f"{type(error).__name__}: {reason}")
    finally:
        state.restore()


def untried(why: str) -> Result:
    """Return the result where no step can be repeated."""
    return Result(TRIAL, "untried", "wanted to train on one batch over and over", why)


class _Sweep:
    """Decides with which rate the next step on the batch is taken, and judges what came of it.

    Args:
        models: The models that are trained.
        optimizers: Their optimizers.
        state: The state before the first step.
    """

    def __init__(
        self, models: Iterable[nn.Module], optimizers: Iterable[Optimizer], state: TrainingState
    ) -> None:
        self._models = list(models)
        self._optimizers = list(optimizers)
        self._state = state
        self._factors = list(FACTORS)
        self._own_rates = [[float(g["lr"]) for g in o.param_groups] for o in self._optimizers]
        self._courses: list[_Course] = []
        self.moved = False
        """Whether a step at the program's own rate has changed a parameter."""

    @property
    def is_over(self) -> bool:
        """Whether all rates were tried."""
        return not self._factors and self._courses[-1].is_over

    def run(self, compute: Callable[[], Tensor]) -> None:
        """Take the steps, each on the same batch.

        Args:
            compute: Computes its loss with the present weights.
        """
        while not self.is_over:
            self._begin_step()
            self._step(compute)
            course = self._courses[-1]
            if course.factor == OWN and len(course.losses) == 1:
                parameters = (p for model in self._models for p in model.parameters())
                self.moved = any(map(self._state.has_changed, parameters))

    def _begin_step(self) -> None:
        """Begin with the next rate if it is time, and set the rate."""
        if not self._courses or self._courses[-1].is_over:
            self._state.restore()
            self._courses.append(_Course(self._factors.pop(0), monotonic()))
        factor = self._courses[-1].factor
        for optimizer, rates in zip(self._optimizers, self._own_rates, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor

    def _step(self, compute: Callable[[], Tensor]) -> None:
        def closure() -> Tensor:
            for optimizer in self._optimizers:
                optimizer.zero_grad()
            loss = compute()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        loss = closure()
        self._courses[-1].losses.append(float(loss.detach()))
        for optimizer in self._optimizers:
            if _wants_closure(optimizer):
                optimizer.step(closure)
            else:
                optimizer.step()

    def result(self) -> Result:
        """Return what came of it."""
        courses = [course for course in self._courses if len(course.losses) >= FEWEST_STEPS]
        if not courses or courses[0].factor != OWN:
            cut = len(self._courses[0].losses) if self._courses else 0
            if self._courses and not all(map(math.isfinite, self._courses[0].losses)):
                means = "The loss is not finite before anything is learned."
                return Result(TRIAL, "wrong", _DID, "the loss is NaN or infinite at once", means)
            return Result(TRIAL, "untried", _DID, f"only {counted(cut, 'step')} could be repeated")
        own = courses[0]
        rate = max(rate for rates in self._own_rates for rate in rates)
        figure = Rates({c.factor: tuple(c.losses) for c in sorted(courses, key=_factor)}, rate)
        best = max(courses, key=lambda course: course.fall)
        came = (
            f"{compact(own.losses[0])} -> {compact(own.losses[-1])} in "
            f"{counted(len(own.losses) - 1, 'step')} at the rate {compact(rate)}"
        )
        if best is not own and best.fall > own.fall + NOTHING:
            came += (
                f", to {compact(best.losses[-1])} in {len(best.losses) - 1} at {compact(rate * best.factor)}"
            )
        if own.fall >= LEARNED:
            return Result(TRIAL, "ok", _DID, came, figure=figure)
        if not self.moved:
            means = (
                "No parameter changes: the rate is zero, nothing has a gradient, or the optimizer "
                "holds other tensors than the model."
            )
            return Result(TRIAL, "wrong", _DID, came, means, figure=figure)
        if best.fall >= LEARNED:
            means = f"At {compact(rate * best.factor)} the same batch is learned. "
            if best.factor > OWN:
                means += "Unless a schedule raises the rate after the first step, it is too small."
            else:
                means += "The rate is too large."
            return Result(TRIAL, "look", _DID, came, means, figure=figure)
        if best.fall < NOTHING:
            means = (
                "A model that cannot learn one batch has a fault, not a bad rate: see whether the "
                "targets belong to the inputs, the loss has the right sign, and the gradient "
                "reaches all parameters."
            )
            return Result(TRIAL, "wrong", _DID, came, means, figure=figure)
        means = "It is learned slowly at every rate that was tried."
        return Result(TRIAL, "look", _DID, came, means, figure=figure)


def _wants_closure(optimizer: Optimizer) -> bool:
    """Whether an optimizer computes the loss itself, several times in a step."""
    first = next(iter(inspect.signature(optimizer.step).parameters.values()), None)
    return first is not None and first.default is first.empty and first.kind is not first.VAR_POSITIONAL


def _factor(course: _Course) -> float:
    return course.factor
