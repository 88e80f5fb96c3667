"""The random numbers that models draw beside those of PyTorch."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np


class RandomState:
    """The states of Python's and NumPy's generators; those of PyTorch are in `kedge.torch_internals.accelerators`."""

    __slots__ = ("_numpy", "_python")

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy: Any = np.random.get_state()  # noqa: NPY002 - models draw from it, not Kedge

    def entries(self) -> dict[str, Any]:
        """Return the states as JSON can have them, in the order of `random.setstate` and of NumPy's."""
        version, numbers, gauss = self._python
        kind, keys, *rest = self._numpy
        return {"python": [version, list(numbers), gauss], "numpy": [kind, keys.tolist(), *rest]}

    def restore(self, now: RandomState) -> None:
        """Set them back, given the present ones: only if they differ, as that takes long."""
        if now._python != self._python:
            random.setstate(self._python)
        (_, one, *rest), (_, other, *others) = now._numpy, self._numpy
        if rest != others or one.tobytes() != other.tobytes():
            np.random.set_state(self._numpy)  # noqa: NPY002


def set_random_state(entries: Mapping[str, Any]) -> None:
    """Put Python's and NumPy's generators into the states that `RandomState.entries` gave."""
    version, numbers, gauss = entries["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, *rest = entries["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
