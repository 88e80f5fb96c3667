"""The names of tensors: those of the program's variables.

# Note [Names from the source]
The name of an argument comes from the text of the call, not from the variables of its frame: up to
Python 3.12 a function's frame that was once asked for its variables keeps them alive until the
function returns.

The text may be that of another version of the file, and the call that of another function, which
calls Kedge: a `functools.partial`, or `contextvars.Context.run`. So a name counts only if the call
in the text is one of a function with the name of Kedge's, and if the bytecode that is running loads
the same names for it in the same order.
"""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
import re
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

from kedge.frames import OWN
from kedge.torch_internals.module_tables import parameters_in

UNNAMED = "tensor"
_LONGEST = 60
_MOST = 1_000
_NAME = re.compile(r"\w+(\.\w+|\[(\d+|'\w+'|\"\w+\")\])*")


def name_of_argument(function: str, keyword: str, value: Tensor) -> str:
    """Return the variable that the program gives as first argument to the running call of Kedge: ``z``, ``self.w``, ``hs.0``.

    Args:
        function: The name of Kedge's function.
        keyword: The argument's name, if it is passed by one.
        value: The argument.

    Returns:
        The name, as a path without brackets. If the argument is no variable, or the source is not
        known: the only global variable that holds the value, or else "tensor".
    """
    frame = _outside()
    if frame is None:
        return UNNAMED
    written = _first_argument(frame.f_code, frame.f_lasti, _call_in(frame), function, keyword)
    if len(written) <= _LONGEST and _NAME.fullmatch(written) is not None and not written.isdigit():
        return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", written)
    variables = list(frame.f_globals.items())
    holders = [name for name, held in variables if held is value]
    public = [name for name in holders if not name.startswith("_")]
    if len(public) == 1:
        return public[0]
    return UNNAMED


@functools.lru_cache(maxsize=256)
def _first_argument(code: CodeType, at: int, text: str, function: str, keyword: str) -> str:
    """Return the source of a call's first argument; empty if the text is not that of the call; see Note [Names from the source].

    Args:
        code: The calling code.
        at: The place of the call in it.
        text: The text of the call, from a file that may have changed.
        function: The name of the called function.
        keyword: The argument's name, if it is passed by one.
    """
    if not text:
        return ""
    try:
        call = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):  # the file has changed since, or holds a part of the call
        return ""
    if not isinstance(call, ast.Call):
        return ""
    called = getattr(call.func, "id", getattr(call.func, "attr", ""))
    if called != function:
        return ""

    by_keyword = [each.value for each in call.keywords if each.arg == keyword]
    given = [*call.args[:1], *by_keyword]
    if not given:
        return ""
    names = _names_in(given[0])
    if not names:
        return ""

    wanted = names
    if call.args:  # before a keyword others may come
        wanted = [*(_names_in(call.func) or [function]), *names]
    loaded = _loaded(code, at)
    for i in range(len(loaded)):
        if loaded[i : i + len(wanted)] == wanted:
            return ast.unparse(given[0])
    return ""


def _names_in(expression: ast.expr) -> list[Any]:
    """Return the names, attributes and constant indices that an expression of these alone loads, in order; else nothing."""
    match expression:
        case ast.Name(id=name):
            return [name]
        case (
            ast.Attribute(value=value, attr=name)
            | ast.Subscript(value=value, slice=ast.Constant(value=name))
        ):
            before = _names_in(value)
            if before:
                return [*before, name]
    return []


def _loaded(code: CodeType, at: int) -> list[Any]:
    """Return the names and constants that the instructions of a call load, in order."""
    found: list[Any] = []
    instructions = [
        each
        for each in dis.get_instructions(code)
        if each.offset <= at and each.positions is not None
    ]
    if not instructions:
        return found
    begin, end = _span(instructions[-1].positions)
    for each in instructions:
        first, last = _span(each.positions)
        if not (each.opname.startswith("LOAD_") and begin <= first and last <= end):
            continue
        constant = each.opname.startswith("LOAD_CONST")
        if isinstance(each.argval, tuple) and not constant:
            found += each.argval
        else:
            found.append(each.argval)
    return found


def _span(positions: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the text of an instruction begins and ends."""
    known = [-1, -1, -1, -1]
    for i, place in enumerate(positions):
        if place is not None:
            known[i] = place
    line, last, column, end = known
    return (line, column), (last, end)


def variables_around() -> dict[str, Tensor]:
    """Return the tensors in the program's variables around the running call of Kedge, by their names; each tensor once.

    These are the global variables, and those of the calling function where reading them keeps
    nothing alive; the parameters of modules among them, and the tensors in lists, tuples and dicts.
    """
    frame = _outside()
    if frame is None:
        return {}
    variables = list(frame.f_globals.items())
    if sys.version_info >= (3, 13):
        variables = [*frame.f_locals.items(), *variables]

    found: dict[int, tuple[str, Tensor]] = {}
    for name, value in variables:
        if name.startswith("_"):
            continue
        for part, tensor in _tensors_in(value):
            path = f"{name}.{part}" if part else name
            found.setdefault(id(tensor), (path, tensor))
    return dict(found.values())


def _tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, nn.Module):
        yield from parameters_in(value).items()
    elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in list(items):
            if isinstance(each, Tensor):
                yield str(key), each


def _outside() -> FrameType | None:
    """Return the innermost frame of this thread that is not Kedge's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    return frame


def _call_in(frame: FrameType) -> str:
    """Return the source of the call that a frame is making.

    Empty if it is not known.
    """
    code = frame.f_code
    positions = itertools.islice(code.co_positions(), frame.f_lasti // 2, None)
    first, last, begin, end = next(positions, (None,) * 4)
    if first is None or last is None or begin is None or end is None:
        return ""

    names = None
    if frame.f_globals.get("__file__") == code.co_filename:
        names = frame.f_globals
    text = linecache.getlines(code.co_filename, names)
    lines = [line.encode() for line in text[first - 1 : last]]
    if len(lines) != last - first + 1:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")
