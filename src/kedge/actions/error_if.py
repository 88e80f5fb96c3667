"""The action that raises an error on a condition: `error_if`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kedge.calls.arguments import called_as, described
from kedge.errors import ConditionMet, WrongCall
from kedge.native.reductions import real
from kedge.sites.leaves import numbers_of, untransformed
from kedge.torch_internals.own_work import programs_work


class ErrorIf:
    """The action that `error_if` returns."""

    observes = True

    def __init__(self, condition: Callable[[Tensor], Any]) -> None:
        self.condition = condition

    def __call__(self, value: Tensor) -> None:
        """Raise `ConditionMet` if the condition holds."""
        if self.condition is nonfinite:
            found = nonfinite(value.detach())
        else:
            with programs_work():
                found = self.condition(value)
        if isinstance(found, Tensor):
            plain = untransformed(found)
            if plain is not found:  # under `vmap` there is one result a sample
                found = plain.any()
        name = getattr(self.condition, "__name__", repr(self.condition))
        if isinstance(found, Tensor) and found.numel() != 1:
            raise WrongCall(
                f"error_if({name}): the condition returned {found.numel()} elements; it returns "
                f"one, as in kedge.error_if(lambda value: {name}(value).any())"
            )
        if found:
            raise ConditionMet(f"{name} is true: {_summary(value)}")

    def __repr__(self) -> str:
        """The call that makes this action."""
        return f"error_if({getattr(self.condition, '__name__', 'condition')})"


@called_as('kedge.hook(model, "**", kedge.error_if(kedge.nonfinite))')
def error_if(condition: Callable[[Tensor], Any]) -> ErrorIf:
    """Raise an error as soon as a value meets a condition: an action for `kedge.hook`.

    The error, `ConditionMet`, names the site, the pass and the shape. Reading the result of the
    condition waits for the device.

    Args:
        condition: A function that takes the tensor and returns a bool, or a tensor of one element.

    Returns:
        The action.

    Examples:
        >>> with kedge.hook(model, "**", kedge.error_if(kedge.nonfinite)):
        ...     output = model(images)
    """
    if not callable(condition) or isinstance(condition, ErrorIf):
        raise WrongCall(
            f"error_if({described(condition)}): the condition is a function that takes the "
            "value and returns a bool; give it without calling it, as in "
            "kedge.error_if(kedge.nonfinite)"
        )
    return ErrorIf(condition)


def nonfinite(value: Tensor) -> Tensor:
    """Return whether a tensor contains a NaN or an infinity; the usual condition for `error_if`.

    Args:
        value: Any tensor; integers and booleans are always finite.

    Returns:
        A boolean tensor of one element, on the device of the value.

    Examples:
        >>> kedge.nonfinite(torch.tensor([1.0, float("inf")]))
        tensor(True)
    """
    if not isinstance(value, Tensor):
        raise WrongCall(
            f"nonfinite({described(value)}): give a tensor; on a model it is a condition: "
            'kedge.hook(model, "**", kedge.error_if(kedge.nonfinite))'
        )
    stored = _stored(value)
    if not stored.is_floating_point() and not stored.is_complex():
        return torch.zeros((), dtype=torch.bool, device=value.device)
    return ~torch.isfinite(real(stored)).all()


def _summary(value: Tensor) -> str:
    stored = untransformed(_stored(value))
    if not stored.is_floating_point() and not stored.is_complex():
        return f"{stored.numel()} elements"
    nans = int(stored.isnan().sum())
    infinities = int(stored.isinf().sum())
    return f"{stored.numel()} elements, {nans} of them NaN and {infinities} infinite"


def _stored(value: Tensor) -> Tensor:
    """Return the numbers that a tensor of any kind stores; the tensor itself if it has no data."""
    numbers = numbers_of(value)
    if numbers is None:
        return value
    return numbers.stored
