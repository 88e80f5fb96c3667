"""The shape of JSON values: checks put together to one description for each kind of document.

A check is a function that takes a value, raises `Misshapen` if it is another one, and returns it
as it is kept: a list as a tuple, and of an object the keys that its description has. Others are
ignored: a later version may have added them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], Any]

#: Whole numbers are below this, as they are in arrays.
MOST = 1 << 63
_LONGEST = 60


class Misshapen(ValueError):
    """A value does not have its shape; the text names its place and the problem."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self._place = ""
        self._problem = problem

    def within(self, place: str) -> Misshapen:
        """Return the same error, seen from one level further out."""
        self._place = place + self._place
        return self

    def __str__(self) -> str:
        place = self._place.lstrip(".") or "it"
        return f"{place} {self._problem}"


def _unlike(expected: str, value: Any) -> Misshapen:
    return Misshapen(f"is {_found(value)} but must be {expected}")


def _found(value: Any) -> str:
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "null"
    shown = repr(value)
    if len(shown) > _LONGEST:
        return f"{shown[: _LONGEST - 1]}…"
    return shown


def _simple(expected: str, fits: Callable[[Any], bool]) -> Check:
    def check(value: Any) -> Any:
        if not fits(value):
            raise _unlike(expected, value)
        return value

    return check


anything: Check = lambda value: value  # noqa: E731
text = _simple("text", lambda value: type(value) is str)
flag = _simple("true or false", lambda value: type(value) is bool)
whole = _simple(
    "a whole number",
    lambda value: type(value) is int and -MOST <= value < MOST,
)
count = _simple(
    "a whole number, 0 or more",
    lambda value: type(value) is int and 0 <= value < MOST,
)
total = _simple(
    "a whole number, 0 or more",
    lambda value: type(value) is int and value >= 0,
)
positive = _simple(
    "a whole number, 1 or more",
    lambda value: type(value) is int and 1 <= value < MOST,
)
number = _simple(
    "a number",
    lambda value: (
        (type(value) is float and math.isfinite(value))
        or (type(value) is int and -MOST <= value < MOST)
    ),
)
count_or_flag = _simple(
    "a whole number, 0 or more",
    lambda value: type(value) is bool or (type(value) is int and value >= 0),
)
mapping = _simple("an object", lambda value: type(value) is dict)
plain_name = _simple(
    "the name of a file in the folder",
    lambda value: (
        type(value) is str and value not in ("", ".", "..") and not set("/\\\0") & set(value)
    ),
)


def one_of(*values: str) -> Check:
    """Return the check of a text that is one of a few."""
    expected = " or ".join(map(repr, values))
    return _simple(expected, lambda value: type(value) is str and value in values)


def number_or(*words: str) -> Check:
    """Return the check of a number for which one of a few texts may stand."""

    def check_unless_word(value: Any) -> Any:
        if type(value) is str and value in words:
            return value
        return number(value)

    return check_unless_word


def nullable(check: Check) -> Check:
    """Return a check that also takes null."""

    def check_unless_null(value: Any) -> Any:
        if value is None:
            return None
        return check(value)

    return check_unless_null


def list_of(check: Check, length: int | None = None) -> Check:
    """Return the check of a list whose values all have one shape, and of its length if given."""
    expected = "a list"
    if length is not None:
        expected = f"a list of {length}"

    def check_list(value: Any) -> tuple[Any, ...]:
        if type(value) is not list or (length is not None and len(value) != length):
            raise _unlike(expected, value)
        kept: list[Any] = []
        try:
            for each in value:
                kept.append(check(each))  # noqa: PERF401 - its length is the place of an error
        except Misshapen as error:
            raise error.within(f"[{len(kept)}]") from None
        return tuple(kept)

    return check_list


def tuple_of(*checks: Check) -> Check:
    """Return the check of a list with one shape for each of its places."""
    of_length = list_of(anything, len(checks))

    def check_places(value: Any) -> tuple[Any, ...]:
        of_length(value)
        kept: list[Any] = []
        try:
            for check, each in zip(checks, value, strict=True):
                kept.append(check(each))
        except Misshapen as error:
            raise error.within(f"[{len(kept)}]") from None
        return tuple(kept)

    return check_places


def mapping_of(check: Check) -> Check:
    """Return the check of an object whose values all have one shape."""

    def check_values(value: Any) -> dict[str, Any]:
        mapping(value)
        return _check_items(value, lambda _: check)

    return check_values


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return the check of an object.

    Args:
        required: The keys that must be there, and the shapes of their values.
        optional: Those that may be missing.
    """
    known = {**(optional or {}), **required}

    def check_fields(value: Any) -> dict[str, Any]:
        mapping(value)
        for name in required:
            if name not in value:
                raise Misshapen(f"has no {name!r}")
        return _check_items(value, known.get)

    return check_fields


def _check_items(
    value: Mapping[str, Any], check_of: Callable[[str], Check | None]
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    name = ""
    try:
        for name, each in value.items():
            check = check_of(name)
            if check is not None:
                kept[name] = check(each)
    except Misshapen as error:
        raise error.within(f".{name}") from None
    return kept
