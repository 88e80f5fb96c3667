"""The code of a program, found and read as ``python`` does it."""

from __future__ import annotations

import importlib.util
import os
import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from types import CodeType
from typing import Any

from kedge.errors import ScriptError
from kedge.shown_text import typed


@dataclass(frozen=True)
class ProgramCode:
    """A program that is ready to run.

    Attributes:
        code: Its compiled main module.
        names: The ``__dunder__`` names of ``__main__``.
        argv0: The value of ``sys.argv[0]``.
    """

    code: CodeType
    names: Mapping[str, Any]
    argv0: str


def script_folder(path: str) -> str:
    """Return the first folder on ``sys.path`` for a script, with links resolved."""
    return os.path.dirname(os.path.realpath(path))


def absolute(path: str) -> str:
    """Return a path as an absolute one, otherwise unchanged: it keeps its ``./``."""
    return os.path.join(os.getcwd(), path)


def container_finder(path: str) -> Any | None:
    """Return the finder of ``__main__`` in a folder or a zip file.

    None for a plain script.
    """
    if not os.path.exists(path):
        return None
    return pkgutil.get_importer(absolute(path))


def read_script(path: str) -> ProgramCode:
    """Return the code of a script.

    Raises:
        ScriptError: It does not exist, cannot be read, or does not parse.
    """
    filename = absolute(path)
    try:
        source = Path(path).read_bytes()
    except FileNotFoundError:
        raise ScriptError(
            f"cannot run {path}: there is no such file in {os.getcwd()}; check the path"
        ) from None
    except OSError as error:
        raise ScriptError(
            f"cannot run {path}: it cannot be read ({error.strerror}); check its permissions"
        ) from error

    loader: SourceFileLoader | SourcelessFileLoader
    if source.startswith(importlib.util.MAGIC_NUMBER):
        loader = SourcelessFileLoader("__main__", filename)
        code = _loaded(loader, "__main__", path)
    else:
        loader = SourceFileLoader("__main__", filename)
        code = _compiled(source, filename, path)
    # A script has no spec and no package; `python` sets these names to the same values.
    names = {
        "__package__": None,
        "__spec__": None,
        "__file__": filename,
        "__cached__": None,
        "__loader__": loader,
    }
    return ProgramCode(code, names, path)


def read_container(path: str, finder: Any) -> ProgramCode:
    """Return the code of ``__main__.py`` in a folder or a zip file.

    Raises:
        ScriptError: There is no ``__main__.py``, or it does not parse.
    """
    spec = finder.find_spec("__main__")
    if spec is None:
        what = "directory" if os.path.isdir(path) else "archive"
        found = f"the {what} has no __main__.py"
        raise ScriptError(f"cannot run {path}: {found}; name a script in it")
    return _from_spec(spec, path, path)


def check_module(name: str) -> None:
    """Check that a module exists and parses, without importing anything.

    A module that only an import can find passes, for example in a package that changes its own
    ``__path__``.

    Raises:
        ScriptError: The module does not exist, or does not parse.
    """
    advice = _instead_of_a_module(name)
    if name.endswith(".py") and os.path.exists(name):
        raise ScriptError(f"cannot run -m {name}: this is a file; {advice}")
    with _searching(os.getcwd()):
        spec = _spec_without_import(name)
        top = name.partition(".")[0]
        if spec is None and top not in sys.modules and not _spec_without_import(top):
            raise ScriptError(f"cannot run -m {name}: there is no module {top}; {advice}")
        if spec and spec.submodule_search_locations is not None:
            spec = _first_spec(f"{name}.__main__", spec.submodule_search_locations)
            if spec is None:
                raise ScriptError(_no_main(name))

    if spec is None:
        return
    source = getattr(spec.loader, "get_source", lambda _: None)(spec.name)
    if source is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _compiled(source, spec.origin or name, f"-m {name}")


