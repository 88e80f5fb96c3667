"""The random numbers of a program, kept and put back, so that it draws the same batch again."""

from __future__ import annotations

from kedge.torch_internals.accelerators import generator_states, set_generator_states
from kedge.torch_internals.random_state import RandomState


class RandomNumbers:
    """The state of the generators of Python, NumPy and PyTorch when this was made."""

    def __init__(self) -> None:
        self._torch = generator_states()
        self._beside = RandomState()

    def restore(self) -> None:
        """Let all of them go on from there."""
        set_generator_states(self._torch)
        self._beside.restore(RandomState())
