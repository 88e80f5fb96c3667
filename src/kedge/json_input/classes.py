"""Dataclasses as JSON objects: their annotations are the shape, by which they are read and written.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Compiled:
        step: int                          # required
        code: str | None = None            # may be missing in a file; always written
        calls: Count = left_out(0)         # may be missing in a file; written if it is another
        lines: Count = required(0)         # never missing in a file

A field is a text, a flag, a number, another such class, or a tuple or mapping of these. `Annotated`
has a check of its own; see `kedge.json_input.shape`. What several fields must have together is
checked in ``__post_init__``, which raises `Misshapen`. A class whose form in a file is another has
a classmethod ``from_json``, which takes that form and checks it, and a method ``to_json``, which
returns it.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from functools import cache
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from kedge.json_input import shape
from kedge.json_input.shape import Check

T = TypeVar("T")

Count = Annotated[int, shape.count]
"""A whole number, 0 or more."""

Total = Annotated[int, shape.total]
"""A sum of whole numbers, which may have more than 64 bits."""

PlainName = Annotated[str, shape.plain_name]
"""The name of a file in a folder."""

AnyNumber = Annotated[float | str, shape.number_or("nan", "inf", "-inf")]
"""A number; one that is not finite is a text, since JSON has none."""

_SIMPLE: Mapping[Any, Check] = {
    Any: shape.anything,
    bool: shape.flag,
    float: shape.number,
    int: shape.whole,
    str: shape.text,
}
#: The keys of a field's metadata.
_LEFT_OUT = "left out at its default"
_REQUIRED = "never missing in a file"


def left_out(default: Any, metadata: Mapping[str, Any] | None = None) -> Any:
    """Return a field that is not written while it has its default.

    Args:
        default: The default.
        metadata: What else is to be known of the field.
    """
    return field(default=default, metadata={_LEFT_OUT: True, **(metadata or {})})


def required(default: Any) -> Any:
    """Return a field with a default for those who make an instance; no file lacks it."""
    return field(default=default, metadata={_REQUIRED: True})


def read_as(kind: type[T], value: Any) -> T:
    """Return an object of a file as an instance of a class.

    Raises:
        Misshapen: It does not have the shape of the class.
    """
    check: Callable[[Any], T] = _check_of_class(kind)  # type: ignore[arg-type]
    return check(value)


def as_json(value: Any) -> Any:
    """Return a value as JSON has it: instances as objects, tuples as lists."""
    if isinstance(value, str | int | float | None):
        return value
    if hasattr(value, "to_json"):
        return value.to_json()
    if is_dataclass(value):
        return fields_as_json(value)
    if isinstance(value, Mapping):
        return {name: as_json(each) for name, each in value.items()}
    return [as_json(each) for each in value]


def fields_as_json(value: Any) -> dict[str, Any]:
    """Return the fields of an instance as JSON has them, also where its form in a file is another."""
    written = {}
    for name, unless in _written(value.__class__):
        held = getattr(value, name)
        if held != unless:
            written[name] = as_json(held)
    return written


@cache
def _written(kind: type[Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a class, each with the value with which it is not written."""
    written: list[tuple[str, Any]] = []
    for each in fields(kind):
        if _LEFT_OUT in each.metadata:
            written.append((each.name, each.default))
        else:
            written.append((each.name, MISSING))
    return tuple(written)


@cache
def _check_of_class(kind: type[Any]) -> Check:
    if hasattr(kind, "from_json"):
        own: Check = kind.from_json
        return own
    annotations = get_type_hints(kind, include_extras=True)
    required: dict[str, Check] = {}
    optional: dict[str, Check] = {}
    for each in fields(kind):
        checks = required if _is_required(each) else optional
        checks[each.name] = _check_of(annotations[each.name])
    check_fields = shape.fields(required, optional)
    return lambda value: kind(**check_fields(value))


def _is_required(each: Field[Any]) -> bool:
    return each.default is MISSING or _REQUIRED in each.metadata


def _check_of(annotation: Any) -> Check:
    if annotation in _SIMPLE:
        return _SIMPLE[annotation]
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        check: Check = arguments[1]
        return check
    if origin in (Union, types.UnionType):
        (inner,) = (each for each in arguments if each is not types.NoneType)
        return shape.nullable(_check_of(inner))
    if origin is Literal:
        return shape.one_of(*arguments)
    if origin is tuple and arguments[1:] == (...,):
        return shape.list_of(_check_of(arguments[0]))
    if origin is tuple:
        return shape.tuple_of(*map(_check_of, arguments))
    if origin is not None and issubclass(origin, Mapping):
        return shape.mapping_of(_check_of(arguments[1]))
    return _check_of_class(annotation)
