"""Packages that can be called: `kedge.sites`, `kedge.offload` and `kedge.watch` are both a package and a function.

Python binds a package to its name in the parent as soon as anything in it is imported, and so hides
the function of that name. The package is therefore made callable, and shows the function's
arguments and text in `help` and after ``?``.
"""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from kedge.errors import WrongCall


class CalledPackage(ModuleType):
    """The class of a package that is called like the function of its name."""

    _home: str

    @property
    def _function(self) -> Any:
        return getattr(import_module(self._home), self.__name__.rpartition(".")[2])

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._function)

    @property
    def __doc__(self) -> str:  # type: ignore[override]
        """The text of the function."""
        return str(self._function.__doc__)

    def __repr__(self) -> str:
        return f"<{self.__name__}: a function and a package, {vars(self)['__file__']}>"

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Call the function."""
        __tracebackhide__ = True
        return self._function(*args, **options)


class UncalledPackage(ModuleType):
    """The class of a package that people call, although it has no function of its name."""

    _instead: str

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Refuse.

        Raises:
            WrongCall: Always; it says what to use.
        """
        raise WrongCall(f"{self.__name__} is a module and not a function; {self._instead}")


def refuse_calls(package: str, instead: str) -> None:
    """Let a call of a package be an error that says what to use.

    Args:
        package: The package.
        instead: What to use.
    """
    module = sys.modules[package]
    vars(module)["_instead"] = instead
    module.__class__ = UncalledPackage


def make_callable(package: str, home: str) -> None:
    """Let a package be called like the function of its name.

    Args:
        package: The package.
        home: The module that has the function.
    """
    module = sys.modules[package]
    vars(module)["_home"] = home
    module.__class__ = CalledPackage
