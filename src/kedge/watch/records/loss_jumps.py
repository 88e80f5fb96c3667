"""Jumps of a loss, noticed while its step is there."""

from __future__ import annotations

from collections import deque

from kedge.rules.training.spike import Spike

_RECENT, _HISTORY, _FIRST = Spike.recent, Spike.history, Spike.min_history
_RTOL, _ABOVE = Spike.rtol, Spike.above


class LossJumps:
    """Notices a loss that jumps far above its last ones, as the rule SPIKE does, whose thresholds these are.

    A loss is compared with numbers that are kept up to date; the jumps before it are only looked
    at if it is large, since this runs in every step.
    """

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_RECENT)
        self._jumps: deque[float] = deque(maxlen=_HISTORY)
        self._sum = 0.0

    def add(self, loss: float) -> bool:
        """Add the loss of a step; returns whether it has jumped."""
        known = self._losses
        if len(known) < _RECENT:
            known.append(loss)
            self._sum += loss
            return False
        mean = self._sum / _RECENT
        jump = loss - mean
        is_large = jump >= _RTOL * abs(mean) and len(self._jumps) >= _FIRST - _RECENT
        has_jumped = is_large and jump > _ABOVE * max(self._jumps)
        self._jumps.append(jump)
        self._sum += loss - known[0]
        known.append(loss)
        return has_jumped
