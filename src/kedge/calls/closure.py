"""What a function takes from around it: the variables of the functions around it, its defaults, and the names in its code."""

from __future__ import annotations

from collections.abc import Iterator
from types import CellType, CodeType, FunctionType
from typing import Any


def content(cell: CellType) -> Any:
    """Return the content of a closure's cell; None if it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # the variable has no value yet
        return None


def enclosed(function: Any) -> dict[str, Any]:
    """Return the variables of the functions around a function by name, None for one without a value.

    What has no closure, such as a builtin or an object that can be called, has no such variables.
    """
    cells = getattr(function, "__closure__", None) or ()
    names = function.__code__.co_freevars if cells else ()
    return dict(zip(names, map(content, cells), strict=True))


def defaults(function: FunctionType) -> dict[str, Any]:
    """Return the default values of a function's parameters, by their names."""
    code, values = function.__code__, function.__defaults__ or ()
    positional = code.co_varnames[: code.co_argcount]
    with_default = positional[len(positional) - len(values) :]
    return dict(zip(with_default, values, strict=True)) | (function.__kwdefaults__ or {})


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a code object, and in those of functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)
