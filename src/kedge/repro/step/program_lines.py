"""The lines of the program that computed what a backward pass began at, so that they can run again.

# Note [The lines of a loss]
A program that has come to ``loss.backward()`` has no function that would compute its loss once
more. But its frames are there, with their variables, and so is the source. Behind the statement
that led to the backward pass stand those that gave its variables their values: ``logits =
net(x)``, ``loss = criterion(logits, y)``. Collected from the nearest one upwards, as far as the
body of the loop or function goes, and only those that bind a name that is needed further down,
they leave out what the loss does not depend on: saving, printing, an optimizer's step. If they do
not suffice, the same is done in the function that called.

Nobody knows how far up the value arose, so ever more of these statements are tried, each time in a
fresh copy. A variable that is changed by more than one statement, as in ``x = x / 255``, would be
changed twice: so what ran again counts only if every variable that it gave a value to has its
non-finite elements where the program's had them. A statement that could leave the block, by
``continue`` or ``return``, did not: where it would do so now, what runs again is another run. So it is
where other operations lie behind the loss, as after a branch that a counter or a random number decides.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from kedge.frames import OWN, frames_around, is_torch
from kedge.sites import leaves
from kedge.torch_internals.autograd_nodes import behind

_CHANGING = ("append", "extend", "insert", "add", "update", "setdefault", "appendleft")
"""Methods that change a list, a set or a mapping."""
_RESHAPING = ("ReshapeAliasBackward0", "UnsafeViewBackward0", "ViewBackward0")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
Position = tuple[int, int]
"""A line, from 1, and a column in it, from 0, in bytes."""
_BLOCKS = ("body", "orelse", "finalbody", "handlers")


class _BackwardAgain(BaseException):
    """What ran again has come to the backward pass; no ``except Exception`` of the program goes on."""

    def __init__(self, losses: Any, gradients: Any) -> None:
        super().__init__()
        self.losses = losses
        self.gradients = gradients


@dataclass(frozen=True)
class RanAgain:
    """What statements have come to.

    Attributes:
        losses: What the backward pass begins at.
        gradients: Those that it begins with; None for those of losses.
        names: The names of the frame as they are then.
    """

    losses: Sequence[Tensor]
    gradients: Sequence[Tensor | None] | None
    names: Mapping[str, Any]


@dataclass(frozen=True)
class StatementsAgain:
    """Statements of one frame, in the order of the program; the last one leads to the backward pass.

    Attributes:
        code: The statements.
        names: The names of the frame.
        bound: The names that the statements before the last give a value to.
        taken: The names that they read before they give a value to them.
        function: The qualified name of the frame's function.
    """

    code: CodeType
    names: dict[str, Any]
    bound: frozenset[str]
    taken: frozenset[str]
    function: str

    def run(self, changed: Mapping[str, Any] | None = None) -> RanAgain | None:
        """Run them up to the backward pass; return None if they do not come to it.

        It is only for a copy of the process: the pass is kept from running for all of it.

        Args:
            changed: Values of names that are others than the program's.
        """
        names = {**self.names, **(changed or {})}
        given = torch.autograd.backward
        torch.autograd.backward = _leave_at_backward
        try:
            exec(self.code, names)  # noqa: S102 - the program's own statements
        except _BackwardAgain as reached:
            losses = [tensor for _, tensor in leaves.find(reached.losses)]
            gradients = reached.gradients
            if isinstance(gradients, Tensor):
                gradients = [gradients]
            return RanAgain(losses, gradients, names)
        finally:
            torch.autograd.backward = given
        return None


def graph_of(losses: Sequence[Tensor]) -> Counter[str]:
    """Return how many operations of each name are behind some losses: those of another way are others.

    Which kind of view a reshaping makes also depends on whether the operations are seen.
    """
    every = (node.name() for node in behind(loss.grad_fn for loss in losses))
    return Counter(name for name in every if name not in _RESHAPING)


def _leave_at_backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
    raise _BackwardAgain(tensors, grad_tensors)


@dataclass(frozen=True)
class _Here:
    """Where a frame is.

    Attributes:
        statement: The statement.
        before: Those before it, the nearest first, up to the head of the innermost loop.
        in_loop: Whether it is in a loop.
    """

    statement: ast.stmt
    before: Sequence[ast.stmt]
    in_loop: bool


def passes_on(frame: FrameType) -> bool:
    """Whether a frame between the program and a backward pass is Kedge's or PyTorch's."""
    file = frame.f_code.co_filename
    return file.startswith(OWN) or is_torch(file)


def statements_before(frame: FrameType) -> Iterator[StatementsAgain]:
    """Yield ever more statements that lead to the backward pass which a frame has called.

    Args:
        frame: The program's frame that called it, or a library's.
    """
    for each in frames_around(frame):
        if passes_on(each):
            continue
        found = _place_in(each)
        if found is None:
            continue
        needed: set[str] = set()
        for calls_too in (False, True):
            yield from _statements_of(each, found, needed, calls_too=calls_too)
        if found.in_loop or needed.isdisjoint(_arguments_of(each)):
            return  # nothing further out is of this step, or gave this function what it needs


def _statements_of(
    frame: FrameType, here: _Here, needed: set[str], *, calls_too: bool
) -> Iterator[StatementsAgain]:
    """Yield ever more statements of one frame, as `statements_before` does.

    Args:
        frame: The frame.
        here: Where it is.
        needed: Receives the names that are needed at the beginning of all of them.
        calls_too: Whether a call may change a needed name whose method it is, or that it is given.
    """
    needed |= _loaded(here.statement)
    taken = [here.statement]
    bound: set[str] = set()
    calls = 0
    if not calls_too:
        yield _compiled(frame, taken, bound)
    for statement in here.before:
        own = _bound(statement)
        is_call = own.isdisjoint(needed) and calls_too and isinstance(statement, ast.Expr)
        if is_call and not needed.isdisjoint(_loaded(statement)):
            calls += 1
        elif own.isdisjoint(needed):
            continue
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            needed -= own
        needed |= _loaded(statement)
        bound |= own
        taken.insert(0, _staying(statement))
        if calls or not calls_too:
            yield _compiled(frame, taken, bound)


class _Staying(ast.NodeTransformer):
    """Replaces what leaves the block by an error; loops and functions inside have their own."""

    def __init__(self) -> None:
        self._loops = 0

    def visit(self, node: ast.AST) -> Any:
        """Return what stands in the place of a node."""
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef, ast.Lambda)):
            return node
        leaves_loop = isinstance(node, ast.Break | ast.Continue) and not self._loops
        if leaves_loop or isinstance(node, ast.Return):
            return ast.copy_location(ast.Assert(ast.Constant(value=False)), node)
        is_loop = isinstance(node, _LOOPS)
        self._loops += is_loop
        self.generic_visit(node)
        self._loops -= is_loop
        return node


def _staying(statement: ast.stmt) -> ast.stmt:
    """Return a statement that runs by itself, wherever it stands in the program."""
    staying: ast.stmt = _Staying().visit(statement)
    return ast.fix_missing_locations(staying)


def _arguments_of(frame: FrameType) -> set[str]:
    """Return the names of a function's arguments, and of the variables of the functions around it."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return {*code.co_varnames[:count], *code.co_freevars}


