"""The predicted cost of a choice for every saved tensor: the bytes that stay, and the exposed time.

# Note [Exposed time]
On a link that works beside the computation, bytes go out one tensor after another, each from when
it is saved, and come back one after another in the order of their reads, from the end of the
forward pass. The rest of the outgoing queue at the end of the forward pass is exposed, since the
memory is needed then; and so is the longest wait of backward. The prediction is a lower bound:
reading ahead takes memory, which may be missing. Without such a link each move is exposed in full.

# Note [Peaks]
Most bytes are in memory at the end of the forward pass, or in backward, when a call has just been
run again: then there are the bytes that were kept before it in the forward, and all that the call
saves. What was kept after it is freed by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kedge.offload.engine.policy import Choice
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
    """The forecast for choices, one for each candidate of a table, in its order.

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
        self._whole: dict[int, int] = {}  # of each call, by the index of its first candidate
        for members in table.members.values():
            if members:
                self._whole[members[0]] = sum(table.candidates[i].nbytes for i in members)

    def of(self, treatments: Sequence[Treatment]) -> PredictedCost:
        """Return the predicted cost of all choices."""
        sizes = [each.moved for each in treatments]
        computing = sum(each.seconds for each in treatments)
        waits = self.waits(np.array(sizes, dtype=np.float64))
        return PredictedCost(
            kept=sum(each.kept for each in treatments),
            moved=sum(sizes),
            exposed=computing + waits,
        )

    def peak(self, outcome: PredictedCost, treatments: Sequence[Treatment]) -> int:
        """Return the most bytes in memory: those that stay, and those on their way; see Note [Peaks]."""
        most = outcome.kept
        if self._whole:
            before = 0
            for i, treatment in enumerate(treatments):
                before += treatment.kept
                if treatment.choice is Choice.RECOMPUTE and i in self._whole:
                    most = max(most, before + self._whole[i])
        if self._link is None:
            return most
        return most + min(self._link.window, outcome.moved)

    def waits(self, moved: NDArray[np.float64]) -> float:
        """Return the seconds for which a step waits for the link; see Note [Exposed time].

        Args:
            moved: The bytes of each candidate that go over the link.
        """
        link = self._link
        total = float(moved.sum())
        if link is None or not total:
            return 0.0
        if not link.overlaps:
            return total / link.write + total / link.read

        # Candidates that do not move need no exclusion: they are never later than those that do.
        out = np.cumsum(moved) / link.write
        done = float((self._saved - out + moved / link.write).max()) + float(out[-1])
        back = self._turn + np.cumsum(moved[self._order]) / link.read
        return max(done - self._turn, 0.0) + max(float((back - self._due).max()), 0.0)
