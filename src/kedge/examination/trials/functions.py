"""Whether the backward of the program's own `torch.autograd.Function` classes agrees with finite differences.

Each function in the graph of the loss is called again with the inputs that it had, in float64, and
its gradients are compared by `torch.autograd.gradcheck`, along random directions.

Cannot see: functions whose forward needs what float64 does not have, such as a kernel for float32.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from kedge.examination.result import Result, in_short
from kedge.examination.step import ExaminedStep

TRIAL = "functions"


def functions(step: ExaminedStep) -> Iterator[Result]:
    """Yield a result for each of the program's own functions that the model's run calls."""
    if step.loss is None:
        return
    for function in step.loss.functions:
        name = function.__name__
        did = f"compared the backward of {name} with finite differences, in float64"
        given = _arguments(step, function)
        if given is None:
            yield Result(TRIAL, "untried", did, "the model does not call it in its forward")
            continue
        yield _compared(function, given, did)


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
    checked = [value for value in wide if isinstance(value, Tensor) and value.requires_grad]
    if not checked:
        return Result(TRIAL, "untried", did, "none of its inputs is a tensor of real numbers")
    try:
        with torch.enable_grad():
            # With a fixed direction, so that the same program is told the same.
            torch.manual_seed(0)
            gradcheck(function.apply, wide, fast_mode=True)
    except GradcheckError as error:
        if _is_step(function, wide):
            came = "its result is constant around its inputs, and its gradient is not zero"
            means = "A straight-through gradient, if this is meant; a quantizer needs one."
            return Result(TRIAL, "look", did, came, means)
        came = str(error).strip().partition("\n")[0]
        means = "Its backward is not the derivative of its forward: every step uses its gradient."
        return Result(TRIAL, "wrong", did, came[:160], means)
    except Exception as error:  # noqa: BLE001 - whatever its code does in float64
        return Result(TRIAL, "untried", did, f"it cannot: {in_short(error)}")
    return Result(TRIAL, "ok", did, "they agree")


def _in_double(value: Any) -> Any:
    """Return an argument as gradients are compared at it: in float64."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().double().clone().requires_grad_()


def _is_step(function: Any, wide: tuple[Any, ...]) -> bool:
    """Whether a function's result does not change with small changes of its inputs."""
    moved = tuple(
        value.detach() + 1e-7 if isinstance(value, Tensor) and value.requires_grad else value
        for value in wide
    )
    with torch.no_grad():
        one, other = function.apply(*wide), function.apply(*moved)
    if not isinstance(one, Tensor):
        return False
    same = (one == other).double().mean()
    return bool(same > 0.9)
