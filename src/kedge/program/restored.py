"""The interpreter as it was before the program, for the work that Kedge does after it."""

from __future__ import annotations

import builtins
import gc
import io
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import ModuleType
from typing import Any

from kedge.program.own_imports import OWN_IMPORTS

_NEEDED: tuple[ModuleType, ...] = (builtins, io, json, os, os.path, sys, time)
_FRAMES = 1000
_PROGRAMS = {"stdin", "stdout", "stderr", "argv"}
_MISSING = object()


class BeforeProgram:
    """What a program may replace, such as `open`, `json.dumps` and the limit of recursion, as it was when this was made."""

    def __init__(self) -> None:
        self._names = [(module, dict(vars(module))) for module in _NEEDED]

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context in which it is as it was.

        After it, all is as the program has left it.
        """
        with ExitStack() as undo:
            undo.enter_context(_deep_enough())
            undo.enter_context(_without_collecting())
            for module, names in self._names:
                undo.enter_context(_put_back(vars(module), names))
            # The program may have made warnings errors, and removed the module, which
            # `catch_warnings` would look for.
            undo.enter_context(warnings.catch_warnings(action="ignore", module=warnings))
            undo.enter_context(OWN_IMPORTS.filled())
            undo.enter_context(OWN_IMPORTS.in_force())
            yield


@contextmanager
def _put_back(held: dict[str, Any], names: dict[str, Any]) -> Iterator[None]:
    changed = {
        name: held.get(name, _MISSING)
        for name, value in names.items()
        if name not in _PROGRAMS and held.get(name, _MISSING) is not value
    }
    held.update({name: names[name] for name in changed})
    try:
        yield
    finally:
        for name, value in changed.items():
            if value is _MISSING:
                held.pop(name, None)
            else:
                held[name] = value


@contextmanager
def _without_collecting() -> Iterator[None]:
    """Collect no garbage: what the program has left would be searched again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def _deep_enough() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _FRAMES))
    try:
        yield
    finally:
        with suppress(RecursionError):  # it is lower than the frames that are here
            sys.setrecursionlimit(before)
