"""The random numbers of a program, kept and put back, so that it draws the same ones again."""

from __future__ import annotations

from typing import Any

from kedge.torch_internals.accelerators import generator_states, set_generator_states
from kedge.torch_internals.random_state import RandomState


class RandomNumbers:
    """The states of the generators of PyTorch, Python and NumPy when this was made.

    Attributes:
        generators: Those of PyTorch, by the name of the device.
    """

    def __init__(self) -> None:
        self.generators = generator_states()
        self._beside = RandomState()

    def entries(self) -> dict[str, Any]:
        """Return those of Python and NumPy as JSON can have them."""
        return self._beside.entries()

    def restore(self) -> None:
        """Let all of them go on from there."""
        set_generator_states(self.generators)
        self._beside.restore(RandomState())
