"""What a user's function or model is, as text: the same in every process, and another one when it was changed.

# Note [What a digest takes in]
Of a function of Python's own: its bytecode, constants and names, those of functions inside it, its defaults, and what
it refers to outside of itself, as far as that is plain: numbers, text, tensors, models, containers of these, and more
functions. Its place in the file and docstrings are no part of it, nor is any address in memory. Functions of installed
packages go by their names, as those in C have to. Of a module or an object that it refers to, what counts are the
attributes that its code names. Of an object that can be called these are the attributes that are numbers or text, and
all that `__call__` and the methods behind it name. What a function itself assigns or adds to is no part of it: a counter
or a cache is another one when the same run goes on in one process.

Bytecode is one version of Python's, so that version stands before the digest, and digests of two are not compared.
"""

from __future__ import annotations

import dis
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import cached_property, partial, partialmethod
from hashlib import blake2b
from itertools import chain, islice
from operator import attrgetter, itemgetter, methodcaller
from pathlib import PurePath
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kedge.torch_internals import dynamo

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_DIGESTED = re.compile(r"(.*) code (\d+\.\d+):(\w+)", re.DOTALL)
_NUMBERS = (bool, int, float, complex, str, bytes, bytearray, type(None), range, slice, PurePath)
_SCALARS = (*_NUMBERS, Enum, np.generic, torch.dtype, torch.device)
_NOTHING = object()
_PLACE = re.compile(r"(cuda|xpu|hpu|npu|mps):\d+")
_GROWING = (list, dict, set, deque)
#: Methods that add to a container or take from it.
_GROWS = {"add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"}
_GROWS |= {"setdefault", "update"}
_BARE = frozenset(vars(nn.Module())) - {"training"}
_HAS_DOC = 0x4000000 if sys.version_info >= (3, 13) else 0
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3\.\d+[/\\]")
#: So many numbers of a tensor, and entries of a container, take part in a digest.
_LOOKED_AT = 4096
#: A text of so many letters is shortened to its digest.
_LONG = 1000
#: What is in so many values and functions around it counts by its name; less than Python's own limit allows.
_DEEPEST = 100


def identity(made: Any) -> str:
    """Name what can be called, with a digest of what it does; see Note [What a digest takes in]."""
    if made is None:
        return "none"
    name = name_of(made)
    text = _Telling().text(made)
    return name if text == _by_name(made) else f"{name} code {_VERSION}:{_digest([text])}"


def name_of(made: Any) -> str:
    """Give the name of a function, or of an object's class."""
    return str(getattr(made, "__name__", type(made).__name__))


