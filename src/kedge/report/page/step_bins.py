"""Many steps as few columns.

# Note [Bins]
A page has at most ``MOST`` columns of steps. Each begins at a measured step; if there are more of
those, several share a column, and light steps share the column of the step before them. Their
extremes and the last one are kept, so that a spike and a NaN of a single step survive. The steps
around findings keep columns of their own, so that each is shown as it was.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from kedge.report.page.columns import packed
from kedge.store.rows import Floats, Ints

MOST = 600
#: The steps around a finding that keep columns of their own: measured steps, and steps of any kind.
AROUND = 6
CLOSE = 2
MOST_AROUND = 240


@dataclass(frozen=True, eq=False)
class Bins:
    """Columns of neighbouring steps; ``starts`` are the indices in ``steps`` at which they begin."""

    steps: Ints
    starts: Ints

    @classmethod
    def of(
        cls,
        steps: Ints,
        wanted: Iterable[int] = (),
        regular: Ints | None = None,
        most: int = MOST,
    ) -> Bins:
        """Return the columns of some steps.

        Args:
            steps: The steps, sorted.
            wanted: Steps around which each step keeps a column of its own, the most important
                first.
            regular: The steps that columns may begin at; all if None or empty.
            most: The most columns.
        """
        places = np.arange(len(steps))
        if regular is not None and len(regular):
            places = np.searchsorted(steps, regular)
        if len(steps) and (not len(places) or places[0] > 0):
            places = np.concatenate([[0], places])
        own = _around(steps, places, wanted)[: most // 2]
        if len(places) + len(own) > most:
            left = most - len(own)
            places = places[np.arange(left) * len(places) // left]
        return cls(steps, np.unique(np.concatenate([places, own])))

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def first(self) -> Ints:
        """The first step of each column."""
        return self.steps[self.starts]

    @cached_property
    def last(self) -> Ints:
        """The last step of each column."""
        if not len(self):
            return self.steps
        return np.asarray(self.steps[np.append(self.starts[1:], len(self.steps)) - 1])

    def packed(self) -> dict[str, str]:
        """Return the first and the last step of each column as tables for the page."""
        return {
            "first": packed(self.first.astype(np.float64), "f8"),
            "last": packed(self.last.astype(np.float64), "f8"),
        }

    @property
    def single(self) -> bool:
        """Whether every column is one step."""
        return len(self.starts) == len(self.steps)

    def column(self, steps: Ints) -> Ints:
        """Return the column of each step: the last that begins before or at it; -1 before all."""
        return np.asarray(np.searchsorted(self.first, steps, side="right") - 1)


def _around(steps: Ints, places: Ints, wanted: Iterable[int]) -> Ints:
    """Return the places of the steps around the wanted ones, and of the first after each run."""
    near: dict[int, None] = {}
    for step in wanted:
        at = int(np.searchsorted(steps, step))
        close = range(max(at - CLOSE, 0), min(at + CLOSE + 2, len(steps)))
        regular = int(np.searchsorted(steps[places], step))
        around = places[max(regular - AROUND, 0) : regular + AROUND + 1].tolist()
        near |= dict.fromkeys([*close, *around])
        if len(near) >= MOST_AROUND:
            break
    return np.sort(np.array(list(near)[:MOST_AROUND], dtype=np.int64))


@dataclass(frozen=True, eq=False)
class Grouping:
    """Values at some steps, to be folded into columns.

    ``columns`` are the columns with values, ``starts`` the indices of the values at which they
    begin.
    """

    columns: Ints
    starts: Ints
    width: int

    @classmethod
    def of(cls, bins: Bins, steps: Ints) -> Grouping:
        """Return the grouping of values at sorted steps, none of them before the first column."""
        places = bins.column(steps)
        starts = np.flatnonzero(np.diff(places, prepend=-2))
        return cls(places[starts], starts, len(bins))

    def fold(self, values: Floats, how: str) -> Floats:
        """Return one value for each column, NaN where there is none.

        Args:
            values: One for each step.
            how: ``most``, ``least``, ``last``, or ``furthest`` from zero.
        """
        folded = np.full(self.width, np.nan)
        if len(self.columns) and len(self.starts) == len(values):
            folded[self.columns] = values
        elif len(self.columns):
            folded[self.columns] = _FOLDS[how](values, self.starts)
        return folded


def _most(values: Floats, starts: Ints) -> Floats:
    return np.asarray(np.fmax.reduceat(values, starts))


def _least(values: Floats, starts: Ints) -> Floats:
    return np.asarray(np.fmin.reduceat(values, starts))


def _last(values: Floats, starts: Ints) -> Floats:
    places = np.where(np.isnan(values), -1, np.arange(len(values)))
    last = np.maximum.reduceat(places, starts)
    return np.where(last < 0, np.nan, values[last])


def _furthest(values: Floats, starts: Ints) -> Floats:
    high = _most(values, starts)
    low = _least(values, starts)
    return np.where(np.abs(high) >= np.abs(low), high, low)


_FOLDS = {"most": _most, "least": _least, "last": _last, "furthest": _furthest}
