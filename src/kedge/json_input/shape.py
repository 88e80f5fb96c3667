"""The shape of JSON values: checks put together to one description for each kind of document.

A check is a function that takes a value and raises `Misshapen` if it is another one. Keys that a
description does not have are ignored: a later version may have added them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], None]

#: Whole numbers are below this, as they are in arrays.
MOST = 1 << 63
_LONGEST = 60


class Misshapen(ValueError):
    """A value does not have its shape; the text names its place and the problem."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self._place, self._problem = "", problem

    def within(self, place: str) -> Misshapen:
        """Return the same error, seen from one level further out."""
        self._place = place + self._place
        return self

    def __str__(self) -> str:
        return f"{self._place.lstrip('.') or 'it'} {self._problem}"


def _unlike(expected: str, value: Any) -> Misshapen:
    return Misshapen(f"is {_found(value)} but must be {expected}")


def _found(value: Any) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    if value is None:
        return "null"
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[: _LONGEST - 1]}…"


def _simple(expected: str, fits: Callable[[Any], bool]) -> Check:
    def check(value: Any) -> None:
        if not fits(value):
            raise _unlike(expected, value)

    return check


anything: Check = lambda _: None  # noqa: E731
text = _simple("text", lambda value: type(value) is str)
flag = _simple("true or false", lambda value: type(value) is bool)
whole = _simple("a whole number", lambda value: type(value) is int and -MOST <= value < MOST)
count = _simple("a whole number, 0 or more", lambda value: type(value) is int and 0 <= value < MOST)
total = _simple("a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
positive = _simple(
    "a whole number, 1 or more", lambda value: type(value) is int and 1 <= value < MOST
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
    return _simple(
        " or ".join(map(repr, values)), lambda value: type(value) is str and value in values
    )


def nullable(check: Check) -> Check:
    """Return a check that also takes null."""

    def check_unless_null(value: Any) -> None:
        if value is not None:
            check(value)

    return check_unless_null


def list_of(check: Check, length: int | None = None) -> Check:
    """Return the check of a list whose values all have one shape, and of its length if that is given."""

    def check_list(value: Any) -> None:
        if type(value) is not list or (length is not None and len(value) != length):
            raise _unlike("a list" if length is None else f"a list of {length}", value)
        place = 0
        try:
            for place, each in enumerate(value):  # noqa: B007 - for the error
                check(each)
        except Misshapen as error:
            raise error.within(f"[{place}]") from None

    return check_list


def tuple_of(*checks: Check) -> Check:
    """Return the check of a list with one shape for each of its places."""
    of_length = list_of(anything, len(checks))

    def check_places(value: Any) -> None:
        of_length(value)
        for place, (check, each) in enumerate(zip(checks, value, strict=True)):
            try:
                check(each)
            except Misshapen as error:
                raise error.within(f"[{place}]") from None

    return check_places


def mapping_of(check: Check) -> Check:
    """Return the check of an object whose values all have one shape."""

    def check_values(value: Any) -> None:
        mapping(value)
        for name, each in value.items():
            _check_field(name, check, each)

    return check_values


def fields(required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    """Return the check of an object.

    Args:
        required: The keys that must be there, and the shapes of their values.
        optional: Those that may be missing.
    """
    known = {**(optional or {}), **required}

    def check_fields(value: Any) -> None:
        mapping(value)
        for name in required:
            if name not in value:
                raise Misshapen(f"has no {name!r}")
        name = ""
        try:
            for name, each in value.items():
                check = known.get(name)
                if check is not None:
                    check(each)
        except Misshapen as error:
            raise error.within(f".{name}") from None

    return check_fields


def _check_field(name: str, check: Check, value: Any) -> None:
    try:
        check(value)
    except Misshapen as error:
        raise error.within(f".{name}") from None
