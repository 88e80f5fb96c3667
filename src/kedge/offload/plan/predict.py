"""What a choice for every saved tensor comes to: the bytes that stay, and the time that shows.

# Note [What hides]
On a link that works beside the computation, bytes go out one after the other from when each is saved, and come back one
after the other in the order in which they are asked for, from when the forward pass is over. What the queue out has left
when the forward pass ends shows, since the memory is needed then; and so does what backward waits for at the worst moment.
It is a floor: reading ahead takes memory, and what is not there cannot be read into. Without such a link each move shows
in full.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kedge.offload.plan.tables import StepTable, Treatment


class PredictedCost(NamedTuple):
    """The predicted cost of choices.

    Attributes:
        kept: The bytes that stay in memory for the step.
        moved: The bytes that go over the link, each way.
        exposed: The seconds by which the step is longer, at least.
    """

    kept: int
    moved: int
    exposed: float


class Forecast:
    """Predicts the cost of choices; one for each candidate of a table, in its order.

    Args:
        table: The step.
    """

    def __init__(self, table: StepTable) -> None:
        self._link = table.link
        self._saved = np.array([each.saved for each in table.candidates])
        self._asked = np.array([each.asked for each in table.candidates])
        self._turn = float(self._saved.max(initial=0.0))
        self._order = np.argsort(self._asked, kind="stable")
        self._due = np.maximum(self._asked[self._order], self._turn)

    def of(self, ways: Sequence[Treatment]) -> PredictedCost:
        """Predict the cost of all choices."""
        moved = np.array([way.moved for way in ways], dtype=np.float64)
        seconds = sum(way.seconds for way in ways) + self.waits(moved)
        return PredictedCost(sum(way.kept for way in ways), sum(way.moved for way in ways), seconds)

    def peak(self, outcome: PredictedCost) -> int:
        """The most bytes in memory: what stays, and what is on its way."""
        return outcome.kept + (min(self._link.window, outcome.moved) if self._link is not None else 0)

    def waits(self, moved: NDArray[np.float64]) -> float:
        """Predict the seconds for which a step waits for the link; see Note [What hides].

        Args:
            moved: The bytes of each candidate that go over the link.
        """
        link, total = self._link, float(moved.sum())
        if link is None or not total:
            return 0.0
        if not link.overlaps:
            return total / link.write + total / link.read
        # Of those that do not move, none is later than one that does, so they need not be left out.
        out = np.cumsum(moved) / link.write
        done = float((self._saved - out + moved / link.write).max()) + float(out[-1])
        back = self._turn + np.cumsum(moved[self._order]) / link.read
        return max(done - self._turn, 0.0) + max(float((back - self._due).max()), 0.0)
