"""Keeps warnings that Kedge causes from the program, whatever the program does with warnings.

# Note [Warnings that are nobody's]
While Kedge watches, PyTorch may warn of Kedge's hooks, or of an operation with which Kedge
measures. The program can do nothing about it; yet it may have turned warnings into errors, count
them, or capture them, as pytest does for each test. So Kedge's filter is the first one, and stays
the first when the program adds others in front or copies the list, as `warnings.catch_warnings`
does: the list itself sees to that. The filter asks for the text, or for who runs.

Kedge's own reports never come this way: a watch writes lines to stderr. Warnings of Kedge's
functions that the program calls itself are the program's.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from types import FrameType
from typing import Any, Protocol, SupportsIndex

from kedge.errors import warn
from kedge.frames import OWN, is_between, is_installed, is_torch


class Matcher(Protocol):
    """Decides which warnings are kept from the program."""

    def match(self, text: str) -> Any:
        """Whether a warning is, by its text, or by the frames that issue it."""


def _pattern(text: str) -> Matcher:
    return re.compile(text, re.IGNORECASE)


class _OwnWork:
    """Matches what is issued while a watch works inside the program, rather than the program or its own use of Kedge."""

    _WATCH = tuple(f"{OWN}{folder}/" for folder in ("watch", "repro", "verify", "running"))
    _PASSING = ("__torch_dispatch__", "__torch_function__")
    _RUNNERS = tuple(f"{OWN}{folder}/" for folder in ("program", "cli"))

    def match(self, text: str) -> bool:
        """Whether Kedge's frames come before the program's, and a watch or PyTorch has called them, as it calls a hook."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back  # `_Quiet.match` asks; the warning came from before
        is_own = False
        while frame is not None:
            file = frame.f_code.co_filename
            if frame.f_code.co_name in self._PASSING and file.startswith(OWN):
                frame = frame.f_back  # a mode, which passes an operation of the program's on
                continue
            if file.startswith(self._WATCH):
                return True
            if frame.f_code is warn.__code__ or file.startswith(self._RUNNERS):
                return False
            if file.startswith(OWN):
                is_own = True
            elif is_own and is_torch(file):
                return True
            elif not (is_between(file) or is_installed(file)):
                return False
            frame = frame.f_back
        return is_own


_GLOBAL_HOOKS = (_pattern(r"Using `torch.compile\(module\)` when there are global hooks"),)
_DYNAMO = _pattern(r".*torch.autograd.function.Function.* should not be instantiated")
OF_A_WATCH: Sequence[Matcher] = (*_GLOBAL_HOOKS, _DYNAMO, _OwnWork())
"""What a watch causes: hooks on all modules, functions of hooks that Dynamo reads, and its own work."""
ANOMALY_WARNINGS: Sequence[Matcher] = tuple(
    map(_pattern, (r"Error detected in ", r"\s*Previous calculation was induced by "))
)
"""The warnings of a backward pass that raises while autograd records the stack of each operation."""


class _Quiet:
    """The text of Kedge's filter, asked as if it were a compiled regular expression."""

    def __init__(self) -> None:
        self.matchers: list[Matcher] = []

    def match(self, text: str) -> bool:
        """Whether a warning is kept from the program."""
        return any(matcher.match(text) for matcher in self.matchers)

    def __reduce__(self) -> Any:
        """A process to which a program sends its filters has no watch: nothing matches there."""
        return re.compile, (r"(?!)",)


_QUIET = _Quiet()
_ENTRY: Any = ("ignore", _QUIET, Warning, None, 0)


class _OwnFirst(list[Any]):
    """The filters of `warnings`, with Kedge's at the front.

    See Note [Warnings that are nobody's].
    """

    def __init__(self, filters: Iterable[Any]) -> None:
        super().__init__(filters)
        self._lead()

    def _lead(self) -> None:
        super().__setitem__(slice(None), [_ENTRY, *_of_program(self)])

    def insert(self, index: SupportsIndex, entry: Any) -> None:
        """Add a filter of the program."""
        super().insert(index, entry)
        self._lead()

    def clear(self) -> None:
        """Remove the program's filters."""
        self[:] = []

    def copy(self) -> Any:
        """Return the list of an inner context."""
        return _OwnFirst(self)

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if isinstance(index, slice):
            return _OwnFirst(found)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(index, value)
        self._lead()

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return list, (_of_program(self),)


def _of_program(filters: Iterable[Any]) -> list[Any]:
    return [entry for entry in filters if entry is not _ENTRY]


def ignore_warnings(matchers: Sequence[Matcher] = OF_A_WATCH) -> None:
    """Keep warnings from the program.

    `warnings.filterwarnings` would make Python forget which of the program's own warnings it has
    printed already.
    """
    _QUIET.matchers += matchers
    if not isinstance(warnings.filters, _OwnFirst):
        warnings.filters = _OwnFirst(warnings.filters)


def show_warnings(matchers: Sequence[Matcher] = OF_A_WATCH) -> None:
    """End one `ignore_warnings`."""
    for matcher in matchers:
        if matcher in _QUIET.matchers:
            _QUIET.matchers.remove(matcher)
    if not _QUIET.matchers and isinstance(warnings.filters, _OwnFirst):
        warnings.filters = _of_program(warnings.filters)


class IgnoredOfGlobalHooks:
    """Ignores PyTorch's warning about hooks on all modules, until it is removed."""

    def __init__(self) -> None:
        self._on = False
        self.back()

    def back(self) -> None:
        """Ignore the warning."""
        if not self._on:
            ignore_warnings(_GLOBAL_HOOKS)
            self._on = True

    def out(self) -> None:
        """Show it."""
        if self._on:
            self._on = False
            show_warnings(_GLOBAL_HOOKS)

    def remove(self) -> None:
        """Show it."""
        self.out()
