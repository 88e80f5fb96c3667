"""Small classes."""

from __future__ import annotations

import ast

import pytest

METHODS = 15
ATTRIBUTES = 12
METHODS_OF_A_ROW = 6
ROWS = {"NamedTuple", "TypedDict"}


def _methods(body):
    return [node for node in body.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]


def _fields(body):
    """Return the names that a class annotates in its body."""
    return {n.target.id for n in body.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def _assigned(body):
    """Return the names that the methods of a class assign on ``self``."""
    return {
        node.attr
        for method in _methods(body)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _is_frozen(decorator):
    named = isinstance(decorator, ast.Call) and ast.unparse(decorator.func) in {"dataclass", "dataclasses.dataclass"}
    return named and any(k.arg == "frozen" and ast.unparse(k.value) == "True" for k in decorator.keywords)


def _is_row(body):
    """Return whether a class is a row of data: it cannot change, and has fields and a few values that follow from them."""
    fixed = any(map(_is_frozen, body.decorator_list)) or any(ast.unparse(b).split(".")[-1] in ROWS for b in body.bases)
    return fixed and not _assigned(body) and len(_methods(body)) <= METHODS_OF_A_ROW


def _too_large(body):
    methods, attributes = len(_methods(body)), len(_fields(body) | _assigned(body))
    return methods > METHODS or (attributes > ATTRIBUTES and not _is_row(body))


def test_no_class_is_large(sources):
    """A class has at most 15 methods and 12 attributes: what has more holds two subjects, and each is a class of its own.

    A row of data may have more attributes, as they are the columns of a table that users see, or the options that they
    give: a frozen dataclass, a `NamedTuple` or a `TypedDict` that assigns nothing on ``self`` and has at most 6 methods.
    """
    large = {
        f"{source.at(node)} {node.name}": (len(_methods(node)), len(_fields(node) | _assigned(node)))
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and _too_large(node)
    }

    assert large == {}


FIELDS = "".join(f"\n    a{i}: int" for i in range(ATTRIBUTES + 1))
SET = "".join(f"\n        self.b{i} = 1" for i in range(ATTRIBUTES + 1))
MANY = "".join(f"\n    def m{i}(self): ..." for i in range(METHODS_OF_A_ROW + 1))


@pytest.mark.parametrize(
    ("text", "large"),
    [
        (f"@dataclass(frozen=True)\nclass A:{FIELDS}", False),
        (f"class A(typing.NamedTuple):{FIELDS}", False),
        (f"@dataclass\nclass A:{FIELDS}", True),
        (f"@dataclass(frozen=True)\nclass A:{FIELDS}{MANY}", True),
        (f"@dataclass(frozen=True)\nclass A:{FIELDS}\n    def m(self):\n        self.more = 1", True),
        (f"class A:\n    def __init__(self):{SET}", True),
        (f"class A:\n    def __init__(self): ...{MANY}", False),
        (f"class A:{MANY}{MANY.replace('def m', 'def n')}{MANY.replace('def m', 'def o')}", True),
    ],
)
def test_a_row_of_data_is_told_from_a_class(text, large):
    """Fields of what cannot change are free; those of what changes, or does much, are counted."""
    (body,) = ast.parse(text).body

    assert _too_large(body) is large