def alike(one: Any, other: Any) -> bool:
    """Tell whether what two manifests say is the same; of two versions of Python names alone can be compared."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(alike(one[name], other[name]) for name in one)
    if isinstance(one, str) and isinstance(other, str):
        mine, others = _DIGESTED.fullmatch(one), _DIGESTED.fullmatch(other)
        if mine and others and mine[2] != others[2]:
            return mine[1] == others[1]
    return bool(one == other)


def weights(model: nn.Module) -> str:
    """Give a digest of what a model is made of and of what it has learnt.

    A few thousand numbers of each parameter and buffer stand for all: any training changes nearly every one. Buffers
    of a module in training mode are left out, as some change with every batch.
    """
    modules = [(path, module) for path, module in model.named_modules() if not _is_kedges(type(module).__module__)]
    buffers = ((path, module.named_buffers(path, recurse=False)) for path, module in modules if not module.training)
    named = sorted(chain(model.named_parameters(), *(some for _, some in buffers)), key=lambda pair: pair[0])
    learnt = (part for name, tensor in named for part in (f"{name} ", *_of_tensor(tensor)))
    return _digest(chain((_made_of(path, module) for path, module in modules), learnt))


def _made_of(path: str, module: nn.Module) -> str:
    """Name a module's class, and settings such as a stride, which PyTorch's own modules list."""
    names = [name for name in getattr(module, "__constants__", ()) if name in vars(module)]
    settings = (f"{name}={_Telling().text(vars(module)[name])}" for name in names)
    return f"{path} {type(module).__qualname__}({', '.join(settings)}) {'trained' * module.training};"


def listed(keys: Sequence[str]) -> str:
    """Give a digest of keys, with how many there are."""
    return f"{len(keys)} given, {_digest(f'{len(key)} {key}' for key in keys)}"


def _digest(parts: Iterable[str | bytes]) -> str:
    digest = blake2b(digest_size=12)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part)
    return digest.hexdigest()


def _of_tensor(tensor: Tensor) -> tuple[str, bytes]:
    return f"{tensor.dtype} {tuple(tensor.shape)}", _some_bytes(tensor)


def _some_bytes(tensor: Tensor) -> bytes:
    """Give the bytes of some numbers of a tensor, from its beginning to its end."""
    if (
        type(tensor.detach()) is not Tensor
        or tensor.is_meta
        or not tensor.numel()
        or tensor.layout is not torch.strided
    ):
        return b""  # a shard of a distributed tensor, say, which is another one at each rank
    tensor = tensor.detach().resolve_conj().resolve_neg()
    flat = tensor.flatten() if tensor.is_contiguous() else tensor.reshape(-1)
    step = max(1, -(-flat.numel() // _LOOKED_AT))
    own = flat[::step].clone(memory_format=torch.contiguous_format)
    some: bytes = own.cpu().view(torch.uint8).numpy().tobytes()
    return some


def _by_name(made: Any) -> str:
    """Name what cannot be looked into, so that two packages' functions of one name differ."""
    return f"{getattr(made, '__module__', None)} {getattr(made, '__qualname__', type(made).__qualname__)}"


