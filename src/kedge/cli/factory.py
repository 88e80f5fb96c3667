"""Objects named on the command line: MODULE:NAME, or FILE.py:NAME."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from kedge.errors import ScriptError


def named(text: str) -> Any:
    """Return the object of a name; modules are found from the working directory, as by ``python -m``.

    Raises:
        ScriptError: There is no such module or name.
    """
    place, colon, name = text.rpartition(":")
    if not (place and colon and name):
        raise ScriptError(
            f"cannot import {text!r}: "
            "write MODULE:NAME or FILE.py:NAME, such as torchvision.models:resnet18"
        )
    found: Any = _module(place, text)
    for part in name.split("."):
        if not hasattr(found, part):
            public = sorted(each for each in vars(found) if not each.startswith("_"))
            some = ", ".join(public[:8])
            raise ScriptError(f"cannot import {text!r}: {place} has no {part!r}; it has {some}")
        found = getattr(found, part)
    return found


def _module(place: str, text: str) -> ModuleType:
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if place.endswith(".py"):
        return _from_file(place, text)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not (place == error.name or place.startswith(f"{error.name}.")):
            raise  # the module exists, but an import in it fails
        raise ScriptError(
            f"cannot import {text!r}: there is no module {error.name}; "
            f"check the name, and that {os.getcwd()} is "
            "the folder to import it from"
        ) from None


def _from_file(place: str, text: str) -> ModuleType:
    name = os.path.splitext(os.path.basename(place))[0]
    folder = os.path.dirname(os.path.abspath(place))
    if not os.path.exists(place):
        raise ScriptError(
            f"cannot import {text!r}: there is no file {place} in {os.getcwd()}; check the path"
        )
    if folder not in sys.path:
        sys.path.insert(0, folder)  # so that new worker processes find it too
    return importlib.import_module(name)
