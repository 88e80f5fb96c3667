"""The random numbers that models draw beside those of PyTorch.

# Note [Words of NumPy's generator]
NumPy takes 40 microseconds to tell the state of its generator, which a call of a module that is run
again asks for three times, while as a rule nothing is drawn in between. The generator's memory,
whose address NumPy shows, is read in less than one. The words there are compared with a state that
NumPy told, and the same words later are the same state, if no number was left over: ``randn`` draws
two, and returns the second one later without a change of any word. Only a program that sets the
generator back itself can then draw other numbers from it and come to the same words, with one left
over; so a state is known within one forward, or from a forward to its second run, and no longer.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

_TWISTER = "MT19937"
_WORDS = 624
"""The words of a Mersenne twister; the number of those that are used up follows them."""


class RandomState:
    """The states of Python's and NumPy's generators; those of PyTorch are in `kedge.torch_internals.accelerators`.

    Args:
        known: A state that NumPy's generator may still have; it is then not asked again.
    """

    __slots__ = ("_numpy", "_python")

    def __init__(self, known: RandomState | None = None) -> None:
        self._python = random.getstate()
        self._numpy: _NumpyState
        if known is not None and known._numpy.is_in_force():
            self._numpy = known._numpy
        else:
            self._numpy = _NumpyState()

    def entries(self) -> dict[str, Any]:
        """Return the states as JSON can have them, in the order of `random.setstate` and of NumPy's.

        NumPy's is None if the program has given it a generator of another kind.
        """
        version, numbers, gauss = self._python
        return {"python": [version, list(numbers), gauss], "numpy": self._numpy.entries()}

    def restore(self, now: RandomState) -> None:
        """Set them back, given the present ones: only if they differ, as that takes long."""
        if now._python != self._python:
            random.setstate(self._python)
        if now._numpy is not self._numpy:
            self._numpy.restore(now._numpy)


class _NumpyState:
    """The state of NumPy's generator; see Note [Words of NumPy's generator].

    Attributes:
        state: The state as NumPy tells it.
    """

    __slots__ = ("_words", "state")

    def __init__(self) -> None:
        # With `legacy` it would warn of a generator of another kind.
        self.state: dict[str, Any] = np.random.get_state(legacy=False)  # noqa: NPY002 - models draw from it, not Kedge
        self._words = _words()
        if self._words is not None:
            twister = self.state["state"]
            told = twister["key"].tobytes() + twister["pos"].to_bytes(4, sys.byteorder)
            if self.state["has_gauss"] or self._words != told:
                self._words = None

    def is_in_force(self) -> bool:
        """Whether the generator is known to be in this state."""
        return self._words is not None and self._words == _words()

    def entries(self) -> list[Any] | None:
        """Return the state of a Mersenne twister as JSON can have it."""
        kind = self.state["bit_generator"]
        if kind != _TWISTER:
            return None
        twister = self.state["state"]
        left_over = self.state["has_gauss"], self.state["gauss"]
        return [kind, twister["key"].tolist(), twister["pos"], *left_over]

    def restore(self, now: _NumpyState) -> None:
        """Set it back, given the present one: only if they differ."""
        if pickle.dumps(now.state) != pickle.dumps(self.state):
            np.random.set_state(self.state)  # noqa: NPY002


def _words() -> bytes | None:
    """Return the memory of NumPy's generator; None if it is no Mersenne twister."""
    generator: Any = None
    if hasattr(np.random, "get_bit_generator"):
        generator = np.random.get_bit_generator()
    if type(generator).__name__ != _TWISTER:
        return None
    return ctypes.string_at(generator.ctypes.state_address, 4 * (_WORDS + 1))


def set_random_state(entries: Mapping[str, Any]) -> None:
    """Put Python's and NumPy's generators into the states that `RandomState.entries` gave."""
    version, numbers, gauss = entries["python"]
    random.setstate((version, tuple(numbers), gauss))
    if entries["numpy"] is not None:
        kind, keys, *rest = entries["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
