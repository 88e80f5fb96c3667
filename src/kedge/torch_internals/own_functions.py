"""Custom functions: the `torch.autograd.Function` whose forward a frame runs.

# Note [The forward of a Function]
Since 2.14 `Function.apply` is built in and leaves no frame between a Function's forward and its
caller. So Kedge recognises the frame itself by its code: `Function` lists every class that inherits
from it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

_names: dict[CodeType, str] = {}
_classes: list[weakref.ref[type]] = []


def own_function(code: CodeType) -> str:
    """Return the name of the `torch.autograd.Function` whose forward has this code, if any.

    The forward of a reentrant checkpoint does not count: its backward runs the forward again.
    """
    classes = [weakref.ref(kind) for kind in Function.__subclasses__()]
    if classes != _classes:
        _classes[:] = classes
        _names.clear()
        for kind in _subclasses(Function):
            _names.update(dict.fromkeys(_codes(kind), kind.__name__))
    return _names.get(code, "")


def _subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        if each is not CheckpointFunction:
            yield each
            yield from _subclasses(each)


def _codes(kind: type) -> Iterator[CodeType]:
    """Yield the code of a class's forward, and of each function that it decorates."""
    forward: Any = getattr(vars(kind).get("forward"), "__func__", None)
    while hasattr(forward, "__code__"):
        yield forward.__code__
        forward = getattr(forward, "__wrapped__", None)
