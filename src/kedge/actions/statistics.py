"""What is known of a measured site, and its statistics as they are read."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from kedge import notebook
from kedge.actions.table import Measured
from kedge.sites.site import Site
from kedge.store.rows import STATISTICS, Rows

Seen: TypeAlias = tuple[weakref.ref[Tensor], int, Measured | int, int | None]
"""A tensor that was measured in this step, so that nothing is measured twice: the tensor, its version, where its
numbers are (on the host a row), and the number of the site whose output it is."""


@dataclass
class MeasuredSite:
    """What is known of one measured site.

    Attributes:
        site: The site.
        id: Its number, in the order of first firing.
        shape: Shape of the first value.
        dtype: Its dtype, as "float32".
        channels: Number of channels, where activity is tracked.
        sources: Numbers of the sites whose outputs it was given; None for a tensor no site made.
        node: The autograd node that made its first value.
        is_special: More is taken of its values than their statistics and elements drawn from them.
    """

    site: Site
    id: int
    shape: tuple[int, ...]
    dtype: str
    channels: int | None
    sources: tuple[int | None, ...]
    node: str | None
    is_special: bool = False


@dataclass(frozen=True)
class Statistics:
    """What was measured of one site in one step.

    `sum`, `sumsq`, `min` and `max` are of all elements, NaN or infinite if an element is, NaN also if not
    measured; `nonzero` and `nonfinite` count elements, -1 if not measured. Sums are of float64 on a CPU (see
    Note [How exact]), of float32 elsewhere.
    """

    site: Site
    step: int
    rows: Rows

    def __getattr__(self, name: str) -> float:
        """Any column of the recording, and what is derived: mean, rms, std, absmax, zero."""
        rows: Rows = self.__dict__["rows"]
        if name in STATISTICS and name not in ("min", "max"):
            return float(rows.statistic(name)[0])
        if name in ("sum", "sumsq", "min", "max", "nonzero", "calls", "count"):
            value = getattr(rows, name)[0]
            return float(value) if isinstance(value, np.floating) else int(value)
        raise AttributeError(name)

    def __str__(self) -> str:
        """One line."""
        shown = "  ".join(f"{n} {getattr(self, n):.4g}" for n in _COLUMNS)
        return f"{self.site}  step {self.step}  count {self.count}  {shown}  nonfinite {self.nonfinite:g}"

    def _repr_html_(self) -> str:
        """The line as a table for a notebook."""
        return table_of([self])


_COLUMNS = ("mean", "std", "rms", "min", "max", "zero")


def table_of(found: Sequence[Statistics]) -> str:
    """Lay statistics of several sites out for a notebook, a row a site."""
    rows = [
        (s.site, s.step, f"{s.count:,}", *(f"{getattr(s, name):.4g}" for name in _COLUMNS), f"{s.nonfinite:g}")
        for s in found
    ]
    columns = ("site", "step", "count", *_COLUMNS, "not finite")
    return notebook.table(
        columns, rows, align="m" + "r" * (len(columns) - 1), note="" if rows else "nothing is measured yet"
    )


def course(site: Site, rows: Rows) -> list[Statistics]:
    """Return the statistics of a site, one a step."""
    return [Statistics(site, int(step), nth(rows, i)) for i, step in enumerate(rows.step)]


def nth(rows: Rows, i: int) -> Rows:
    """Return one of several rows alone."""
    one = slice(i, i + 1)
    numbers = {n: getattr(rows, n)[one] for n in Rows.__dataclass_fields__}
    return Rows(**numbers)