def read_module(name: str) -> ProgramCode:
    """Return the code of a module as ``python -m`` does; imports the packages around it.

    Raises:
        ScriptError: The module does not exist, or is a package that cannot be run.
    """
    parent = name.rpartition(".")[0]
    try:
        if parent:
            __import__(parent)
        spec = importlib.util.find_spec(name)
    except ImportError as error:
        around = error.name is not None and f"{parent}.".startswith(f"{error.name}.")
        if not around:
            raise
        advice = _instead_of_a_module(name)
        raise ScriptError(f"cannot run -m {name}: {error}; {advice}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise ScriptError(
            f"cannot run -m {name}: the search for it failed with {error!r}; check the name"
        ) from error
    if spec is None:
        advice = _instead_of_a_module(name)
        raise ScriptError(f"cannot run -m {name}: there is no module of that name; {advice}")

    if spec.submodule_search_locations is None:
        return _from_spec(spec, spec.origin or name, f"-m {name}")
    main = f"{name}.__main__"
    if name.endswith(".__main__") or importlib.util.find_spec(main) is None:
        raise ScriptError(_no_main(name))
    return read_module(main)


def _from_spec(spec: ModuleSpec, argv0: str, shown: str) -> ProgramCode:
    code = _loaded(spec.loader, spec.name, shown)
    names = {
        "__package__": spec.parent,
        "__spec__": spec,
        "__file__": spec.origin,
        "__cached__": spec.cached,
        "__loader__": spec.loader,
    }
    return ProgramCode(code, names, argv0)


def _loaded(loader: Any, name: str, shown: str) -> CodeType:
    """Return the code of a module from its loader.

    Raise ScriptError for one without, such as a module in C.
    """
    code: CodeType | None = None
    if hasattr(loader, "get_code"):
        try:
            code = loader.get_code(name)
        except SyntaxError as error:
            raise ScriptError(_parse_failure(shown, error)) from error
    if code is None:
        found = "it is not written in Python"
        raise ScriptError(f"cannot run {shown}: {found}; name another module")
    return code


def _compiled(source: bytes | str, filename: str, shown: str) -> CodeType:
    try:
        return compile(source, filename, "exec", dont_inherit=True)
    except SyntaxError as error:
        raise ScriptError(_parse_failure(shown, error)) from error
    except ValueError as error:  # a syntax error where Python reads the file itself
        raise ScriptError(_parse_failure(shown, error)) from SyntaxError(*error.args)


def _parse_failure(shown: str, error: SyntaxError | ValueError) -> str:
    place = shown.removeprefix("-m ")
    reason = str(error)
    if isinstance(error, SyntaxError) and error.lineno is not None:
        place = f"{error.filename or place}:{error.lineno}"
        reason = error.msg
    return f"cannot run {shown}: it does not parse; {place}: {reason}"


def _instead_of_a_module(name: str) -> str:
    if name.endswith(".py"):
        return f"to run a file, leave -m out: {typed('kedge', 'run', name)}"
    return f"check the name, and that {os.getcwd()} is the folder to import it from"


def _no_main(name: str) -> str:
    return f"cannot run -m {name}: it is a package without __main__.py; name a module in it"


def _spec_without_import(name: str) -> ModuleSpec | None:
    """Return the spec of a module, searched in its parents' folders.

    None if it is not found.
    """
    path: Any = None
    spec: ModuleSpec | None = None
    ends = [i for i, char in enumerate(name) if char == "."]
    for end in [*ends, len(name)]:
        spec = _first_spec(name[:end], path)
        if spec is None:
            return None
        path = spec.submodule_search_locations
        if path is None and end < len(name):
            return None
    return spec


def _first_spec(name: str, path: Any) -> ModuleSpec | None:
    found = (finder.find_spec(name, path) for finder in sys.meta_path)
    return next((spec for spec in found if spec is not None), None)


@contextmanager
def _searching(folder: str) -> Iterator[None]:
    """Context in which imports search a folder first, as they will in the program."""
    before = list(sys.path)
    if not sys.flags.safe_path:
        sys.path[:1] = [folder]
    try:
        yield
    finally:
        sys.path[:] = before
