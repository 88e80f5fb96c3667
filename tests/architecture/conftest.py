"""The source of Kedge as data: every file, parsed once."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One file of ``src/kedge``.

    Attributes:
        name: Its path below ``src/kedge``, such as ``hooks/firing/fire.py``.
        lines: Its text.
        tree: Its syntax tree.
    """

    name: str
    lines: list[str]
    tree: ast.Module

    @property
    def folder(self) -> str:
        """The top folder it is in, or "" for the root."""
        return self.name.split("/")[0] if "/" in self.name else ""

    @property
    def module(self) -> str:
        """Its name as a module, such as ``kedge.hooks.firing.fire``; that of a package without ``__init__``."""
        path = self.name.removesuffix(".py").removesuffix("__init__").replace("/", ".")
        return f"kedge.{path}".removesuffix(".")

    def functions(self) -> Iterator[Function]:
        """Yield every function, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))

    def at(self, node: ast.AST) -> str:
        """Say where a node is, as ``hooks/firing/fire.py:12``."""
        return f"{self.name}:{getattr(node, 'lineno', 1)}"


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def sources() -> tuple[Source, ...]:
    """Every Python file of ``src/kedge``."""
    package = ROOT / "src" / "kedge"
    found = []
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found.append(
            Source(path.relative_to(package).as_posix(), text.splitlines(), ast.parse(text))
        )
    assert found, f"no source below {package}"
    return tuple(found)
