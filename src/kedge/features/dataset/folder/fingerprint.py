"""Text that identifies a user's function or model: equal in all processes, and different after a change.

# Note [Contents of a digest]
A function of the program itself counts by value: its bytecode, constants and names, its defaults,
and the objects outside the function that it refers to, as cloudpickle finds them: numbers, text,
tensors, models, containers, objects with their contents, and further functions and classes.
Functions and classes of installed packages count by name. If a function refers to a module of the
program, or to a namespace such as the options of a command line, the attributes count that its
code, or that of a function of the program to which it refers, names. Lines, docstrings and memory
addresses do not count; an object that cannot be pickled, such as a lock, counts by its class.

cloudpickle's own bytes differ from process to process: they contain the order of sets, the identity
of equal strings, random class names, and file paths. So `_Pickler` passes plain stand-ins for all
of these.

Bytecode belongs to one version of Python, so that version precedes the digest, and digests of two
versions are not compared.
"""

from __future__ import annotations

import os
import re
import sys
from argparse import Namespace
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import blake2b
from itertools import count
from pickle import PicklingError
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    ModuleType,
    NoneType,
    SimpleNamespace,
)
from typing import Any

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn

from kedge.calls.closure import enclosed, names_in
from kedge.errors import ExtractionFailed
from kedge.features.dataset.keys_and_fields import name_of
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import modules_in, own_buffers, parameters_in
from kedge.torch_internals.torchscript import is_training

#: The version of the digest algorithm, and the version of Python.
_MADE_BY = f"2/{sys.version_info.major}.{sys.version_info.minor}"
_DIGESTED = re.compile(r"(.*) code ([\d./]+):(\w+)", re.DOTALL)
_PLACE = re.compile(r"(\w+):\d+")
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]")
#: Types without identity: whether two equal values are one object differs from process to process.
_CONSTANTS = (str, bytes, int, float, complex, bool, NoneType, tuple, frozenset, slice, CodeType)
#: Types that pickle itself writes in the same way in every process.
_WRITTEN = (bytes, int, float, bool, NoneType, tuple, list, dict, bytearray)
_SETTINGS = (
    bool,
    int,
    float,
    complex,
    str,
    torch.dtype,
    torch.device,
    Tensor,
    np.ndarray,
    FunctionType,
)
_OF_ANY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_HAS_DOC = 0x4000000 if sys.version_info >= (3, 13) else 0
#: The number of elements of a tensor that take part in a digest, at most.
_LOOKED_AT = 4096


def identity(made: Any, version: str | None = None) -> str:
    """Return the name of a callable, with a digest of its contents; see Note [Contents of a digest].

    Args:
        made: A function or another callable object; None returns "none".
        version: The user's version, which replaces the digest: then the name alone is returned.

    Raises:
        ExtractionFailed: The callable cannot be digested.
    """
    if made is None:
        return "none"
    name = name_of(made)
    if version is not None or _is_named(made):
        return name
    return f"{name} code {_MADE_BY}:{_digest_of(made)}"


def alike(one: Any, other: Any) -> bool:
    """Whether two manifest entries agree; digests of different algorithms or Python versions agree if their names do."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        if one.keys() != other.keys():
            return False
        return all(alike(one[name], other[name]) for name in one)
    if isinstance(one, str) and isinstance(other, str):
        mine = _DIGESTED.fullmatch(one)
        others = _DIGESTED.fullmatch(other)
        if mine and others and mine[2] != others[2]:
            return mine[1] == others[1]
    return bool(one == other)


def has_digest(description: Any) -> bool:
    """Whether a manifest entry contains the digest of a function."""
    if isinstance(description, Mapping):
        return any(map(has_digest, description.values()))
    return bool(_DIGESTED.fullmatch(str(description)))


def weights(model: nn.Module) -> str:
    """Return a digest of a model's modules and of its parameters and buffers.

    A few thousand numbers of each parameter and buffer represent the rest: training changes nearly
    every number. Buffers of a module in training mode are left out, because some change with every
    batch.
    """
    parts: list[str | bytes] = []
    tensors: dict[str, Tensor] = {**parameters_in(model)}
    for path, module in modules_in(model).items():
        if _is_kedges(type(module).__module__):
            continue
        parts.append(_made_of(path, module))
        if is_training(module):
            continue
        for name, buffer in own_buffers(module).items():
            if buffer is not None:
                tensors[f"{path}.{name}" if path else name] = buffer
    for name in sorted(tensors):
        parts += (f"{name} ", *_of_tensor(tensors[name]))
    return _digest(parts)


def _made_of(path: str, module: nn.Module) -> str:
    """Return a module's path and class, its settings in ``__constants__`` (such as a stride), and its mode."""
    held = vars(module)
    constants = [name for name in getattr(module, "__constants__", ()) if name in held]
    settings = [f"{name}={_setting(held[name])}" for name in constants]
    mode = "trained" * is_training(module)
    return f"{path} {type(module).__qualname__}({', '.join(settings)}) {mode};"


