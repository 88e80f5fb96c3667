"""The random numbers of a program, kept and put back, so that it draws the same batch again."""

from __future__ import annotations

import random
import sys
from typing import Any

from kedge.torch_internals.accelerators import generator_states, set_generator_states


class RandomNumbers:
    """The state of the generators of Python, NumPy and PyTorch when this was made."""

    def __init__(self) -> None:
        self._torch = generator_states()
        self._python = random.getstate()
        self._numpy: Any = None
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            self._numpy = numpy.get_state()

    def restore(self) -> None:
        """Let all of them go on from there."""
        set_generator_states(self._torch)
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)
