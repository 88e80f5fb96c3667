"""The lines of a program that put a model into evaluation mode, as its source has them.

PyTorch has no hook for a change of the mode, and patching `nn.Module.train` would show. So the
files of the program that are on the stack when the mode is noted are read. A line that stands there
need not have run, and one in another file is not found.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator
from functools import lru_cache
from types import FrameType

from kedge.frames import SourceLine, frames_around, is_between, is_installed
from kedge.torch_internals.source_lines import place_of

_MOST = 8
"""Most lines that are listed."""


def eval_calls(frame: FrameType | None) -> tuple[SourceLine, ...]:
    """Return the lines that call ``.eval()`` or ``.train(False)`` in the program's files around a frame."""
    files = dict.fromkeys(each.f_code.co_filename for each in frames_around(frame))
    found: list[SourceLine] = []
    for file in files:
        if not is_between(file) and not is_installed(file):
            found += _calls_in(file)
    return tuple(found[:_MOST])


@lru_cache(maxsize=64)
def _calls_in(file: str) -> tuple[SourceLine, ...]:
    lines = linecache.getlines(file)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError, RecursionError):  # no source, no Python, or too deep
        return ()
    shown = place_of(file)
    return tuple(
        SourceLine(shown, number, function, lines[number - 1].strip())
        for number, function in dict.fromkeys(_calls(tree))
    )


def _calls(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the function of each such call, in the order of the source.

    Without recursion: a chain of many calls is twice as many nodes deep.
    """
    waiting: list[tuple[ast.AST, str]] = [(tree, "<module>")]
    while waiting:
        node, function = waiting.pop()
        if isinstance(node, ast.Call) and _ends_training(node):
            yield node.lineno, function
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        inside = [(each, function) for each in ast.iter_child_nodes(node)]
        waiting += reversed(inside)


def _ends_training(call: ast.Call) -> bool:
    """Whether a call is ``x.eval()``, ``x.train(False)`` or ``x.train(mode=False)``."""
    if not isinstance(call.func, ast.Attribute):
        return False
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if call.func.attr == "eval":
        return not given
    modes = [each.value for each in given if isinstance(each, ast.Constant)]
    return call.func.attr == "train" and modes == [False] and len(given) == 1
