"""The source of classes and functions, as syntax trees."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any
from weakref import WeakKeyDictionary

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
