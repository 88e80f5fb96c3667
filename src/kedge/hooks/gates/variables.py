"""The name of a tensor that is an argument of a call: that of the program's variable.

# Note [Names from the source]
A name comes from the text of the call, not from the variables of its frame: up to Python 3.12 a function's frame that was once
asked for its variables keeps them alive until the function returns.
"""

from __future__ import annotations

import ast
import itertools
import linecache
import re
import sys
from types import FrameType

from kedge.torch_internals.source_lines import OWN

UNNAMED = "tensor"
_LONGEST = 60
_NAME = re.compile(r"\w+(\.\w+|\[(\d+|'\w+'|\"\w+\")\])*")


def name_of_argument(keyword: str) -> str:
    """Return the variable that the program gives as first argument to the running call of Kedge: ``z``, ``self.w``, ``hs.0``.

    Args:
        keyword: The argument's name, if it is passed by one.

    Returns:
        The name, as a path without brackets; "tensor" if the argument is no variable, or the source is not known.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    text = "" if frame is None else _call_in(frame)
    try:
        call = ast.parse(text.strip(), mode="eval").body if text else None
    except (SyntaxError, ValueError):  # the file has changed since, or holds a part of the call
        return UNNAMED
    if not isinstance(call, ast.Call):
        return UNNAMED
    given = call.args[0] if call.args else next((k.value for k in call.keywords if k.arg == keyword), None)
    written = "" if given is None else ast.unparse(given)
    if len(written) > _LONGEST or _NAME.fullmatch(written) is None or written.isdigit():
        return UNNAMED
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", written)


def _call_in(frame: FrameType) -> str:
    """Return the source of the call that a frame is making; empty if it is not known."""
    code = frame.f_code
    first, last, begin, end = next(itertools.islice(code.co_positions(), frame.f_lasti // 2, None), (None,) * 4)
    if first is None or last is None or begin is None or end is None:
        return ""
    names = frame.f_globals if frame.f_globals.get("__file__") == code.co_filename else None
    lines = [line.encode() for line in linecache.getlines(code.co_filename, names)[first - 1 : last]]
    if len(lines) != last - first + 1:
        return ""
    lines[-1] = lines[-1][:end]
    lines[0] = lines[0][begin:]
    return b"".join(lines).decode(errors="replace")
