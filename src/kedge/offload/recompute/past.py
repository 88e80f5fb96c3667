"""Values as they were when a call began: containers and objects with their content, which is put back in place.

# Note [Graphs of before]
A graph holds its recomputed calls, and these hold what they noted. So notes hold no graph: a tensor
of this call's graph would keep that graph alive for good, and one of the last call's graph all
graphs of before, as each holds the one before it. Of a tensor with a graph an alias without it is
held, which stands for the tensor if that is gone. Containers and objects, which may hold tensors,
are not held either: a container is the one that is found in its place later, or a new one of the
same content; an object that is gone is made anew.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

_CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict, Counter)
_OPAQUE = (
    Tensor,
    nn.Module,
    torch.Generator,
    type,
    ModuleType,
    FunctionType,
    MethodType,
    BuiltinFunctionType,
    tuple,
    list,
    dict,
    set,
    deque,
)
"""What is no object with attributes of its own, or has its content noted elsewhere."""
_LARGEST = 4096
"""The entries of the largest container whose content is noted."""
_DEEPEST = 5
"""How deep containers and objects inside others are noted."""
_MOST = 1 << 14
"""How many are noted for one call."""
EVERY_DEPTH = _DEEPEST
OUTERMOST = 1


class PastValue(Protocol):
    """What stands for a value."""

    def put_back(self, present: Any) -> Any:
        """Return the value with its former content, given what is in its place now."""


class PastTensor:
    """A tensor with a graph; see Note [Graphs of before].

    Attributes:
        alias: The same values without the graph.
    """

    __slots__ = ("_there", "alias")

    def __init__(self, value: Tensor) -> None:
        self.alias = value.detach().requires_grad_()
        self._there = TensorWeakRef(value)

    def put_back(self, present: Any) -> Any:  # noqa: ARG002
        """Return the tensor itself if it still exists, else one of the same values."""
        value: Tensor | None = self._there()
        if value is None:
            return self.alias
        return value


class _PastTuple:
    """A tuple that holds something that is noted."""

    __slots__ = ("_items",)

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def put_back(self, present: Any) -> Any:
        """Return a tuple of the former items."""
        if type(present) is not tuple or len(present) != len(self._items):
            present = [None] * len(self._items)
        return tuple(map(put_back, self._items, present))


class _PastContainer:
    """A list, dict or set, with its entries."""

    __slots__ = ("_container", "_content")

    def __init__(self, container: Any, note: Callable[[Any], Any], *, held: bool) -> None:
        self._container = container if held else None
        self._content = container.copy()
        if isinstance(container, dict):
            for key, value in container.items():
                self._content[key] = note(value)
        elif not isinstance(container, set):
            for i, value in enumerate(container):
                self._content[i] = note(value)

    def put_back(self, present: Any) -> Any:
        """Return the container, with its former entries."""
        container = self._container
        content = self._content
        if container is None:
            container = present if type(present) is type(content) else content.copy()

        if isinstance(container, set):
            if container != content:
                container.clear()
                container.update(content)
        elif isinstance(container, dict):
            entries = {key: put_back(held, container.get(key)) for key, held in content.items()}
            if not are_same(container, entries):
                container.clear()
                container.update(entries)
        else:
            there = [*container, *[None] * len(content)]
            items = [put_back(held, there[i]) for i, held in enumerate(content)]
            if len(container) != len(items) or not all(map(operator.is_, container, items)):
                container.clear()
                container.extend(items)
        return container


class PastObject:
    """An object, with its attributes.

    Attributes:
        there: Returns the object itself; None if it is gone.
    """

    __slots__ = ("_attributes", "_kind", "there")

    def __init__(self, value: Any, note: Callable[[Any], Any], *, held: bool) -> None:
        self._kind: Any = type(value)
        self.there: Callable[[], Any] = lambda: value
        if not held and hasattr(value, "__weakref__"):
            self.there = weakref.ref(value)
        self._attributes = {name: note(own) for name, own in vars(value).items()}

    def put_back(self, present: Any) -> Any:  # noqa: ARG002
        """Return the object, with its former attributes."""
        value = self.there()
        if value is None:
            value = self._kind.__new__(self._kind)
        own = vars(value)
        entries = {name: put_back(held, own.get(name)) for name, held in self._attributes.items()}
        if not are_same(own, entries):
            own.clear()
            own.update(entries)
        return value


class PastNotes:
    """Notes values; each container and object among them once.

    Args:
        objects: How deep the attributes of objects are noted, too: `OUTERMOST` or `EVERY_DEPTH`.
        held: Whether containers and objects are held, to be put back themselves; see Note [Graphs
            of before].
    """

    def __init__(self, *, objects: int, held: bool) -> None:
        self._objects = objects
        self._held = held
        self._known: dict[int, Any] = {}

    def note(self, value: Any, depth: int = 0) -> Any:
        """Return what stands for a value, for `put_back`; the value itself if that is enough.

        Args:
            value: The value.
            depth: How many containers and objects are around it.
        """
        if isinstance(value, Tensor):
            if value.grad_fn is None:
                return value
            return PastTensor(value)
        if id(value) in self._known:
            return self._known[id(value)]
        if depth >= _DEEPEST or len(self._known) >= _MOST:
            return value

        def inside(held: Any) -> Any:
            return self.note(held, depth + 1)

        if type(value) is tuple:
            items = [inside(held) for held in value]
            if all(map(operator.is_, items, value)):
                return value
            return _PastTuple(items)
        is_container = type(value) in _CONTAINERS and len(value) <= _LARGEST
        if not is_container and (depth >= self._objects or not _has_attributes(value)):
            return value

        self._known[id(value)] = value  # inside itself it is held as it is
        noted: PastValue
        if is_container:
            noted = _PastContainer(value, inside, held=self._held)
        else:
            noted = PastObject(value, inside, held=self._held)
        self._known[id(value)] = noted
        return noted


_NOTED = (PastTensor, _PastTuple, _PastContainer, PastObject)


def put_back(noted: Any, present: Any) -> Any:
    """Return a noted value, with its former content.

    Args:
        noted: As `PastNotes.note` returned it.
        present: What is in its place now.
    """
    if isinstance(noted, _NOTED):
        return noted.put_back(present)
    return noted


def are_same(one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
    """Whether two tables have the same objects under the same keys, in the same order."""
    if list(one) != list(other):
        return False
    return all(map(operator.is_, one.values(), other.values()))


def _has_attributes(value: Any) -> bool:
    if isinstance(value, _OPAQUE):
        return False
    try:
        own = vars(value)
    except Exception:  # noqa: BLE001 - it has none, or its class has a property of that name, which fails
        return False
    return type(own) is dict