class _Telling:
    """Says what a value is; one that is just being said is not gone into again, or a recursive function had no end.

    Args:
        met: What was met before with what was said of it; the values are kept, so that no two have one `id`.
        depth: In how many values this one is.
    """

    def __init__(self, met: Mapping[Any, tuple[Any, str]] | None = None, depth: int = 0) -> None:
        self._met: dict[Any, tuple[Any, str]] = dict(met or {})
        self._depth = depth

    def text(self, value: Any, named: frozenset[str] = frozenset()) -> str:
        """Say what a value is, for code that uses these names: of an object or a module those attributes count."""
        if isinstance(value, Enum):
            return f"{type(value).__qualname__}.{value.name} {self.text(value.value)}"
        if isinstance(value, _SCALARS):
            return _plain(value)
        known = (id(value), named)
        if known in self._met:
            return self._met[known][1]
        if self._depth == _DEEPEST:
            return _by_name(value)
        self._met[known] = value, "again"
        self._depth += 1
        try:
            said = self._container(value, named) or self._called(value, named)
        finally:
            self._depth -= 1
        said = said if len(said) < _LONG else _digest([said])
        self._met[known] = value, said
        return said

    def _container(self, value: Any, named: frozenset[str]) -> str:
        if isinstance(value, (Tensor, np.ndarray)):
            return self._tensor(value)
        kind = "" if type(value) in (tuple, list, set, frozenset, dict) else f"{type(value).__qualname__} "
        if isinstance(value, (tuple, list, deque)):
            return f"{kind}{len(value)}({', '.join(self.text(one, named) for one in islice(value, _LOOKED_AT))})"
        if isinstance(value, (set, frozenset)):  # each process has another order, so none may know what came before it
            said = sorted(_Telling(self._met, self._depth).text(one) for one in value)
            return f"{kind}{len(value)}{{{', '.join(said[:_LOOKED_AT])}}}"
        if isinstance(value, (dict, MappingProxyType)):
            pairs = (f"{self.text(key)}: {self.text(one, named)}" for key, one in islice(value.items(), _LOOKED_AT))
            return f"{kind}{len(value)}{{{', '.join(pairs)}}}"
        return ""

    def _tensor(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return _digest(_of_tensor(value))
        some = value.reshape(-1)[:: max(1, -(-value.size // _LOOKED_AT))]
        shown = b"" if value.dtype.hasobject else some.tobytes()
        return _digest([f"{value.dtype} {value.shape}", shown])

    def _called(self, value: Any, named: frozenset[str]) -> str:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            made = value.__func__
            used = {made.__name__, *_names(made.__code__)} if isinstance(made, FunctionType) else ()
            return f"{self.text(made)} of {self.text(value.__self__, frozenset(used))}"
        if isinstance(value, nn.Module):
            inner = dynamo.unwrap(value)
            parts = [self._state(one, named | {"forward"}) for one in inner.modules()]
            return f"{' '.join(parts)} {weights(inner)}"
        if isinstance(value, (type, ModuleType)):
            name = str(getattr(value, "__qualname__", value.__name__))
            return self._state(value, named) if named and _is_own(value) else name
        return self._object(value, named)

    def _object(self, value: Any, named: frozenset[str]) -> str:
        if isinstance(value, (partial, partialmethod)):
            return f"partial {self.text([value.func, value.args, value.keywords])}"
        if isinstance(value, (itemgetter, attrgetter, methodcaller)):
            return f"{type(value).__qualname__} {self.text(list(value.__reduce__()))}"
        if isinstance(value, BuiltinMethodType):
            whose = self._container(value.__self__, frozenset())
            return f"{_by_name(value)} of {whose}" if whose else _by_name(value)
        if "__wrapped__" in getattr(value, "__dict__", ()):
            return f"{type(value).__qualname__} {self.text(value.__wrapped__)}"
        if isinstance(_of_class(type(value), "__call__"), (FunctionType, partialmethod)):
            return self._state(value, named | {"__call__"})
        return f"{_by_name(value)} {self._state(value, named)}" if named else _by_name(value)

    def _state(self, value: Any, named: frozenset[str]) -> str:
        """Name an object's class, and the attributes that code which uses these names can come to use."""
        kind = value if isinstance(value, type) else type(value)
        held = {name: one for name, one in getattr(value, "__dict__", {}).items() if name not in _BARE}
        methods = _reached(kind, named)
        codes = [made.__code__ for made in methods.values()]
        used = named.union(*map(_names, codes))
        extra = _SCALARS if {"__call__", "forward"} & methods.keys() else ()
        if methods and not _is_own(kind):  # its own methods are not gone into
            extra = (*extra, Tensor, np.ndarray, FunctionType)
        assigned, grown = _changed(codes)
        said = [f"{name}()={self.text(made)}" for name, made in sorted(methods.items())]
        for name in sorted(used | {name for name, one in held.items() if isinstance(one, extra)}):
            one = held.get(name, _of_class(kind, name))
            one = getattr(value, name, None) if isinstance(one, MemberDescriptorType) else one
            if one is _NOTHING or name in methods or name in assigned or (name in grown and isinstance(one, _GROWING)):
                continue
            said.append(f"{name}={self.text(one, used)}")
        return f"{getattr(value, '__name__', kind.__qualname__)}({', '.join(said)})"

    def _function(self, made: FunctionType) -> str:
        wrapped = getattr(made, "__wrapped__", None)
        if _is_installed(made):
            return f"{_by_name(made)} {self.text(wrapped)}" if wrapped is not None else _by_name(made)
        code = made.__code__
        used, (assigned, grown) = _names(code), _changed([code])
        found = ((name, made.__globals__[name]) for name in _globals(code) if name in made.__globals__)
        defaults = self.text([made.__defaults__, made.__kwdefaults__])
        outside = (
            f" {self.text(one, used)}"
            for name, one in chain(_cells(made), [("", " globals")], found)
            if name not in assigned and not (name in grown and isinstance(one, _GROWING))
        )
        return _digest([self._code(code), defaults, *outside])

    def _code(self, code: CodeType) -> str:
        doc = code.co_flags & _HAS_DOC if _HAS_DOC else not code.co_name.startswith("<") and _begins_with_text(code)
        consts = (None, *code.co_consts[1:]) if doc else code.co_consts
        said = (self._code(one) if isinstance(one, CodeType) else self.text(one) for one in consts)
        numbers = f"{code.co_names} {code.co_argcount} {code.co_flags & ~_HAS_DOC}"
        return _digest([code.co_code, code.co_exceptiontable, numbers, *(f" {one}" for one in said)])


def _plain(value: Any) -> str:
    """Say a number or a text; each rank has another device of the same type, which changes no value."""
    if isinstance(value, torch.device):
        return f"device {value.type}"
    if isinstance(value, str) and (found := _PLACE.fullmatch(value)):
        return f"device {found[1]}"
    return f"{type(value).__name__} {value!r}"


def _is_installed(made: FunctionType) -> bool:
    return bool(_INSTALLED.search(made.__code__.co_filename)) or _is_kedges(made.__module__)


def _is_kedges(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "kedge"


def _is_own(made: type | ModuleType) -> bool:
    """Tell whether a class or module is the user's own, and not one of an installed package's or Python's."""
    name = made.__name__ if isinstance(made, ModuleType) else made.__module__
    file = getattr(made if isinstance(made, ModuleType) else sys.modules.get(name), "__file__", None)
    return name == "__main__" or (file is not None and not _INSTALLED.search(file) and not _is_kedges(name))


def _begins_with_text(code: CodeType) -> bool:
    return bool(code.co_consts) and isinstance(code.co_consts[0], str)


def _cells(made: FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(made.__code__.co_freevars, made.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing is in it yet
            yield name, None


def _inner(code: CodeType) -> Iterator[CodeType]:
    """Give code and that of all functions in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from _inner(one)


def _globals(code: CodeType) -> list[str]:
    """Name what a function looks up in its module, inner functions included, in the order of the code."""
    return list(
        dict.fromkeys(
            one.argval
            for each in _inner(code)
            for one in dis.get_instructions(each)
            if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        )
    )


def _names(code: CodeType) -> frozenset[str]:
    """Give the names of attributes and globals that code uses, inner functions included."""
    return frozenset(chain.from_iterable(one.co_names for one in _inner(code)))


def _changed(codes: Iterable[CodeType]) -> tuple[set[str], set[str]]:
    """Name what code assigns outside of itself, and what it takes a container's changing method of, or an entry to set."""
    assigned, grown = set[str](), set[str]()
    for code in chain.from_iterable(map(_inner, codes)):
        told = list(dis.get_instructions(code))
        for place, one in enumerate(told):
            if one.opname in ("STORE_GLOBAL", "STORE_ATTR") or (
                one.opname == "STORE_DEREF" and one.argval in code.co_freevars
            ):
                assigned.add(one.argval)
            elif one.argval in _GROWS and one.opname in ("LOAD_METHOD", "LOAD_ATTR") and place:
                grown.add(str(told[place - 1].argval))
            elif one.opname == "STORE_SUBSCR":
                grown.add(str(_subscripted(told, place).argval))
    return assigned, grown


def _subscripted(told: Sequence[dis.Instruction], place: int) -> dis.Instruction:
    """Give the instruction before those that put the subscript on the stack, which is the last of the container's."""
    high = 0
    while high < 1 and place > 1:
        place -= 1
        one = told[place]
        high += dis.stack_effect(one.opcode, one.arg, jump=False)
    return told[place - 1]


def _of_class(kind: type, name: str) -> Any:
    return next((one.__dict__[name] for one in kind.__mro__ if name in one.__dict__), _NOTHING)


def _reached(kind: type, named: Iterable[str]) -> dict[str, FunctionType]:
    """Give the functions of a class that code with these names may call, and those that they may call."""
    found: dict[str, FunctionType] = {}
    left = list(named)
    while left:
        name = left.pop()
        made = _of_class(kind, name)
        if isinstance(made, (staticmethod, classmethod)):
            made = made.__func__
        elif isinstance(made, (property, cached_property)):
            made = made.fget if isinstance(made, property) else made.func
        if isinstance(made, FunctionType) and name not in found:
            found[name] = made
            left += () if _is_installed(made) else _names(made.__code__)
    return found
