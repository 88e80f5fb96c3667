"""Edits: actions that return a new value.

Each takes one tensor and returns one of the same shape, dtype and device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from kedge.calls.arguments import called_as, described
from kedge.errors import EditError, WrongCall
from kedge.sites.leaves import COMPRESSED


class Edit:
    """An edit with a readable name.

    Args:
        name: The call that makes it.
        change: Returns the value's replacement.
        reshape: Whether that may have another shape, dtype or device.
        each: Whether `change` makes each number of the result from the number at its place.
        arguments: The arguments of the function that makes it, by name, from which it can be made
            again; None if there is a function among them.
    """

    def __init__(
        self,
        name: str,
        change: Callable[[Tensor], Tensor],
        *,
        reshape: bool = False,
        each: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.name = name
        self.arguments = arguments
        self.change = change
        self.reshape = reshape
        self.each = each

    def __call__(self, value: Tensor) -> Tensor:
        """Return the value's replacement."""
        if self.each and value.is_nested and value.layout is torch.strided:
            # PyTorch has few operations on all parts at once.
            parts = value.unbind()
            if parts:
                return torch.nested.as_nested_tensor([self.change(part) for part in parts])
        return self.change(value)

    def __repr__(self) -> str:
        """The call that makes this edit."""
        return self.name


@called_as('kedge.hook(model, "layer4", kedge.replace(new))')
def replace(new: Any, *, reshape: bool = False) -> Edit:
    """Replace the value by another one: an action for `kedge.hook`.

    Args:
        new: A tensor, a number that fills the value's shape, or a function that takes the value and
            returns a tensor. The model receives a copy of a tensor, so it may work on it in place.
        reshape: Whether to allow another shape, dtype or device; for forward values only.

    Returns:
        The action.

    Examples:
        >>> with kedge.hook(model, "relu", kedge.replace(lambda value: value.clamp(max=1))):
        ...     output = model(images)
    """
    if isinstance(new, type) or not (callable(new) or _is_value(new)):
        raise WrongCall(
            f"replace({described(new)}): give a tensor, a number, or a function that takes "
            "the value and returns a tensor, "
            "such as kedge.replace(lambda value: value.clamp(max=1))"
        )
    if callable(new) and not isinstance(new, Tensor):
        name = getattr(new, "__name__", "function")
        return Edit(f"replace({name})", new, reshape=reshape, each=False)
    arguments = {"new": new, "reshape": reshape}
    if isinstance(new, Tensor):
        return Edit(
            "replace(tensor)",
            lambda value: new.clone(),
            reshape=reshape,
            each=False,
            arguments=arguments,
        )
    return Edit(
        f"replace({new})",
        lambda value: _filled(value, new),
        reshape=reshape,
        arguments=arguments,
    )


def _filled(value: Tensor, number: Any) -> Tensor:
    """Return a tensor like the value, filled with a number.

    Raises:
        EditError: If the value is sparse and would have that number only where it has one now.
    """
    if value.layout in COMPRESSED and number != 0:
        raise EditError(
            f"a sparse value cannot be filled with {number}: PyTorch would fill only the "
            "elements that it stores; return the new value from a function, as in "
            "kedge.replace(lambda value: ...)"
        )
    return torch.full_like(value, number)


@called_as('kedge.hook(model, "layer4", kedge.scale(0.5))')
def scale(factor: float | Tensor) -> Edit:
    """Multiply the value by a factor: an action for `kedge.hook`.

    Args:
        factor: A number, or a tensor that broadcasts to the shape of the value.

    Returns:
        The action.

    Examples:
        >>> with kedge.hook(model, "relu", kedge.scale(0.5)):
        ...     output = model(images)
    """
    _check_value("scale", factor)
    return Edit(
        f"scale({_short(factor)})", lambda value: value * factor, arguments={"factor": factor}
    )


@called_as('kedge.hook(model, "layer4", kedge.add(vector))')
def add(term: float | Tensor) -> Edit:
    """Add a term to the value: an action for `kedge.hook`.

    Args:
        term: A number, or a tensor that broadcasts to the shape of the value, such as a steering
            vector.

    Returns:
        The action.

    Examples:
        >>> with kedge.hook(model, "fc", kedge.add(torch.tensor([1.0, 0.0, 0.0]))):
        ...     output = model(images)
    """
    _check_value("add", term)
    return Edit(f"add({_short(term)})", lambda value: value + term, arguments={"term": term})


@called_as('kedge.hook(model, "layer4", kedge.clamp(min=0))')
def clamp(
    min: float | None = None,  # noqa: A002 - torch.clamp's own name
    max: float | None = None,  # noqa: A002 - as above
) -> Edit:
    """Limit each element of the value: an action for `kedge.hook`.

    Args:
        min: The lower limit; None for no limit.
        max: The upper limit; None for no limit.

    Returns:
        The action.

    Raises:
        WrongCall: If neither limit is given, or one is neither a number nor a tensor.

    Examples:
        >>> with kedge.hook(model, "**:out.grad", kedge.clamp(-1, 1)):
        ...     model(images).sum().backward()
    """
    if min is None and max is None:
        raise WrongCall("clamp() without limits changes nothing; pass min, max or both")
    for limit in (min, max):
        if limit is not None:
            _check_value("clamp", limit)
    limits = []
    if min is not None:
        limits.append(f"min={min}")
    if max is not None:
        limits.append(f"max={max}")
    name = f"clamp({', '.join(limits)})"
    return Edit(
        name,
        lambda value: torch.clamp(value, min=min, max=max),
        arguments={"min": min, "max": max},
    )


@called_as('kedge.hook(model, "layer4", kedge.zero())')
def zero() -> Edit:
    """Replace the value by zeros: an action for `kedge.hook`.

    Zeros at an output remove a part of the model (ablation); zeros at a gradient stop the backward
    there.

    Returns:
        The action.

    Examples:
        >>> with kedge.hook(model, "relu", kedge.zero()):
        ...     output = model(images)
    """
    return Edit("zero()", torch.zeros_like, arguments={})


def _is_value(given: object) -> bool:
    return isinstance(given, (Number, Tensor)) or hasattr(given, "__array__")


def _check_value(name: str, given: object) -> None:
    if not _is_value(given):
        raise WrongCall(
            f"{name}({described(given)}): give a number or a tensor; the model and the place "
            f'are arguments of kedge.hook, as in kedge.hook(model, "layer4", kedge.{name}(0.5))'
        )


def _short(value: float | Tensor) -> str:
    if isinstance(value, Tensor):
        return f"tensor{list(value.shape)}"
    return str(value)
