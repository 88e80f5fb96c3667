"""Outputs that a forward's own code overwrites after the module returned them, as its source shows.

# Note [Overwritten later]
``record()`` keeps a value without a copy. A module or a hooked operation that works in place is
seen coming, by a hook before it. An operation in a forward's own code is not: ``out += identity``,
``h.relu_()``, ``F.relu(h, inplace=True)``, ``h[0] = 0``. Watching every operation for that would
cost more than all the rest, so the source of the forward is read once for each class. A value whose
name, or a view of it, is written to there is copied when it is recorded; all others stay as they
are. What the source does not show, such as a write in the program's loop, is an error on reading.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from kedge.hooks.forward_source import is_self, source_of
from kedge.torch_internals.module_tables import module_at, own_children

_ARGUMENTS = ""
"""The origin of a forward's own arguments."""
_VIEWS = frozenset(
    (
        *(
            "chunk",
            "contiguous",
            "detach",
            "diagonal",
            "expand",
            "expand_as",
            "flatten",
            "movedim",
            "narrow",
            "permute",
        ),
        *(
            "reshape",
            "select",
            "split",
            "squeeze",
            "swapaxes",
            "t",
            "to",
            "transpose",
            "unbind",
            "unflatten",
        ),
        *("unsqueeze", "view", "view_as"),
    )
)
"""Methods whose result shares the memory of the value, or may."""


@dataclass
class OwnWrites:
    """What a class's forward does with the values of the modules that it calls.

    Attributes:
        overwritten: The attributes that hold modules whose output is overwritten; "" for its own
            arguments.
        returned: The attributes that hold modules whose output it returns as it is, or as a view.
    """

    overwritten: set[str] = field(default_factory=set)
    returned: set[str] = field(default_factory=set)


_known: WeakKeyDictionary[type[nn.Module], OwnWrites] = WeakKeyDictionary()


def is_overwritten(model: nn.Module, path: str) -> bool:
    """Whether a forward around a module overwrites its output later.

    See Note [Overwritten later].
    """
    parts = path.split(".") if path else []
    for above in range(1, min(len(parts), 2) + 1):
        holder = ".".join(parts[:-above])
        name = parts[-above]
        parent: Any = module_at(model, holder)
        around = (parent, own_children(parent)[name])
        if above == 2 and any(isinstance(module, nn.Sequential) for module in around):
            break  # what is inside is called as a whole
        if isinstance(parent, nn.Sequential):
            is_last = name == list(own_children(parent))[-1]
            return is_last and is_overwritten(model, holder)
        writes = _writes_of(type(parent))
        if name in writes.overwritten:
            return True
        if name in writes.returned and is_overwritten(model, holder):
            return True
    return False


def overwrites_arguments(module: nn.Module) -> bool:
    """Whether a module's own forward overwrites what it is given."""
    return _ARGUMENTS in _writes_of(type(module)).overwritten


def _writes_of(kind: type[nn.Module]) -> OwnWrites:
    known = _known.get(kind)
    if known is None:
        known = _known[kind] = _Reader(getattr(kind, "forward", None)).writes
    return known


class _Reader(ast.NodeVisitor):
    """Reads one forward in the order of its lines, and follows names back to the modules whose outputs they hold."""

    def __init__(self, forward: Any) -> None:
        self.writes = OwnWrites()
        self._origins: dict[str, set[str]] = {}
        for node in source_of(forward).body:
            if isinstance(node, ast.FunctionDef):
                for argument in node.args.args[1:]:
                    self._origins[argument.arg] = {_ARGUMENTS}
                # Twice: a write in a loop may come before the line that makes the value.
                for _ in range(2):
                    for statement in node.body:
                        self.visit(statement)

    def origins(self, node: ast.AST | None) -> set[str]:
        """Return the attributes whose modules made the value of an expression, or the value that it is a view of."""
        if isinstance(node, ast.Name):
            return self._origins.get(node.id, set())
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self.origins(node.value)
        if isinstance(node, ast.IfExp):
            return self.origins(node.body) | self.origins(node.orelse)
        if isinstance(node, ast.Attribute):
            if is_self(node.value):
                return {node.attr}
            return self.origins(node.value)
        if isinstance(node, ast.Call):
            return self._origins_of_call(node)
        return set()

    def _origins_of_call(self, node: ast.Call) -> set[str]:
        function = node.func
        if isinstance(function, ast.Attribute) and not is_self(function.value):
            in_place = _in_place(node)
            own: set[str] = set()
            if in_place or function.attr in _VIEWS:
                own = self.origins(function.value)  # a method of the value
            if in_place and node.args:
                own = own | self.origins(node.args[0])
            return own
        if isinstance(function, ast.Name) and function.id not in self._origins:
            if node.args and _in_place(node):
                return self.origins(node.args[0])
            return set()
        return self.origins(function)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, node.value)

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._bind(node.target, node.value)

    def visit_For(self, node: ast.For) -> None:
        self._bind(node.target, node.iter)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        self.writes.overwritten |= self.origins(node.target)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        if _in_place(node):
            written: set[str] = set()
            if isinstance(node.func, ast.Attribute):
                written = self.origins(node.func.value)
            if not written and node.args:
                written = self.origins(node.args[0])
            self.writes.overwritten |= written
        for keyword in node.keywords:
            if keyword.arg == "out":
                self.writes.overwritten |= self.origins(keyword.value)

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        values = [node.value]
        if isinstance(node.value, ast.Tuple):
            values = [*node.value.elts]
        for value in values:
            self.writes.returned |= self.origins(value)

    def _bind(self, target: ast.AST, value: ast.AST | None) -> None:
        if isinstance(target, ast.Name):
            self._origins[target.id] = self.origins(value)
        elif isinstance(target, ast.Subscript):
            self.writes.overwritten |= self.origins(target.value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for each in _flat(target):
                self._origins[each.id] = self.origins(value)


def _flat(target: ast.AST) -> Iterator[ast.Name]:
    return (node for node in ast.walk(target) if isinstance(node, ast.Name))


def _in_place(node: ast.Call) -> bool:
    """Whether a call is of a function that works in place: its name ends in an underscore, or it is asked to."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    if name.endswith("_") and not name.endswith("__"):
        return True
    for keyword in node.keywords:
        if keyword.arg == "inplace":
            asked = keyword.value
            if not isinstance(asked, ast.Constant) or bool(asked.value):
                return True
    return False
