"""The protocol of measuring actions, and the check of the values that actions return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kedge.errors import EditError, InPlaceEdit
from kedge.flow import Event
from kedge.sites.leaves import describe, shape_of
from kedge.sites.site import Site

Measure: TypeAlias = Callable[..., None]
"""Measures a value, given the value, the step and the value's name among those of its call; changes none."""


@runtime_checkable
class Measuring(Protocol):
    """An action that measures values: needs no event and never returns a value."""

    def bind_value(self, site: Site) -> Measure | None:
        """Return the function to call with each value at a site.

        None where it needs the event after all.
        """


@runtime_checkable
class Refusing(Protocol):
    """An action that cannot serve every site."""

    def check(self, site: Site) -> None:
        """Raise an error for a site, or a pattern of sites, that the action cannot serve."""


@runtime_checkable
class Whole(Protocol):
    """An action that answers with the whole value of a call, so that it runs when all leaves have passed those before."""

    def one_call(self, events: Sequence[Event]) -> AbstractContextManager[None]:
        """Return the block in which the leaves of one call pass, each with its event."""


def check_edit(
    value: Tensor, result: Any, action: Any, site: Site, *, in_place: bool = False
) -> None:
    """Refuse a returned value that cannot replace the old one.

    Raises:
        InPlaceEdit: If the action changed the old value in place.
        EditError: If the site takes no edits, or the result is not a tensor or has another shape,
            dtype or device.
    """
    if in_place:
        raise InPlaceEdit(
            "the action changed the value in place, but other parts of the program "
            "may share its memory; return a new tensor instead (x * 2, not "
            "x.mul_(2))"
        )
    if not isinstance(result, Tensor):
        raise EditError(
            f"it returned a {type(result).__name__}; return a tensor, or None to keep the value"
        )
    if _form(result) == _form(value):
        return
    if site.is_gradient:
        advice = "a gradient must keep its shape, dtype and device"
    elif site.kind == "saved":
        advice = "a saved tensor must keep its shape, dtype and device"
    elif site.kind == "state":
        advice = "an optimizer's state must keep its shape, dtype and device"
    elif getattr(action, "reshape", False):
        return
    else:
        advice = "to change shape, dtype or device, use kedge.replace(..., reshape=True)"
    raise EditError(
        f"it returned {describe(result)} on {result.device} in place of "
        f"{describe(value)} on {value.device}; {advice}"
    )


def _form(value: Tensor) -> tuple[Any, ...]:
    return shape_of(value), value.dtype, value.device
