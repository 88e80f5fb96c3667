"""Plain attributes of modules that change from step to step: counters, temperatures, schedules of their own.

# Note [Attributes that move]
A forward pass may read a number that the module keeps as a plain attribute, and change it, as one
that lowers its temperature with every call does. A step that is to run again needs its value from
before. Hardly any of the attributes of a model change, so it is learned in measured steps which of
them do, by comparing all with those of the last measured step, and only those are read in others.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from kedge.torch_internals.module_tables import modules_in

_PLAIN = (bool, int, float, str)
Values = dict[str, dict[str, dict[str, Any]]]
"""Values of attributes by model, path of the module, and name."""


class MovingAttributes:
    """Learns which plain attributes change, and reads those."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str], dict[str, Any]] = {}
        self._moving: dict[tuple[str, str], tuple[weakref.ref[nn.Module], set[str]]] = {}

    @property
    def have_moved(self) -> bool:
        """Whether some have changed."""
        return bool(self._moving)

    def learn(self, models: Iterable[tuple[str, nn.Module]]) -> None:
        """Compare the attributes of all modules with those of the last time."""
        for model, root in models:
            for path, module in modules_in(root).items():
                now = _plain_attributes(module)
                last = self._last.get((model, path), now)
                moved = {name for name, value in now.items() if last.get(name, value) != value}
                self._last[model, path] = now
                if moved:
                    known = self._moving.setdefault((model, path), (weakref.ref(module), set()))
                    known[1].update(moved)

    def values(self) -> Values:
        """Return the values of those that have changed before."""
        found: Values = {}
        for (model, path), (reference, names) in self._moving.items():
            module = reference()
            if module is not None:
                own = {name: vars(module)[name] for name in names if name in vars(module)}
                found.setdefault(model, {})[path] = own
        return found


def put_attributes_back(model: nn.Module, values: Mapping[str, Mapping[str, Any]]) -> None:
    """Give the modules of a model the values that some attributes had.

    Args:
        model: The model.
        values: The values, by path and name.
    """
    modules = modules_in(model)
    for path in values.keys() & modules.keys():
        for name, value in values[path].items():
            setattr(modules[path], name, value)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in _PLAIN and name != "training" and not name.startswith("_")
    }
