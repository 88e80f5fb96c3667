"""The local variable to which a running line assigns the result of a call, read from its bytecode.

# Note [Assigned to a variable]
The instruction that a frame is at calls something; the instructions after it say what becomes of
the result. If it is stored into a local variable, that is what the line assigns: also by ``a = b =
...``, by ``(a := ...)``, and part by part in ``a, b = ...``. If it is returned, the same is asked of
the frame around; also if it is stored and returned on every way from there, as in a wrapper that a
library puts around PyTorch's functions. The names are those of the code object, so nothing has to
be read from a source.
"""

from __future__ import annotations

import bisect
import dis
import functools
import inspect
from collections.abc import Collection, Sequence
from types import CodeType, FrameType
from typing import Any, NamedTuple

from kedge.frames import SourceLine
from kedge.torch_internals.source_lines import PASSING, line_of, source_of


class Assigned(NamedTuple):
    """A variable, the part of the result that it gets, None for all of it, and the place of that in the code."""

    name: str
    part: int | None
    place: int


_RETURNED = (Assigned("return", None, -1),)
_STORES = ("STORE_FAST", "STORE_DEREF", "STORE_NAME")
_CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
_RAISES = ("RAISE_VARARGS", "RERAISE")
_JUMPS = frozenset({*dis.hasjrel, *dis.hasjabs})
_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")
_NOT_FOLLOWED = ("RETURN_CONST", "RETURN_GENERATOR", "YIELD_VALUE", "DELETE_FAST", "SEND")
"""Instructions at which a variable is not returned, or not at once."""
_COPIES = ("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME", "LOAD_GLOBAL", "LOAD_CLOSURE")


def assigned(frame: FrameType | None, forward: CodeType | None) -> Sequence[Assigned]:
    """Return the variables of a forward to which the result of a call is assigned.

    Args:
        frame: The frame of the call.
        forward: The code whose variables are meant.

    Returns:
        The variables; none if the result goes elsewhere first.
    """
    while frame is not None:
        code = frame.f_code
        if code is forward:
            found = _becomes(code, frame.f_lasti)
            return () if found is _RETURNED else found
        if not _passes_on(code, frame.f_lasti):
            return ()
        frame = frame.f_back
    return ()


def kept_between(
    frame: FrameType | None, forward: CodeType | None
) -> tuple[Sequence[Assigned], SourceLine | None]:
    """Return the variables that get what a function returns, which has kept the result of a call.

    Args:
        frame: The frame of the call.
        forward: The code whose variables are meant.

    Returns:
        The variables, and the line that has kept the result, or worked on; None without any.
    """
    line = None
    while frame is not None and frame.f_code is not forward:
        if line is None and not _passes_on(frame.f_code, frame.f_lasti):
            line = source_of(frame)
        frame = frame.f_back
    if frame is None or line is None:
        return (), None
    return _becomes(frame.f_code, frame.f_lasti), line


@functools.lru_cache(maxsize=512)
def _passes_on(code: CodeType, offset: int) -> bool:
    """Whether some code returns the result of the instruction at an offset."""
    if code.co_filename in PASSING:
        return True
    found = _becomes(code, offset)
    return found is _RETURNED or any(_is_returned(code, one) for one in found)


def _is_returned(code: CodeType, stored: Assigned) -> bool:
    """Whether what a variable gets at a place is returned on every way from there that does not raise."""
    offsets, instructions = _read(code)
    if stored.part is not None or stored.name not in code.co_varnames:
        return False
    waiting = [bisect.bisect_right(offsets, stored.place)]
    seen: set[int] = set()
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        if at >= len(instructions):
            return False
        instruction = instructions[at]
        name = instruction.opname
        if stored.name in _stored(instruction) or name in _NOT_FOLLOWED:
            return False
        if name == "RETURN_VALUE":
            if instruction.is_jump_target or _loaded(instructions[at - 1]) != stored.name:
                return False
            continue
        if name in _RAISES:
            continue
        if instruction.opcode in _JUMPS:
            waiting.append(bisect.bisect_left(offsets, instruction.argval))
        if name not in _ALWAYS_JUMPS:
            waiting.append(at + 1)
    return True


def _loaded(instruction: dis.Instruction) -> str:
    """Return the local variable that an instruction loads last; empty if it loads none."""
    if "LOAD_FAST" not in instruction.opname:
        return ""
    if isinstance(instruction.argval, tuple):
        return str(instruction.argval[-1])
    return str(instruction.argval)