def _compiled(frame: FrameType, taken: Sequence[ast.stmt], bound: set[str]) -> StatementsAgain:
    *before, last = taken
    if isinstance(last, ast.Return) and last.value is not None:
        last = ast.copy_location(ast.Expr(last.value), last)
    module = ast.Module([*before, last], [])
    code = compile(module, frame.f_code.co_filename, "exec", dont_inherit=True)
    names = {**frame.f_globals, **frame.f_locals}
    read = _read_first(taken, set())
    return StatementsAgain(code, names, frozenset(bound), frozenset(read), frame.f_code.co_qualname)


def _place_in(frame: FrameType) -> _Here | None:
    """Return where a frame is.

    None if the source is not to be had, or if the statement cannot be run by itself.
    """
    block = _body_of(frame)
    if block is None:
        return None
    here = position_in(frame)
    before: list[ast.stmt] = []
    in_loop = False
    while True:
        at = next((i for i, each in enumerate(block) if _contains(each, here)), None)
        if at is None:
            return None
        statement = block[at]
        before = [*reversed(block[:at]), *before]
        inner = _block_with(statement, here)
        if inner is None:
            if hasattr(statement, "body"):
                return None  # the line is the head of a block
            return _Here(statement, before, in_loop)
        if isinstance(statement, _LOOPS):
            before, in_loop = [], True
        block = inner


