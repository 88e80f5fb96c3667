"""Whether the backward of the program's own `torch.autograd.Function` classes agrees with finite differences.

Each function in the graph of the loss is called again with the inputs that it had, in float64, and
its gradient is compared with finite differences, at some elements of each input.

Cannot see: functions whose forward needs what float64 does not have, such as a kernel for float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kedge.examination.result import Result, in_short
from kedge.examination.step import ExaminedStep
from kedge.frames import is_torch
from kedge.short_text import compact

TRIAL = "functions"
MOST = 16
"""Elements of each input at which slopes are compared."""
STEP = 1e-6
"""The distance of a finite difference."""
CLOSE = 1e-4
"""The difference of two slopes, as a share of the largest, up to which they agree."""
MOSTLY = 0.6
"""The share of elements without a slope from which on a function is a step."""


def functions(step: ExaminedStep) -> Iterator[Result]:
    """Yield a result for each of the program's own functions that the model's run calls."""
    if step.loss is None:
        return
    for function in step.loss.functions:
        if is_torch(inspect.getfile(function)):
            continue  # such as what torch.compile makes
        name = function.__name__
        did = f"compared the backward of {name} with finite differences, in float64"
        given = _arguments(step, function)
        if given is None:
            yield Result(TRIAL, "untried", did, "the model does not call it in its forward")
            continue
        try:
            yield _compared(function, given, did)
        except Exception as error:  # noqa: BLE001 - whatever its code does in float64
            yield Result(TRIAL, "untried", did, f"it cannot: {in_short(error)}")


def _arguments(step: ExaminedStep, function: Any) -> tuple[Any, ...] | None:
    """Return the arguments of the first call of a function in a run of the model."""
    heard: list[tuple[Any, ...]] = []
    forward = inspect.getattr_static(function, "forward")
    if not isinstance(forward, staticmethod):
        return None
    has_context = function.setup_context is torch.autograd.Function.setup_context

    def hearing(*args: Any, **kwargs: Any) -> Any:
        heard.append(args[1:] if has_context else args)
        return forward.__func__(*args, **kwargs)

    own = vars(function).get("forward")
    function.forward = staticmethod(hearing)
    try:
        step.run.graph()
    finally:
        del function.forward
        if own is not None:
            function.forward = own
    return heard[0] if heard else None


def _compared(function: Any, given: tuple[Any, ...], did: str) -> Result:
    wide = tuple(map(_in_double, given))
    at = [i for i, value in enumerate(wide) if isinstance(value, Tensor) and value.requires_grad]
    if not at:
        return Result(TRIAL, "untried", did, "none of its inputs is a tensor of real numbers")

    def apply(*values: Any) -> Tensor:
        results = function.apply(*values)
        if isinstance(results, Tensor):
            return results
        return next(value for value in results if isinstance(value, Tensor))

    generator = torch.Generator().manual_seed(0)  # the same program is told the same
    slopes: list[tuple[float, float]] = []
    with torch.enable_grad():
        result = apply(*wide)
        weights = torch.randn(result.shape, generator=generator, dtype=result.dtype)
        weights = weights.to(result.device)
        gradients = torch.autograd.grad(
            result, [wide[i] for i in at], weights.to(result.dtype), allow_unused=True
        )
    with torch.no_grad():
        if not torch.equal(apply(*wide), apply(*wide)):
            return Result(TRIAL, "untried", did, "it gives other results each time")
        for i, gradient in zip(at, gradients, strict=True):
            places = torch.randint(wide[i].numel(), (MOST,), generator=generator).tolist()
            for place in places:
                measured = _slope(apply, wide, i, place, weights)
                told = 0.0 if gradient is None else float(gradient.reshape(-1)[place])
                slopes.append((measured, told))
    return _judged(slopes, did)


def _judged(slopes: list[tuple[float, float]], did: str) -> Result:
    """Judge pairs of the measured slope at one element of an input, and the gradient there."""
    size = max(abs(value) for pair in slopes for value in pair)
    if all(abs(measured - told) <= CLOSE * size for measured, told in slopes):
        return Result(TRIAL, "ok", did, f"they agree at {len(slopes)} elements")
    flat = sum(abs(measured) <= CLOSE * size < abs(told) for measured, told in slopes)
    if flat > MOSTLY * len(slopes):
        came = f"at {flat} of {len(slopes)} elements the result is flat, and the gradient not zero"
        means = "A straight-through gradient, as a quantizer needs, is meant to be so."
        return Result(TRIAL, "look", did, came, means)
    factors = [told / measured for measured, told in slopes if abs(measured) > CLOSE * size]
    if factors and max(factors) < 0 and max(factors) - min(factors) < 0.01 * abs(min(factors)):
        came = f"the gradient is {compact(factors[0])} times the derivative"
        means = "A gradient that is reversed on purpose, as against adversaries, is meant to be so."
        return Result(TRIAL, "look", did, came, means)
    measured, told = max(slopes, key=lambda pair: abs(pair[0] - pair[1]))
    came = f"at one element the slope is {compact(measured)}, and the gradient {compact(told)}"
    means = "Its backward is not the derivative of its forward, and every step uses it."
    return Result(TRIAL, "wrong", did, came, means)


def _slope(
    apply: Callable[..., Tensor], wide: tuple[Any, ...], i: int, place: int, weights: Tensor
) -> float:
    """Return the slope of the weighted result in one element of an input."""
    found = []
    for sign in (1.0, -1.0):
        moved = wide[i].detach().clone()
        moved.reshape(-1)[place] += sign * STEP
        found.append(float((apply(*wide[:i], moved, *wide[i + 1 :]) * weights).sum()))
    return (found[0] - found[1]) / (2 * STEP)


def _in_double(value: Any) -> Any:
    """Return an argument as gradients are compared at it: in float64."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().clone().contiguous().requires_grad_()
