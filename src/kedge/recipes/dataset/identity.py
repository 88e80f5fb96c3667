"""What a user's function or model is, as text: the same in every process, and another one when it was changed.

# Note [What a digest takes in]
Of a function of Python's own: its bytecode, constants and names, those of functions inside it, its defaults, and what
it refers to outside of itself, as far as that is plain: numbers, text, tensors, models, containers of these, and more
functions. Its place in the file and its docstring are no part of it, nor is any address in memory. Functions of
installed packages go by their names, as those in C have to; of an object that can be called the class counts, and the
attributes that are numbers or text. What else a function refers to counts by its type alone.

Bytecode is one version of Python's, so that version stands before the digest, and digests of two are not compared.
"""

from __future__ import annotations

import dis
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from hashlib import blake2b
from itertools import chain, islice
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_DIGESTED = re.compile(r"(.*) code (\d+\.\d+):(\w+)", re.DOTALL)
_SCALARS = (bool, int, float, complex, str, bytes, type(None), Enum, np.generic, torch.dtype, torch.device)
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
    """Give a digest of what a model has learnt.

    A few thousand numbers of each parameter and buffer stand for all: any training changes nearly every one. Buffers
    are left out while the model is in training mode, in which some change with every batch.
    """
    buffers = () if model.training else model.named_buffers()
    named = sorted(chain(model.named_parameters(), buffers), key=lambda pair: pair[0])
    return _digest(part for name, tensor in named for part in (f"{name} ", *_of_tensor(tensor)))


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
    flat = tensor.detach().flatten() if tensor.is_contiguous() else tensor.detach().reshape(-1)
    step = max(1, -(-flat.numel() // _LOOKED_AT))
    some: bytes = flat[::step].contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return some


def _by_name(made: Any) -> str:
    """Name what cannot be looked into, so that two packages' functions of one name differ."""
    return f"{getattr(made, '__module__', None)} {getattr(made, '__qualname__', type(made).__qualname__)}"


class _Telling:
    """Says what a value is; what was met before is not gone into again, or a recursive function would have no end.

    Args:
        met: What was met before, by `id`; the values are kept, so that no two have one number.
        depth: In how many values this one is.
    """

    def __init__(self, met: Mapping[int, Any] | None = None, depth: int = 0) -> None:
        self._met, self._depth = dict(met or {}), depth

    def text(self, value: Any) -> str:
        """Say what a value is."""
        if isinstance(value, _SCALARS):
            return f"{type(value).__name__} {value!r}"
        if isinstance(value, (type, ModuleType)):
            return str(getattr(value, "__qualname__", value.__name__))
        if id(value) in self._met:
            return "again"
        if self._depth == _DEEPEST:
            return _by_name(value)
        self._met[id(value)] = value
        self._depth += 1
        try:
            said = self._container(value) or self._called(value)
            return said if len(said) < _LONG else _digest([said])
        finally:
            self._depth -= 1

    def _container(self, value: Any) -> str:
        if isinstance(value, (Tensor, np.ndarray)):
            return self._tensor(value)
        if type(value) in (tuple, list):
            return f"{len(value)}({', '.join(map(self.text, value[:_LOOKED_AT]))})"
        if type(value) in (set, frozenset):  # each process has another order, so none may know what came before it
            said = sorted(_Telling(self._met, self._depth).text(one) for one in value)
            return f"{len(value)}{{{', '.join(said[:_LOOKED_AT])}}}"
        if type(value) is dict:
            pairs = (f"{self.text(key)}: {self.text(one)}" for key, one in islice(value.items(), _LOOKED_AT))
            return f"{len(value)}{{{', '.join(pairs)}}}"
        return ""

    def _tensor(self, value: Any) -> str:
        if isinstance(value, Tensor):
            return _digest(_of_tensor(value))
        some = value.reshape(-1)[:: max(1, -(-value.size // _LOOKED_AT))]
        shown = b"" if value.dtype.hasobject else some.tobytes()
        return _digest([f"{value.dtype} {value.shape}", shown])

    def _called(self, value: Any) -> str:
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return f"{self.text(value.__func__)} of {self._state(value.__self__)}"
        if isinstance(value, nn.Module):
            return f"{self._state(value)} {weights(value)}"
        return self._object(value)

    def _object(self, value: Any) -> str:
        if isinstance(value, partial):
            return f"partial {self.text([value.func, value.args, value.keywords])}"
        if "__wrapped__" in getattr(value, "__dict__", ()):
            return f"{type(value).__qualname__} {self.text(value.__wrapped__)}"
        call = next((kind.__dict__["__call__"] for kind in type(value).__mro__ if "__call__" in kind.__dict__), None)
        return f"{self._state(value)} {self.text(call)}" if isinstance(call, FunctionType) else _by_name(value)

    def _state(self, value: Any) -> str:
        """Name the class of an object with its plain attributes; containers may change while a run is under way."""
        held = getattr(value, "__dict__", {})
        plain = (f"{name}={self.text(one)}" for name, one in held.items() if isinstance(one, _SCALARS))
        return f"{type(value).__qualname__}({', '.join(plain)})"

    def _function(self, made: FunctionType) -> str:
        wrapped = getattr(made, "__wrapped__", None)
        if _INSTALLED.search(made.__code__.co_filename) or (made.__module__ or "").partition(".")[0] == "kedge":
            return f"{_by_name(made)} {self.text(wrapped)}" if wrapped is not None else _by_name(made)
        defaults = self.text([made.__defaults__, made.__kwdefaults__])
        cells = (f" {self.text(value)}" for value in _cells(made))
        found = (
            f" {name} {self.text(made.__globals__[name])}"
            for name in _globals(made.__code__)
            if name in made.__globals__
        )
        return _digest([self._code(made.__code__, made.__doc__), defaults, " cells ", *cells, " globals ", *found])

    def _code(self, code: CodeType, doc: str | None = None) -> str:
        first = code.co_consts[:1] if doc is None or code.co_consts[:1] != (doc,) else (None,)
        consts = (
            self._code(one) if isinstance(one, CodeType) else self.text(one) for one in (*first, *code.co_consts[1:])
        )
        numbers = f"{code.co_names} {code.co_argcount} {code.co_flags}"
        return _digest([code.co_code, code.co_exceptiontable, numbers, *(f" {one}" for one in consts)])


def _cells(made: FunctionType) -> Iterator[Any]:
    for cell in made.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing is in it yet
            yield None


def _globals(code: CodeType) -> list[str]:
    """Name what a function looks up in its module, inner functions included, in the order of the code."""
    inner = (one for one in code.co_consts if isinstance(one, CodeType))
    own = (one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return list(dict.fromkeys([*own, *chain.from_iterable(map(_globals, inner))]))