def _becomes(code: CodeType, offset: int) -> tuple[Assigned, ...]:
    """Return the variables that get the result of the instruction at an offset, or `_RETURNED`."""
    offsets, instructions = _read(code)
    at = bisect.bisect_right(offsets, offset)
    found: list[Assigned] = []
    while at < len(instructions):
        instruction = instructions[at]
        name = instruction.opname
        if name == "COPY" and instruction.arg == 1 and at + 1 < len(instructions):
            stored = _stored(instructions[at + 1])
            if not stored:
                break
            found.append(Assigned(stored[0], None, instructions[at + 1].offset))
            at += 2
        elif name == "UNPACK_SEQUENCE":
            found += _parts(instructions[at + 1 :], instruction.arg or 0)
            break
        elif name == "RETURN_VALUE" and not found:
            return _RETURNED
        else:
            found += [Assigned(each, None, instruction.offset) for each in _stored(instruction)[:1]]
            break
    return tuple(found)


def _parts(instructions: Sequence[dis.Instruction], number: int) -> list[Assigned]:
    found: list[Assigned] = []
    for instruction in instructions:
        stored = _stored(instruction)
        if not stored or len(found) >= number:
            break
        for name in stored:
            found.append(Assigned(name, len(found), instruction.offset))
    return found[:number]


def _stored(instruction: dis.Instruction) -> tuple[str, ...]:
    """Return the variables that an instruction stores, in order."""
    name = instruction.opname
    if name in _STORES:
        return (str(instruction.argval),)
    if name == "STORE_FAST_STORE_FAST":  # since Python 3.13
        return tuple(map(str, instruction.argval))
    if name == "STORE_FAST_LOAD_FAST":
        return (str(instruction.argval[0]),)
    return ()


@functools.lru_cache(maxsize=512)
def _read(code: CodeType) -> tuple[list[int], list[dis.Instruction]]:
    instructions = [each for each in dis.get_instructions(code) if each.opname != "NOP"]
    return [each.offset for each in instructions], instructions


def code_of(function: Any) -> CodeType | None:
    """Return the code of the function inside all decorators; None if it is not written in Python."""
    inner = inspect.unwrap(getattr(function, "__func__", function))
    while isinstance(inner, functools.partial):
        inner = inspect.unwrap(getattr(inner.func, "__func__", inner.func))
    code = getattr(inner, "__code__", None)
    return code if isinstance(code, CodeType) else None


def variables_of(code: CodeType) -> list[str]:
    """Return the local variables that some code assigns, in the order of their first assignment."""
    found: dict[str, None] = {}
    for instruction in _read(code)[1]:
        found.update(dict.fromkeys(_stored(instruction)))
    return list(found)


def unseen_assignments(code: CodeType, name: str, seen: Collection[int] | None = None) -> list[str]:
    """Return the lines that assign something else to a variable than the result of a call, each with what it is.

    Args:
        code: The code.
        name: The variable.
        seen: The places that were seen to assign such a result: all others are returned. If None,
            nothing has run, and the list is empty if some line may assign such a result.
    """
    _, instructions = _read(code)
    found = []
    line = code.co_firstlineno
    before: dis.Instruction | None = None
    for instruction in instructions:
        line = _line(instruction) or line
        if name in _stored(instruction) and instruction.offset not in (seen or ()):
            how = _other_value(before)
            if how is None and seen is None:
                return []
            how = how or "what is not the result of an operation or a module itself"
            found.append(f"line {line}, {line_of(code, line).text or name}, assigns {how}")
        before = instruction
    return found


def _line(instruction: dis.Instruction) -> int | None:
    positions = instruction.positions
    return None if positions is None else positions.lineno


def _other_value(before: dis.Instruction | None) -> str | None:
    """Return what a value is that no call has made; None if one may have."""
    if before is None:
        return None
    if before.opname in _COPIES:
        return "what another variable holds"
    if before.opname.startswith("LOAD_CONST"):
        return "a constant"
    if before.opname == "FOR_ITER":
        return "what a loop takes from elsewhere"
    if before.opname.startswith(("BUILD_", "LIST_", "DICT_", "MAKE_FUNCTION")):
        return "a structure or a function made there"
    return None
