"""The random numbers that models draw beside those of PyTorch.

# Note [Words of NumPy's generator]
NumPy takes 40 microseconds to tell the state of its generator, which a call of a module that is run
again asks for three times, while as a rule nothing is drawn in between. The generator's memory,
whose address NumPy shows, is read in less than one. The words there are compared with a state that
NumPy told. They are not all of it: ``randn`` draws two numbers, and returns the second one later
without a change of any word. NumPy keeps that one in the object whose methods the functions of
`numpy.random` are, in a place that another object of the class shows: there the bytes change when
its state is set. Without such a place no state is known by its words.
"""

from __future__ import annotations

import ctypes
import pickle
import random
import struct
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np

_TWISTER = "MT19937"
_WORDS = 624
"""The words of a Mersenne twister; the number of those that are used up follows them."""
_DOUBLE = 8
"""The bytes of a number."""


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
            if self._words != told + _left_over(self.state["has_gauss"], self.state["gauss"]):
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
    """Return the memory of NumPy's generator, and the number left over; None if it is no Mersenne twister."""
    generator: Any = None
    if hasattr(np.random, "get_bit_generator"):
        generator = np.random.get_bit_generator()
    if type(generator).__name__ != _TWISTER:
        return None
    drawing = getattr(np.random.get_state, "__self__", None)
    place = _place_of_left_over()
    if place is None or type(drawing) is not np.random.RandomState:
        return None
    words = ctypes.string_at(generator.ctypes.state_address, 4 * (_WORDS + 1))
    has_one, number = place
    kept = ctypes.string_at(id(drawing) + has_one, 1)
    return words + kept + ctypes.string_at(id(drawing) + number, _DOUBLE)


def _left_over(has_one: int, number: float) -> bytes:
    """Return how NumPy keeps the number that is left over, or none."""
    return bytes([has_one]) + struct.pack("d", number)


@cache
def _place_of_left_over() -> tuple[int, int] | None:
    """Return where objects of NumPy keep whether a number is left over, and that number; None if it is not seen."""
    drawing = np.random.RandomState(0)
    number = bytes(range(1, _DOUBLE + 1))  # no byte of it is that of 0.0
    (left_over,) = struct.unpack("d", number)
    name, key, position, *_ = drawing.get_state()
    memory = []
    for state in ((0, 0.0), (1, left_over)):
        drawing.set_state((name, key, position, *state))
        memory.append(ctypes.string_at(id(drawing), np.random.RandomState.__basicsize__))
    without, with_one = memory
    changed = [at for at, byte in enumerate(without) if byte != with_one[at]]
    place = with_one.find(number)
    flags = [at for at in changed if not place <= at < place + _DOUBLE]
    if place < 0 or len(flags) != 1 or len(changed) != 1 + _DOUBLE:
        return None
    if (without[flags[0]], with_one[flags[0]]) != (0, 1):
        return None
    return flags[0], place


def set_random_state(entries: Mapping[str, Any]) -> None:
    """Put Python's and NumPy's generators into the states that `RandomState.entries` gave."""
    version, numbers, gauss = entries["python"]
    random.setstate((version, tuple(numbers), gauss))
    if entries["numpy"] is not None:
        kind, keys, *rest = entries["numpy"]
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
