"""The program's own code: the line that calls a module, its forward, and its tree of modules.

# Note [Whose line]
Between a hook and the line that called its module there may be frames of PyTorch (the call itself,
`nn.Sequential`), of Python's library, and of the module's own class, where that wraps ``__call__``.
The line is that of the first other frame: a model in the program or in a
library of models. So a layer of an `nn.Sequential` has the line that calls the whole. A frame's
local variables are not read: Python would keep them alive with the frame.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from kedge.frames import INSTALLED, SourceLine, is_between
from kedge.torch_internals.module_tables import modules_in, own_parameters

TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_LONGEST = 200
PASSING = frozenset(
    f"{TORCH}{name}" for name in ("overrides.py", "_tensor.py", f"nn{os.sep}functional.py")
)


def calling_frame(module: nn.Module | None = None) -> FrameType | None:
    """Return, inside a module's hook, the frame of the program that calls it; see Note [Whose line].

    Args:
        module: The module of the hook; its own ``__call__`` is skipped.

    Returns:
        The frame; None if there is none, for example in a thread that runs only the module.
    """
    passed: tuple[CodeType, ...] = ()
    if module is not None:
        passed = _own_calls(type(module))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back  # the hook itself
    while frame is not None and (is_between(frame.f_code.co_filename) or frame.f_code in passed):
        frame = frame.f_back
    return frame


def forward_of(module: nn.Module) -> tuple[str, int] | None:
    """Return file and first line of the forward of a module's class; None if it has none in Python."""
    forward: Any = inspect.getattr_static(type(module), "forward")
    if forward is nn.Module.forward:
        return None
    code = _code(forward)
    if code is None:
        return None
    return place_of(code.co_filename), code.co_firstlineno


def module_tree(root: nn.Module, label: Callable[[str], str]) -> list[dict[str, Any]]:
    """Return a description of every module of a root, in the order of registration.

    A module or parameter that is registered several times counts at its first place. A lazy
    parameter without a shape counts 0.

    Args:
        root: The root module.
        label: Returns the recorded path for a path inside the root.

    Returns:
        For each module ``path``, ``type``, ``file`` and ``line`` of its forward (or None), and the
        numbers of elements of its own ``parameters`` and of the ``trainable`` ones.
    """
    seen: set[int] = set()
    forwards: dict[type, tuple[str | None, int | None]] = {}
    entries = []
    for path, module in modules_in(root).items():
        kind = type(module)
        if kind not in forwards:
            forwards[kind] = forward_of(module) or (None, None)
        file, line = forwards[kind]
        own = [p for p in own_parameters(module).values() if p is not None and id(p) not in seen]
        seen.update(map(id, own))
        known = [param for param in own if not is_lazy(param)]
        entry = {
            "path": label(path),
            "type": kind.__name__,
            "file": file,
            "line": line,
            "parameters": sum(param.numel() for param in known),
            "trainable": sum(param.numel() for param in known if param.requires_grad),
        }
        entries.append(entry)
    return entries


def source_of(frame: FrameType) -> SourceLine:
    """Return the current line of a frame."""
    code = frame.f_code
    line = frame.f_lineno or code.co_firstlineno
    # The loader knows the text of its own module, not that of code which was executed in its names.
    names: dict[str, Any] | None = frame.f_globals
    if frame.f_globals.get("__file__") != code.co_filename:
        names = None
    return line_of(code, line, names)


def line_of(code: CodeType, line: int, names: dict[str, Any] | None = None) -> SourceLine:
    """Return one line of some code.

    Args:
        code: The code.
        line: The number of the line.
        names: The names of its module, whose loader may know the text; None for the file alone.
    """
    text = linecache.getline(code.co_filename, line, names).strip()
    return SourceLine(place_of(code.co_filename), line, code.co_qualname, text[:_LONGEST] or None)


def is_dropped(frame: FrameType | None) -> bool:
    """Whether the result of a call is not used, as in a line with only the call.

    Args:
        frame: The frame of the call; PyTorch's functions that pass it on are skipped.
    """
    while frame is not None and frame.f_code.co_filename in PASSING:
        frame = frame.f_back
    if frame is None:
        return False
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            return instruction.opname == "POP_TOP"
    return False


def line_with(text: str) -> SourceLine | None:
    """Return the first line with a text in the files of the program's modules, if there is one.

    Libraries are not searched.
    """
    libraries = set(INSTALLED)
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", {})
        file = names.get("__file__")
        if not isinstance(file, str) or is_between(file):
            continue
        if not libraries.isdisjoint(Path(file).parts):
            continue
        for number, line in enumerate(linecache.getlines(file, names), 1):
            if text in line:
                return SourceLine(place_of(file), number, "", line.strip()[:_LONGEST])
    return None


def _own_calls(kind: type) -> tuple[CodeType, ...]:
    """Return the code of every ``__call__`` that a class has or inherits."""
    found: list[CodeType] = []
    for each in kind.__mro__:
        found += _codes(vars(each).get("__call__"))
    return tuple(found)


def _codes(function: Any) -> Iterator[CodeType]:
    """Yield the code of a function, and of each function that it decorates."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        if isinstance(function, (functools.partial, functools.partialmethod)):
            function = function.func
        elif isinstance(function, FunctionType):
            yield function.__code__
            function = vars(function).get("__wrapped__")
        else:
            function = getattr(function, "__wrapped__", None)


def _code(function: Any) -> CodeType | None:
    """Return the code of the function inside all decorators."""
    return next(reversed(list(_codes(function))), None)


def place_of(file: str) -> str:
    """Return a file for display: relative to the current folder if it is inside.

    It is ``In[4]`` for a cell of a notebook.
    """
    cell = _cell_of(file)
    if cell is not None:
        return cell
    try:
        here = f"{Path.cwd()}{os.sep}"
    except FileNotFoundError:  # the program has deleted the folder that it runs in
        return file
    return file.removeprefix(here)


def _cell_of(file: str) -> str | None:
    """Return the name that IPython gives a cell in its tracebacks; None for code of no cell."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return None
    name_of = getattr(getattr(ipython.get_ipython(), "compile", None), "format_code_name", None)
    if name_of is None:
        return None
    named = name_of(file)
    if named is None:
        return None
    return str(named[1])


def is_running(frame: FrameType | None, within: FrameType | None) -> bool:
    """Whether a frame is another one or among its callers."""
    while within is not None and within is not frame:
        within = within.f_back
    return within is not None
