"""An extension of Griffe: docstrings as the API pages show them.

A function decorated with ``documented_like(other)`` has the sections of the other's docstring, as
when the program runs. A block of code after two colons becomes one of Markdown, and what refers to
a note in the source is left out.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

import griffe

NOTE = re.compile(r"(?:[;,]?\s+see|\.\s+See)\s+Note \[[^\]]*\](?: in `[^`]*`)?")


def as_markdown(text: str) -> str:
    """Return a docstring with its blocks of code as Markdown's, and without references to notes."""
    return NOTE.sub("", re.sub(r"::$", ":", text, flags=re.MULTILINE))


def objects(module: griffe.Module) -> Iterator[griffe.Object]:
    """Yield a module and everything defined in it."""
    yield module
    for member in module.members.values():
        if isinstance(member, (griffe.Module, griffe.Class)):
            yield from objects(member)
        elif not member.is_alias:
            yield member


class Docstrings(griffe.Extension):
    """Completes the docstrings of a package."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the docstrings, once all of them are known."""
        for found in objects(pkg):
            if found.docstring:
                found.docstring.value = as_markdown(found.docstring.value)
        for found in objects(pkg):
            if found.is_function and found.docstring:
                _complete(found)


def _complete(function: griffe.Function) -> None:
    """Append what `kedge.hooks.signature.documented_like` appends when the program runs."""
    for decorator in function.decorators:
        name, _, argument = str(decorator.value).partition("(")
        if name == "documented_like":
            other = function.parent[argument.rstrip(")")]
            sections = inspect.cleandoc(other.docstring.value).partition("\n\n")[2]
            function.docstring.value = f"{inspect.cleandoc(function.docstring.value)}\n\n{sections}"
