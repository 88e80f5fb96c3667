"""The inputs of a call, taken apart into its tensors and the rest, and put together again.

The tensors are given to a checkpoint, which saves each of them once, also those in lists and dicts,
so that they can be moved and are not held by the rest. A list that the call changes is a new one in
each run. Objects, such as the cache of a transformer's keys and values, get the attributes again
that they had when the call began, and are put back after the second run. One tensor in several
places is one tensor again; see Note [One tensor in several places] in
`kedge.hooks.saved.shared_inputs`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Parameter

from kedge.hooks.saved.shared_inputs import SharedInput
from kedge.offload.recompute import past


class _Place(NamedTuple):
    """The place of a tensor in a call's inputs: its number among them."""

    number: int


class CallInputs:
    """The inputs of one call.

    Args:
        args: The arguments by position.
        kwargs: Those by name.

    Attributes:
        tensors: The tensors, each once; taken out by `take`.
        names: The name of each: its position or keyword.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[str] = []
        self._known: dict[int, int] = {}
        self._others: list[past.PastObject] = []
        self._notes_of_objects = past.PastNotes(objects=past.EVERY_DEPTH, held=False)
        self._args = tuple(self._apart(arg, str(i)) for i, arg in enumerate(args))
        self._kwargs = {name: self._apart(arg, name) for name, arg in kwargs.items()}
        del self._known, self._notes_of_objects
        self._origins = [SharedInput(tensor) for tensor in self.tensors]
        self._written: str | None = None
        self._notes: dict[int, dict[str, Any]] = {}
        for number, tensor in enumerate(self.tensors):
            if type(tensor) in (Tensor, Parameter) and vars(tensor):
                self._notes[number] = dict(vars(tensor))

    def take(self) -> list[Tensor]:
        """Return the tensors, which this object then no longer holds."""
        taken = self.tensors
        self.tensors = []
        return taken

    def end(self) -> None:
        """Note which inputs the call has written to, at its end."""
        self._written = self._changed()

    def changed(self) -> str | None:
        """Return the name of an input that was written to; None if it is not known which."""
        name = self._written or self._changed()
        if name is None and len(self.names) == 1:
            return self.names[0]
        return name

    def _changed(self) -> str | None:
        for name, origin in zip(self.names, self._origins, strict=True):
            if origin() is not None and origin.unchanged() is None:
                return name
        return None

    @contextmanager
    def put_together(
        self, tensors: Sequence[Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Context of the second run, which returns the arguments by position and by name.

        Args:
            tensors: The tensors, and perhaps more of them.
        """
        now = []
        for number, (shared, tensor) in enumerate(zip(self._origins, tensors, strict=False)):
            origin = shared.unchanged()
            if origin is None:
                vars(tensor).update(self._notes.get(number, {}))
                now.append(tensor)
            else:
                now.append(origin)
        present = past.PastNotes(objects=past.EVERY_DEPTH, held=True)
        objects = [present.note(noted.there()) for noted in self._others]
        args = tuple(_together(arg, now) for arg in self._args)
        kwargs = {name: _together(arg, now) for name, arg in self._kwargs.items()}
        try:
            yield args, kwargs
        finally:
            for noted in objects:
                past.put_back(noted, None)

    def _apart(self, value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            number = self._known.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
                self.names.append(name)
            return _Place(number)
        if type(value) in (dict, OrderedDict):
            return type(value)(
                (key, self._apart(held, f"{name}.{key}")) for key, held in value.items()
            )
        if type(value) in (list, tuple):
            return type(value)(self._apart(held, f"{name}.{i}") for i, held in enumerate(value))
        noted = self._notes_of_objects.note(value)
        if isinstance(noted, past.PastObject):
            self._others.append(noted)
        return noted


def _together(value: Any, tensors: Sequence[Any]) -> Any:
    if type(value) is _Place:
        return tensors[value.number]
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _together(held, tensors)) for key, held in value.items())
    if type(value) in (list, tuple):
        return type(value)(_together(held, tensors) for held in value)
    return past.put_back(value, None)
