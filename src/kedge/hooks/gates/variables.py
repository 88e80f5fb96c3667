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
_LONGEST, _MOST = 60, 1_000
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
    holders = [
        name
        for name, held in list(frame.f_globals.items())
        if held is value and not name.startswith("_")
    ]
    return holders[0] if len(holders) == 1 else UNNAMED


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
    try:
        call = ast.parse(text.strip(), mode="eval").body if text else None
    except (SyntaxError, ValueError):  # the file has changed since, or holds a part of the call
        return ""
    if not isinstance(call, ast.Call):
        return ""
    called = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
    given = (
        call.args[0]
        if call.args
        else next((k.value for k in call.keywords if k.arg == keyword), None)
    )
    names = None if given is None else _names_in(given)
    if given is None or not names or called != function:
        return ""
    loaded, wanted = _loaded(code, at), [*(_names_in(call.func) or [function]), *names]
    if not call.args:  # others may come before it
        wanted = names
    real = any(loaded[i : i + len(wanted)] == wanted for i in range(len(loaded)))
    return ast.unparse(given) if real else ""


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
            return [*before, name] if before else []
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
        if each.opname.startswith("LOAD_") and begin <= first and last <= end:
            several = isinstance(each.argval, tuple) and not each.opname.startswith("LOAD_CONST")
            found += each.argval if several else [each.argval]
    return found


def _span(positions: Any) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return where the text of an instruction begins and ends."""
    line, last, column, end = (-1 if each is None else each for each in positions)
    return (line, column), (last, end)


def variables_around() -> dict[str, Tensor]:
    """Return the tensors in the program's variables around the running call of Kedge, by their names; each tensor once.

    These are the global variables, and those of the calling function where reading them keeps
    nothing alive; the parameters of modules among them, and the tensors in lists, tuples and dicts.
    """
    frame, found = _outside(), dict[int, tuple[str, Tensor]]()
    if frame is None:
        return {}
    spaces = [frame.f_globals] if sys.version_info < (3, 13) else [frame.f_locals, frame.f_globals]
    for name, value in itertools.chain(*(list(space.items()) for space in spaces)):
        if not name.startswith("_"):
            for part, tensor in _tensors_in(value):
                found.setdefault(id(tensor), (f"{name}.{part}" if part else name, tensor))
    return dict(found.values())


def _tensors_in(value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield "", value
    elif isinstance(value, nn.Module):
        yield from parameters_in(value).items()
    elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        yield from ((str(key), each) for key, each in list(items) if isinstance(each, Tensor))


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
    first, last, begin, end = next(
        itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4
    )
    if first is None or last is None or begin is None or end is None:
        return ""
    names = frame.f_globals if frame.f_globals.get("__file__") == code.co_filename else None
    lines = [
        line.encode() for line in linecache.getlines(code.co_filename, names)[first - 1 : last]
    ]
    if len(lines) != last - first + 1:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")
