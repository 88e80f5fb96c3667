"""The names of the program's variables that hold a model or a tensor.

# Note [Names of variables]
A model is named after the variable that holds it where it is first seen: a variable of a function
that is running, or of its file; a model in a list, tuple or dict there (``nets.0``,
``models.critic``), or in a field of a named tuple; or an attribute of an object there, without the
object's name (``generator`` for ``gan.generator``). The program's own functions come before those
of installed libraries, so the name is ``net`` although the loop of a library calls it ``model``. Of
several names the first counts in this order:

1. The outermost function first, and a file's variables before those of its functions: what
   `train(net)` calls ``net`` is ``encoder`` where it was made.
2. Variables, and what is in lists, tuples and dicts there, come before attributes.
3. Of these the one that is bound first: loops and aliases come later.

No names are ``self``, ``cls``, ``_`` and the like, keys that are no plain words, and attributes with
an underscore of a library's objects.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import FrameType, ModuleType
from typing import Any

from torch import Tensor, nn

from kedge.frames import frames_around, is_between, is_installed, variables_of
from kedge.hooks.roots import unwrapped
from kedge.torch_internals.module_tables import own_children
from kedge.watch.models.holders import is_readable

_LARGEST = 1_000
"""Most items of a list, and most attributes of an object, that are looked at: more are data."""
_WORD = re.compile(r"[\w-]+")
_UNNAMED = re.compile(r"__.*__|[_\d]*|self|cls")
_DICTS = (dict, OrderedDict, defaultdict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Named = Iterator[tuple[str, Any]]


def names_in_frames(wanted: Collection[object]) -> dict[int, str]:
    """Return the names of the program's variables that hold some objects; see Note [Names of variables].

    Args:
        wanted: Models, which a variable may also hold in a wrapper; or tensors.

    Returns:
        The names, by the identities of the objects; none of those that no variable holds.
    """
    ids = {id(each) for each in wanted}
    names: dict[int, str] = {}
    for variables in _programs_scopes(sys._getframe(1)):
        for name, value in _holders(variables):
            at = _identity(value)
            if at in ids:
                names.setdefault(at, name)
        if len(names) == len(ids):
            return names
    return names


def tensors_in_frames() -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the program's variables hold, with their names; see Note [Names of variables]."""
    for variables in _programs_scopes(sys._getframe(1)):
        yield from tensors_in(variables)


def tensors_in(variables: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that some variables hold, with their names.

    A tensor may stand in a tuple, list or dict that is in one itself: ``layers.0.1``.
    """
    for name, value in _holders(variables):
        if issubclass(type(value), Tensor):
            yield name, value
        elif "." in name:
            for inner, each in _items(name, value):
                if issubclass(type(each), Tensor):
                    yield inner, each


def _programs_scopes(frame: FrameType | None) -> Iterator[dict[str, Any]]:
    """Yield the variables of the frames around one, the program's own before those of libraries."""
    own: list[FrameType] = []
    installed: list[FrameType] = []
    for each in frames_around(frame):
        file = each.f_code.co_filename
        if is_between(file):
            continue
        if is_installed(file):
            installed.insert(0, each)
        else:
            own.insert(0, each)
    yield from _scopes(own)
    yield from _scopes(installed)


def _scopes(frames: Iterable[FrameType]) -> Iterator[dict[str, Any]]:
    """Yield the variables of each frame, and before them those of its file if they are new."""
    files = set()
    for frame in frames:
        if id(frame.f_globals) not in files:
            files.add(id(frame.f_globals))
            yield dict(frame.f_globals)
        if frame.f_code.co_name != "<module>":
            yield variables_of(frame)


def _holders(variables: Mapping[str, Any]) -> Named:
    """Yield what variables hold, by the name that it has there: first themselves, then attributes."""
    for name, value in variables.items():
        if _UNNAMED.fullmatch(name) is None:
            yield name, value
            yield from _items(name, value)
    for holder in variables.values():
        for name, value in _attributes(holder):
            if _WORD.fullmatch(name) is not None and _UNNAMED.fullmatch(name) is None:
                yield name, value
                yield from _items(name, value)


def _items(name: str, value: Any) -> Named:
    """Yield the items of a container with their names; not those of the variables of executed text."""
    kind = type(value)
    items: Iterable[tuple[Any, Any]] = ()
    if issubclass(kind, _CONTAINERS) and is_readable(value):
        items = own_children(value).items()
    elif kind in (list, tuple) and len(value) <= _LARGEST:
        items = enumerate(value)
    elif kind in _DICTS and len(value) <= _LARGEST and "__builtins__" not in value:
        items = value.items()
    elif issubclass(kind, tuple) and hasattr(kind, "_fields"):
        items = zip(kind._fields, tuple.__iter__(value), strict=False)
    for key, each in list(items):
        if kind in (list, tuple) or (type(key) is str and _WORD.fullmatch(key)):
            yield f"{name}.{key}", each


def _attributes(holder: Any) -> Iterable[tuple[str, Any]]:
    """Return the attributes in an object's own dict, read without code of its class; not those of a class or a file."""
    kind = type(holder)
    if issubclass(kind, (type, ModuleType)):
        return ()
    try:
        own = object.__getattribute__(holder, "__dict__")
    except Exception:  # noqa: BLE001 - it has none, or its class has a property of that name, which fails
        return ()
    if type(own) is not dict or len(own) > _LARGEST:
        return ()
    attributes = [each for each in list(own.items()) if type(each[0]) is str]
    file = getattr(sys.modules.get(str(kind.__module__)), "__file__", None)
    if type(file) is str and is_installed(file):
        attributes = [(name, value) for name, value in attributes if not name.startswith("_")]
    if issubclass(kind, nn.Module) and not issubclass(kind, _CONTAINERS) and is_readable(holder):
        others = [(name, value) for name, value in attributes if name != "_modules"]
        attributes = [*own_children(holder).items(), *others]
    return attributes


def _identity(value: Any) -> int:
    """Return the identity of a value; of a wrapped model that of the model."""
    if issubclass(type(value), nn.Module) and is_readable(value):
        return id(unwrapped(value))
    return id(value)