def _body_of(frame: FrameType) -> list[ast.stmt] | None:
    """Return the statements of a frame's function or module."""
    code = frame.f_code
    text = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    try:
        tree = ast.parse(textwrap.dedent(text))
    except (SyntaxError, ValueError):
        return None
    if code.co_name == "<module>":
        return tree.body
    for node in ast.walk(tree):
        if isinstance(node, _FUNCTIONS) and node.name == code.co_name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == code.co_firstlineno:
                return node.body
    return None


def position_in(frame: FrameType) -> Position:
    """Return the line and the column that a frame is at: a line may hold several statements."""
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    line, _, column, _ = next(positions, (None, None, None, None))
    return line or frame.f_lineno, column or 0


def _contains(node: ast.stmt | ast.ExceptHandler | ast.match_case, here: Position) -> bool:
    if isinstance(node, ast.match_case):
        return any(_contains(each, here) for each in node.body)
    end = (node.end_lineno or node.lineno, node.end_col_offset or 0)
    return (node.lineno, node.col_offset) <= here <= end


def _block_with(statement: ast.stmt, here: Position) -> list[ast.stmt] | None:
    """Return the block of a compound statement that a place is in."""
    if isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
        return None
    for name in (*_BLOCKS, "cases"):
        for each in getattr(statement, name, ()):
            if not _contains(each, here):
                continue
            if isinstance(each, (ast.ExceptHandler, ast.match_case)):
                return each.body
            return list(getattr(statement, name))
    return None


def _loaded(statement: ast.AST) -> set[str]:
    """Return the names that a statement reads."""
    found = {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    if isinstance(statement, ast.AugAssign):
        found |= _bound(statement)
    return found


def _read_first(statements: Sequence[ast.stmt], bound: set[str]) -> set[str]:
    """Return the names that statements read before one of them gives a value to them.

    Args:
        statements: The statements.
        bound: The names that have a value of theirs already; those that they give one to are added.
    """
    read: set[str] = set()
    for statement in statements:
        blocks = [getattr(statement, name, []) for name in _BLOCKS]
        inner = [each for block in blocks for each in block]
        if not inner or isinstance(statement, (*_FUNCTIONS, ast.ClassDef)):
            read |= _loaded(statement) - bound
            bound |= _bound(statement)
            continue
        heads = (each for each in ast.iter_child_nodes(statement) if each not in inner)
        read |= set().union(*map(_loaded, heads)) - bound
        bound |= _bound(statement) - set().union(*map(_bound, inner))
        for block in blocks:
            read |= _read_first(block, bound)
    return read


def _bound(statement: ast.AST) -> set[str]:
    """Return the names that a statement gives a value to, or whose value it changes."""
    found = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            found |= _name_at_the_root(node)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            in_place = name.endswith("_") and not name.endswith("__")
            if name in _CHANGING or in_place:
                found |= _name_at_the_root(node.func)
    return found


def _name_at_the_root(node: ast.expr) -> set[str]:
    """Return the name that attributes and items are taken of: `x` in ``x.y[0]``."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    if isinstance(node, ast.Name):
        return {node.id}
    return set()
