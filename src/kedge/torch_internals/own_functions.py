"""Custom functions: the `torch.autograd.Function` whose forward a frame runs.

# Note [The forward of a Function]
Since 2.14 `Function.apply` is built in and leaves no frame between a Function's forward and its caller. So Kedge
recognises the frame itself by its code: `Function` lists every class that inherits from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

_names: dict[CodeType, str] = {}
_counted = 0


def own_function(code: CodeType) -> str:
    """Return the name of the `torch.autograd.Function` whose forward has this code; empty if there is none.

    The forward of a reentrant checkpoint does not count: its backward runs the forward again.
    """
    global _counted  # noqa: PLW0603 - classes are defined for the process
    classes = len(Function.__subclasses__())
    if classes != _counted:
        _counted = classes
        _names.clear()
        _names.update((each, kind.__name__) for kind in _subclasses(Function) for each in _codes(kind))
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
    while (code := getattr(forward, "__code__", None)) is not None:
        yield code
        forward = getattr(forward, "__wrapped__", None)
