"""An extension of Griffe: a function decorated with ``documented_like(other)`` has the sections of the other's docstring."""

from __future__ import annotations

import inspect
from typing import Any

import griffe


class DocumentedLike(griffe.Extension):
    """Appends the sections that `kedge.hooks.signature.documented_like` appends when the program runs."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Complete the docstrings of a package."""
        for function in functions(pkg):
            for decorator in function.decorators:
                name, _, argument = str(decorator.value).partition("(")
                if name == "documented_like" and function.docstring:
                    other = function.parent[argument.rstrip(")")]
                    sections = inspect.cleandoc(other.docstring.value).partition("\n\n")[2]
                    function.docstring.value = f"{inspect.cleandoc(function.docstring.value)}\n\n{sections}"


def functions(module: griffe.Module) -> list[griffe.Function]:
    """Return the functions of a module and those in it."""
    found = list(module.functions.values())
    for inner in module.modules.values():
        if not inner.is_alias:
            found += functions(inner)
    return [function for function in found if not function.is_alias]
