"""What an action may look like, and what it may return."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kedge.errors import ActionArity, EditError, InPlaceEdit
from kedge.flow import Act, Action
from kedge.sites.leaves import describe, shape_of
from kedge.sites.site import Site

Measure: TypeAlias = Callable[[Tensor, int], None]
"""What measures a value: it is given the value and the step, and nothing it does changes either."""


@runtime_checkable
class Measuring(Protocol):
    """An action that measures values: it needs no event and never returns anything."""

    def bind_value(self, site: Site) -> Measure | None:
        """Return what is to be called with each value at this site; None where it needs the event after all."""


def as_act(action: Action) -> Act:
    """Let an action be called with ``(value, event)``.

    Raises:
        ActionArity: If it takes neither one nor two arguments.
    """
    try:
        params = list(inspect.signature(action).parameters.values())
    except (TypeError, ValueError):  # builtins such as torch.zeros_like do not tell: they take the value
        return lambda value, event: action(value)
    places = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in params)
    needs_keywords = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in params)
    if needs_keywords or len(needed) > 2 or not (places or any_number):
        raise ActionArity(
            f"the action {getattr(action, '__qualname__', action)}{inspect.signature(action)} cannot be called; "
            "an action takes (value) or (value, event), everything else needs a default"
        )
    if len(needed) == 2 or (len(places) > 1 and places[1].name == "event"):
        return action
    return lambda value, event: action(value)


def check_edit(value: Tensor, result: Any, action: Any, site: Site, *, in_place: bool = False) -> None:
    """Refuse a returned value that cannot take the old one's place.

    Raises:
        InPlaceEdit: If the old value was changed in place.
        EditError: If it is no tensor, or of another shape, dtype or device.
    """
    if in_place:
        raise InPlaceEdit(
            "the value was changed in place, but it may share memory with what other parts of the program use; "
            "return a new tensor instead (x * 2, not x.mul_(2))"
        )
    if site.kind == "param":
        raise EditError(
            "a value was returned at :param, where it has nowhere to go; edit :param.grad or a module's :out"
        )
    if not isinstance(result, Tensor):
        raise EditError(f"it returned a {type(result).__name__}; return None to leave the value, or a tensor")
    fixed = "a gradient" if site.is_gradient else "what autograd saved" if site.kind == "saved" else None
    free = getattr(action, "reshape", False) and fixed is None
    if not free and _form(result) != _form(value):
        advice = (
            "to change them use kedge.replace(..., reshape=True)" if fixed is None else f"{fixed} must keep all three"
        )
        raise EditError(
            f"it returned {describe(result)} on {result.device} in place of {describe(value)} on {value.device}; {advice}"
        )


def _form(value: Tensor) -> tuple[Any, ...]:
    return shape_of(value), value.dtype, value.device