def _setting(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"{len(value)}({', '.join(map(_setting, value))})"
    if isinstance(value, (bool, int, float, str, NoneType, torch.dtype)):
        return f"{type(value).__name__} {value!r}"
    return _digest_of(value)


def listed(keys: Sequence[str]) -> str:
    """Return the number of keys and a digest of them."""
    return f"{len(keys)} given, {_digest(f'{len(key)} {key}' for key in keys)}"


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = blake2b(digest_size=12)
    for part in parts:
        if isinstance(part, str):
            part = part.encode("utf-8", "surrogatepass")  # noqa: PLW2901 - the same as bytes
        digest.update(part)
    return digest.hexdigest()


def _of_tensor(tensor: Tensor) -> tuple[str, bytes]:
    """Return a tensor's type and shape, and the bytes of evenly spaced elements, from the first on."""
    about = f"{tensor.dtype} {tuple(tensor.shape)}"
    tensor = tensor.detach()
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided
    if not is_plain or tensor.is_meta or not tensor.numel():
        return (
            about,
            b"",
        )  # for example a shard of a distributed tensor, which differs between ranks
    tensor = tensor.resolve_conj().resolve_neg()
    flat = tensor.flatten() if tensor.is_contiguous() else tensor.reshape(-1)
    step = max(1, -(-flat.numel() // _LOOKED_AT))
    some = flat[::step].clone(memory_format=torch.contiguous_format).cpu()
    return about, some.view(torch.uint8).numpy().tobytes()


def _by_name(made: Any) -> str:
    """Return the name of an object that does not count by value, with its module to separate equal names."""
    own = getattr(made, "__qualname__", None)
    own = own or getattr(made, "__name__", None)  # of a module
    return f"{getattr(made, '__module__', None)} {own or type(made).__qualname__}"


def _is_named(made: Any) -> bool:
    """Whether an object counts by its name: installed code, code in C, or a module."""
    if isinstance(made, FunctionType):
        wraps = "__wrapped__" in vars(made)
        return _is_kedges(made.__module__) or (_is_installed(made) and not wraps)
    if isinstance(made, BuiltinFunctionType):
        return made.__self__ is None or isinstance(made.__self__, (ModuleType, type))
    if isinstance(made, type):
        return not _is_own(made)
    return isinstance(made, ModuleType)


def _is_installed(made: FunctionType) -> bool:
    is_in_packages = _INSTALLED.search(made.__code__.co_filename) is not None
    return is_in_packages or _is_kedges(made.__module__)


def _is_kedges(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "kedge"


def _is_own(made: type | ModuleType) -> bool:
    """Whether a class or module belongs to the program, not to Python or an installed package."""
    name = made.__name__ if isinstance(made, ModuleType) else made.__module__
    if name == "__main__":
        return True
    module = made if isinstance(made, ModuleType) else sys.modules.get(name)
    file = getattr(module, "__file__", None)
    return file is not None and not _INSTALLED.search(file) and not _is_kedges(name)


def _digest_of(made: Any) -> str:
    digest = blake2b(digest_size=12)
    try:
        _Pickler(digest.update).dump(made)
    except PicklingError as error:
        raise ExtractionFailed(
            f"{name_of(made)} must be distinguished from other functions, and no "
            f"digest of it can be made: {error} Identify your functions yourself, with "
            "version='...' (--version)"
        ) from error
    return digest.hexdigest()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickler that writes a value in the same way in every process; see Note [Contents of a digest].

    pickle calls `persistent_id` with each value first, and writes the returned object in place of
    the value. Its own memo is off, because it distinguishes two equal strings from one string that
    occurs twice. This class numbers objects instead.

    Args:
        write: Receives the bytes.
        seen: The number of each object seen so far, with the object itself, so that its `id` is not
            used again.
    """

    def __init__(
        self, write: Callable[[bytes], Any], seen: ChainMap[int, tuple[int, Any]] | None = None
    ) -> None:
        super().__init__(SimpleNamespace(write=write), protocol=5)
        self.fast = True
        self._seen = ChainMap[int, tuple[int, Any]]() if seen is None else seen
        self._count = count(len(self._seen))

    def persistent_id(self, value: Any) -> Any:
        """Return the stand-in for a value, or None if pickle should write the value itself."""
        kind = type(value)
        if kind is str:
            # Ranks have different devices of one type, which does not change values.
            place = _PLACE.fullmatch(value)
            return f"device {place[1]}" if place and _is_device(value) else None
        if kind not in _CONSTANTS:
            if id(value) in self._seen:
                return "again", self._seen[id(value)][0]
            self._seen[id(value)] = next(self._count), value
        return None if kind in _WRITTEN else self._stand_in(value)

    def _stand_in(self, value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            # The order differs between processes: digest each element by itself.
            return type(value).__qualname__, sorted(map(self._alone, value))
        if _is_named(value):
            return _by_name(value)
        for kind, stand_in in _STAND_INS.items():
            if isinstance(value, kind):
                return stand_in(value)
        if isinstance(value, FunctionType):
            return self._function(value)
        if "__wrapped__" in getattr(value, "__dict__", ()):
            return type(value), value.__wrapped__
        return self._reduced(value)

    def _alone(self, value: Any) -> str:
        digest = blake2b(digest_size=12)
        _Pickler(digest.update, self._seen.new_child()).dump(value)
        return digest.hexdigest()

    def _function(self, made: FunctionType) -> Any:
        if _is_installed(made):
            return _by_name(made), vars(made)["__wrapped__"]
        # cloudpickle takes a function by value if its module does not contain it under its name.
        anew = FunctionType(
            made.__code__, made.__globals__, made.__name__, made.__defaults__, made.__closure__
        )
        outside = self.reducer_override(anew)[2][1]["__globals__"]
        names = _reached(made, outside, {id(made.__code__)})
        around = [*outside.values(), *enclosed(made).values()]
        held = [_used(one, names) for one in around]
        return made.__code__, made.__defaults__, made.__kwdefaults__, list(outside), held

    def _reduced(self, value: Any) -> Any:
        """Return the parts into which pickle reduces an object; its class if it cannot be pickled."""
        try:
            parts = self.dispatch_table.get(type(value), _reduce)(value)
        except RecursionError:
            raise
        except Exception:  # noqa: BLE001 - objects may raise anything
            return type(value)
        if isinstance(parts, str):
            return type(value), parts
        written = list(parts)
        for place, part in enumerate(written):
            if isinstance(part, Iterator):
                written[place] = list(part)
        return written


def _reduce(value: Any) -> Any:
    return value.__reduce_ex__(5)


def _code(code: CodeType) -> Any:
    """Return what code does, without its docstring."""
    consts = code.co_consts
    has_doc = bool(code.co_flags & _HAS_DOC)
    if not _HAS_DOC:  # this Python does not say
        is_def = not code.co_name.startswith("<")
        has_doc = is_def and bool(consts) and isinstance(consts[0], str)
    if has_doc:
        consts = (None, *consts[1:])
    flags = code.co_flags & ~_HAS_DOC
    return (
        code.co_code,
        code.co_exceptiontable,
        code.co_names,
        code.co_argcount,
        flags,
        consts,
    )


def _reached(made: FunctionType, outside: Mapping[str, Any], seen: set[int]) -> set[str]:
    """Return the names that a function uses, and those that the program's functions use to which it refers."""
    names = set(names_in(made.__code__))
    for one in outside.values():
        if not isinstance(one, FunctionType) or _is_installed(one) or id(one.__code__) in seen:
            continue
        seen.add(id(one.__code__))
        further = {name: one.__globals__.get(name) for name in names_in(one.__code__)}
        names |= _reached(one, further, seen)
    return names


def _used(value: Any, names: set[str]) -> Any:
    """Return the attributes that code with these names can use, for a program's module or a namespace; else the value.

    The environment counts by its name: ranks have different ones.
    """
    if value is os.environ:
        return "os.environ"
    if isinstance(value, _NAMESPACES):
        if names & _READS_ALL:
            return value
    elif not (isinstance(value, ModuleType) and _is_own(value)):
        return value
    held = vars(value)
    return {name: _used(held[name], names) for name in sorted(held) if name in names}


def _class(kind: type) -> Any:
    """Return the name, bases and attributes of a class of the program, without its docstring and lines."""
    held = {name: one for name, one in sorted(vars(kind).items()) if name != "_abc_impl"}
    for name in [name for name in held if name[:2] == "__"]:
        if not isinstance(held[name], _METHODS):
            del held[name]
    return kind.__qualname__, kind.__bases__, held


def _module(module: nn.Module) -> Any:
    inner = dynamo.unwrap(module)
    modules = [(type(one), _attributes(one)) for one in modules_in(inner).values()]
    return modules, weights(inner)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes that `nn.Module` does not define; of an installed class only settings."""
    held = {name: one for name, one in sorted(vars(module).items()) if name not in _OF_ANY_MODULE}
    if _is_own(type(module)):
        return held
    return {name: one for name, one in held.items() if isinstance(one, _SETTINGS)}


def _array(array: np.ndarray[Any, Any]) -> Any:
    some = array.reshape(-1)[:: max(1, -(-array.size // _LOOKED_AT))]
    elements = some.tolist() if array.dtype.hasobject else some.tobytes()
    return f"{array.dtype} {array.shape}", elements


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


#: Objects that hold settings by name, such as the options of a command line.
_NAMESPACES = (SimpleNamespace, Namespace)
#: Names by which code reads attributes that it does not name.
_READS_ALL = frozenset({"vars", "getattr", "__dict__", "copy", "deepcopy"})
_METHODS = (FunctionType, staticmethod, classmethod, property)
_STAND_INS: dict[type, Callable[[Any], Any]] = {
    CodeType: _code,
    type: _class,
    nn.Module: _module,
    Tensor: _of_tensor,
    np.ndarray: _array,
    torch.device: lambda device: f"device {device.type}",
    property: lambda made: (made.fget, made.fset, made.fdel),
    cached_property: lambda made: made.func,
}
