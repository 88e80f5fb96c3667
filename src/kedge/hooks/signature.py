"""The signature of `hook` as type checkers and `help` show it: the type of the values depends on the recording action."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, overload

from kedge.calls.arguments import called_as
from kedge.flow import Readable, Schedule
from kedge.hooks.handle import Hooked

_V = TypeVar("_V")
_F = TypeVar("_F", bound=Callable[..., Any])


class HookSignature(Protocol):
    """``hook(target, selector, *actions)``.

    The last action decides what the handle's values are.
    """

    @overload
    def __call__(
        self, target: Any, action: Readable[_V], /, *, when: Schedule | None = None
    ) -> Hooked[_V]: ...

    @overload
    def __call__(
        self,
        target: Any,
        selector: object,
        action: Readable[_V],
        /,
        *,
        when: Schedule | None = None,
    ) -> Hooked[_V]: ...

    @overload
    def __call__(
        self,
        target: Any,
        selector: object,
        edit: object,
        action: Readable[_V],
        /,
        *,
        when: Schedule | None = None,
    ) -> Hooked[_V]: ...

    @overload
    def __call__(self, target: Any, /, *what: Any, when: Schedule | None = None) -> Hooked[Any]: ...


def typed(hook: Callable[..., Hooked[Any]]) -> HookSignature:
    """Return the function, which explains calls that do not fit.

    Type checkers see the `HookSignature`.
    """
    return called_as(
        'kedge.hook(model, "layer4", kedge.record()), and when=kedge.every(10) for a schedule'
    )(hook)


def documented_like(other: Any) -> Callable[[_F], _F]:
    """Return a decorator that appends the arguments, results and errors in the docstring of `other`."""

    def document(function: _F) -> _F:
        sections = inspect.cleandoc(other.__doc__ or "").partition("Args:\n")
        function.__doc__ = f"{inspect.cleandoc(function.__doc__ or '')}\n\n{''.join(sections[1:])}"
        return function

    return document
