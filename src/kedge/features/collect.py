"""The values of every forward pass in a block, for `Features.collect`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from kedge.errors import ExtractError, NotRecorded
from kedge.features.capture import CapturePlan, ForwardCapture, ValueKey, Wanted
from kedge.features.value_names import named_apart
from kedge.flow import Event


class Collected(Mapping[str, list[Any]]):
    """The values of every pass by name, in the order of the passes; it grows with each pass."""

    def __init__(self, wanted: Wanted, why: Callable[[int], str]) -> None:
        self._wanted, self._why = wanted, why
        self._passes: dict[int, dict[ValueKey, Any]] = {}

    def add(self, pass_: int, key: ValueKey, value: Any) -> None:
        """Add a value of a pass."""
        self._passes.setdefault(pass_, {})[key] = value

    def __getitem__(self, name: str) -> list[Any]:
        """Return the values of a name, one per pass.

        Raises:
            NotRecorded: If there are none; the message says why.
        """
        names = self._names()
        found = [values[key] for key, values in self._each() if names[key] == name]
        if found:
            return found
        texts = self._wanted.texts
        number = next(
            (i for i, text in enumerate(texts) if name in (text, self._wanted.rename.get(text))),
            None,
        )
        there = f"the names are {', '.join(self) or 'none yet'}"
        why = (
            there
            if number is None or any(key.number == number for key in names)
            else self._why(number)
        )
        raise NotRecorded(f'nothing was collected under "{name}": {why}')

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(dict.fromkeys(self._names().values()))

    def __len__(self) -> int:
        """Return the number of names."""
        return len(set(self._names().values()))

    def __repr__(self) -> str:
        """Return the names, each with its number of values."""
        return f"Collected({', '.join(f'{name}: {len(self[name])}' for name in self)})"

    def _each(self) -> Iterator[tuple[ValueKey, dict[ValueKey, Any]]]:
        return ((key, values) for values in list(self._passes.values()) for key in list(values))

    def _names(self) -> dict[ValueKey, str]:
        names: dict[ValueKey, str] = {}
        for number, text in enumerate(self._wanted.texts):
            keys = list(dict.fromkeys(key for key, _ in self._each() if key.number == number))
            names |= {keys[0]: text} if len(keys) == 1 else named_apart(keys)
        rename = self._wanted.rename
        return {key: rename.get(name, name) for key, name in names.items()}


class Collector(ForwardCapture):
    """The capture of every pass; each value is a copy, because the next pass may use the same memory."""

    def __init__(self, wanted: Wanted, collected: Collected) -> None:
        super().__init__(wanted, CapturePlan({}, frozenset(), stops=False))
        self.collected = collected

    def copies(self, key: ValueKey) -> bool:
        """Return True: every value is copied."""
        return True

    def take(self, key: ValueKey, value: Tensor, event: Event) -> None:
        """Store a value of the current pass."""
        self.collected.add(event.pass_, key, self.keep(key, value).as_taken)

    def replica(self, thread: Any) -> Any:
        """Raise ExtractError: passes of replicas are not those of the model."""
        raise ExtractError(
            "collect() does not join the features of a model's replicas; compute the features call by call"
        )
