"""Kedge's modules and the program's, where both have one of the same name.

# Note [Names in the program's folder]
Beside a script there may be a file `json.py`, `html.py` or `numpy.py`, which python imports for the
script in place of the module that Kedge uses. So before the program begins, Kedge's modules of such
names leave `sys.modules`, except those that python itself loads when it starts: the program imports
its own, and Kedge's modules keep what they have imported. While Kedge imports something later, it
is the other way round: its own modules are in `sys.modules`, and a finder in front of the others
searches the folders that were on `sys.path` before the program, for the threads alone in which
Kedge does so. PyTorch is the same for both, and so is a NumPy that PyTorch can work with.
"""

from __future__ import annotations

import os
import pkgutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import FrozenImporter, ModuleSpec, PathFinder
from itertools import takewhile
from types import ModuleType
from typing import Any

_SHARED = {"__main__", "torch"}


class OwnImports(MetaPathFinder):
    """Keeps Kedge's modules apart from the program's.

    See Note [Names in the program's folder].
    """

    def __init__(self) -> None:
        self._folder: Any | None = None
        self._path: list[str] = []
        self._at_start: frozenset[str] = frozenset()
        self._same: set[str] = set()
        self._aside: dict[str, ModuleType] = {}
        self._loaded: dict[str, ModuleType] = {}
        self._threads: list[int] = []
        self._theirs: dict[str, ModuleType] = {}
        self._changing = threading.Lock()

    def set_aside(self, folder: str, path: Sequence[str]) -> None:
        """Leave to the program the names that its folder has.

        Args:
            folder: The first folder on the program's ``sys.path``.
            path: ``sys.path`` as Kedge needs it.
        """
        self._folder = pkgutil.get_importer(folder)
        self._path = list(path)
        self._at_start = frozenset(takewhile(lambda name: name != "kedge", sys.modules))
        # The folder may be one of Kedge's too, such as that of the installed packages, or of
        # Kedge's source.
        self._same = {name for name in _tops() if self._is_from_folder(name)}
        self._aside = self._taken_out()
        self._loaded = dict(sys.modules)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Context in which this thread imports Kedge's modules.

        It may be entered again inside, and by other threads.
        """
        here = threading.get_ident()
        if self._folder is None or here in self._threads:
            yield
            return
        with self._changing:
            if not self._threads:
                self._theirs = self._taken_out()
                sys.modules.update(self._aside)
                sys.meta_path.insert(0, self)
            self._threads.append(here)
        try:
            yield
        finally:
            with self._changing:
                self._threads.remove(here)
                if not self._threads:
                    self._put_back()

    def _put_back(self) -> None:
        """Leave the names to the program again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._loaded = dict(sys.modules)
        self._aside = self._taken_out()
        sys.modules.update(self._theirs)

    def forked(self) -> None:
        """Called in a forked child: of the threads, only the one that forks exists there."""
        self._changing = threading.Lock()
        if self._threads and threading.get_ident() not in self._threads:
            self._threads.clear()
            self._put_back()

    @contextmanager
    def filled(self) -> Iterator[None]:
        """Context in which the modules are back that the program has removed.

        Since Kedge's last import.
        """
        loaded = self._loaded.items()
        missing = {name: module for name, module in loaded if name not in sys.modules}
        sys.modules.update(missing)
        try:
            yield
        finally:
            for name in missing:
                sys.modules.pop(name, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of one of Kedge's modules that is not a part of a package; None for other threads.

        Raises:
            ModuleNotFoundError: Only the program's folder has it.
        """
        if path is not None or fullname in _SHARED:
            return None
        if threading.get_ident() not in self._threads:
            return None
        if _is_built_in(fullname):
            return None
        found = PathFinder.find_spec(fullname, self._path, target)
        if found is None and self._in_folder(fullname) is not None:
            others = (
                finder.find_spec(fullname, None, target)
                for finder in sys.meta_path
                if not _is_usual(finder)
            )
            found = next((spec for spec in others if spec is not None), None)
            if found is None:
                what = f"No module named {fullname!r}"
                raise ModuleNotFoundError(what, name=fullname)
        return found

    def _taken_out(self) -> dict[str, ModuleType]:
        later = (name for name in _tops() if name not in self._at_start)
        names = set(filter(self._differs, later))
        return {
            name: sys.modules.pop(name)
            for name in list(sys.modules)
            if name.partition(".")[0] in names
        }

    def _differs(self, name: str) -> bool:
        """Whether the program's module of a name, or none, is another one than Kedge's."""
        place = self._in_folder(name)
        if place is None or name in self._same:
            return False
        if name == "numpy" and hasattr(sys.modules.get(name), "ndarray"):
            return False
        own = PathFinder.find_spec(name, self._path)
        return (
            own is None
            or own.origin is None
            or os.path.realpath(own.origin) != os.path.realpath(place)
        )

    def _is_from_folder(self, name: str) -> bool:
        place = self._in_folder(name)
        spec = getattr(sys.modules.get(name), "__spec__", None)
        origin = getattr(spec, "origin", None)
        return (
            place is not None
            and origin is not None
            and os.path.realpath(origin) == os.path.realpath(place)
        )

    def _in_folder(self, name: str) -> str | None:
        """Return the place of the module that the program's folder has of a name.

        None if python would not import it.
        """
        if name in _SHARED or _is_built_in(name) or self._folder is None:
            return None
        spec = self._folder.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        origin: str | None = spec.origin
        return origin


def _tops() -> set[str]:
    return {name.partition(".")[0] for name in sys.modules}


def _is_built_in(name: str) -> bool:
    if name in sys.builtin_module_names:
        return True
    return FrozenImporter.find_spec(name) is not None


def _is_usual(finder: object) -> bool:
    if isinstance(finder, OwnImports) or finder is PathFinder:
        return True
    return not hasattr(finder, "find_spec")


OWN_IMPORTS = OwnImports()
"""Those of this process."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=OWN_IMPORTS.forked)
