"""The source of classes and functions, as syntax trees, and what forwards read and call in it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

_trees: WeakKeyDictionary[Any, ast.Module] = WeakKeyDictionary()


def source_of(of: Any) -> ast.Module:
    """Return the syntax tree of a class or function, which is parsed once.

    An empty one if there is no source to read.
    """
    try:
        known = _trees.get(of)
        if known is None:
            known = _trees[of] = ast.parse(textwrap.dedent(inspect.getsource(of)))
    except (OSError, TypeError, SyntaxError):  # built in, or typed at a prompt
        return ast.parse("")
    return known


def is_self(node: Any) -> bool:
    """Whether an expression is the name ``self``."""
    return isinstance(node, ast.Name) and node.id == "self"


def attributes_read(kind: type[nn.Module], child: Any, name: str) -> list[str]:
    """Return the attributes of a child that a module's forward reads, and that are no methods.

    Attention reads a dropout's ``p`` so, for a fused kernel.
    """
    if kind not in _read_by:
        _read_by[kind] = _read_of_each(kind)
    read = _read_by[kind].get(name, ())
    return [each for each in read if not callable(getattr(child, each, None))]


_Attributes = dict[str, dict[str, None]]
_read_by: WeakKeyDictionary[type[nn.Module], _Attributes] = WeakKeyDictionary()
"""For each class whose source was read, what its forward reads of each of its attributes."""


def _read_of_each(kind: type[nn.Module]) -> _Attributes:
    """Return what a class's forward reads as ``self.<name>.<attribute>``, by name."""
    found: _Attributes = {}
    for node in _run_by_forward(kind):
        match node:
            case ast.Attribute(value=ast.Attribute(value=of, attr=name), attr=attribute):
                if is_self(of):
                    found.setdefault(name, {})[attribute] = None
    return found


def _run_by_forward(kind: type[nn.Module]) -> Iterator[ast.AST]:
    """Yield the syntax nodes of a class's forward.

    And of its own methods that the forward calls, directly or not.
    """
    functions = (n for n in ast.walk(source_of(kind)) if isinstance(n, ast.FunctionDef))
    methods = {function.name: function for function in functions}
    if "forward" not in methods:
        return

    waiting = [methods["forward"]]
    known = {"forward"}
    while waiting:
        for node in ast.walk(waiting.pop()):
            yield node
            if not (isinstance(node, ast.Attribute) and is_self(node.value)):
                continue
            if node.attr in methods and node.attr not in known:
                known.add(node.attr)
                waiting.append(methods[node.attr])


def calls_forward(kind: type[nn.Module], name: str) -> bool:
    """Whether the source of a module's forward calls ``self.<name>.forward(...)``."""
    forward = getattr(kind, "forward", None)
    code = getattr(forward, "__code__", None)
    known = _forwards_called.get(kind)
    if known is None or known[0] is not code:
        calls = (n.func for n in ast.walk(source_of(forward)) if isinstance(n, ast.Call))
        called = set()
        for function in calls:
            match function:
                case ast.Attribute(value=ast.Attribute(attr=of), attr="forward"):
                    called.add(of)
        known = code, frozenset(called)
        _forwards_called[kind] = known
    return name in known[1]


_Called = tuple[Any, frozenset[str]]
_forwards_called: WeakKeyDictionary[type[nn.Module], _Called] = WeakKeyDictionary()
"""For each class whose forward was read, its code, and the attributes whose ``forward`` it calls."""


_STRUCTURES = {"tuple": "a tuple", "list": "a list", "dict": "a dict"}
_DISPLAYS = {ast.Tuple: "a tuple", ast.List: "a list", ast.Dict: "a dict"}


def structure_returned(module: nn.Module) -> str | None:
    """Return what a module's forward returns, such as "a tuple", if that is surely no single tensor.

    By its annotation, else by its ``return`` statements; None if these do not show it.
    """
    forward: Any = inspect.unwrap(module.forward)
    function = getattr(forward, "__func__", forward)
    annotated = _annotated(getattr(function, "__annotations__", {}).get("return"))
    if annotated:
        known = [_STRUCTURES.get(name.lower()) for name in annotated]
        if all(known):
            return known[0]
        if all("Output" in name or name.lower() in _STRUCTURES for name in annotated):
            return next(name for name in annotated if "Output" in name)
        return None
    tree = source_of(function)
    definition = next((node for node in tree.body if isinstance(node, ast.FunctionDef)), None)
    if definition is None:
        return None
    returned = [_DISPLAYS.get(type(node.value)) for node in _returns(definition)]
    if returned and all(returned):
        return returned[0]
    return None


def _annotated(annotation: Any) -> list[str]:
    """Return the names of the classes in an annotation, those of a union each."""
    if annotation is None:
        return []
    text = annotation if isinstance(annotation, str) else None
    if text is None:
        text = getattr(annotation, "__qualname__", "") if isinstance(annotation, type) else ""
        text = text if "[" not in str(annotation) and text else str(annotation)
    try:
        return list(_members(ast.parse(text, mode="eval").body))
    except SyntaxError:  # of a class inside a function
        return []


def _members(node: ast.expr) -> Iterator[str]:
    """Yield the last names of the classes in a union; of a generic one, that of the class."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _members(left)
            yield from _members(right)
        case ast.Subscript(value=of, slice=inside):
            name = next(_members(of), "")
            if name not in ("Union", "Optional"):
                yield name
            elif isinstance(inside, ast.Tuple):
                for each in inside.elts:
                    yield from _members(each)
            else:
                yield from _members(inside)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            yield name
        case _:
            yield ast.unparse(node)


def _returns(definition: ast.FunctionDef) -> Iterator[ast.Return]:
    """Yield the ``return`` statements of a function, without those of functions inside it."""
    waiting: list[ast.AST] = list(definition.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return):
            yield node
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            waiting.extend(ast.iter_child_nodes(node))
