"""Calls that run as soon as a program has imported a module."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from kedge.program.own_imports import OWN_IMPORTS


class AfterImport(MetaPathFinder):
    """A call that runs once, after the import of a module, and leaves no trace on the module.

    So the program decides when to import the module: after it has set the environment variables
    that the module reads, or not at all.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self.then = then

    def install(self) -> None:
        """Wait for the import; if the module is already imported, call at once."""
        if self.name in sys.modules:
            self.then()
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop waiting."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec from the other finders, with a loader that makes the call after execution.

        A program may search for a module without importing it, so each spec gets such a loader.
        """
        if fullname != self.name:
            return None
        behind = sys.meta_path[
            sys.meta_path.index(self) + 1 :
        ]  # these may include another finder that waits for the module
        others = (finder.find_spec(fullname, path, target) for finder in behind)
        spec = next((spec for spec in others if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = partial(self._execute, loader, vars(loader).get("exec_module"))
        return spec

    def _execute(self, loader: Any, marked: Any, module: ModuleType) -> None:
        if marked is None:
            del loader.exec_module
        else:
            loader.exec_module = marked
        loader.exec_module(module)
        if self in sys.meta_path:
            self.remove()
            with OWN_IMPORTS.in_force():
                self.then()
