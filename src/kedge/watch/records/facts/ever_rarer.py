"""When models and optimizers are compared: in the first steps, then ever more rarely."""

from __future__ import annotations


class EverRarer:
    """Counts steps. This begins again when an optimizer is new."""

    def __init__(self) -> None:
        self._steps = self._optimizers = 0

    def is_due(self, optimizers: int) -> bool:
        """Count a step, after which there are so many optimizers; returns whether to compare now."""
        if optimizers != self._optimizers:
            self._optimizers = optimizers
            self._steps = 0
        self._steps += 1
        return self._steps < 4 or self._steps & (self._steps - 1) == 0
