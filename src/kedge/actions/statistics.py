"""A measured site, and its statistics in one step."""

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
"""A tensor measured in this step, so that it is not measured twice: the tensor, its version, its measurement (on the
host the row), and the number of the site whose output it is, None without one."""


@dataclass
class MeasuredSite:
    """One measured site.

    Attributes:
        site: The site.
        id: Its number, in the order of first firing.
        shape: The shape of the first value.
        dtype: The dtype of the first value, as "float32".
        channels: The number of channels where activity is tracked, else None.
        sources: The numbers of the sites whose outputs were its inputs; None stands for a tensor of no site.
        node: The name of the autograd node that made its first value; None without one.
        is_special: Whether it needs more than statistics and drawn elements, such as channel activity.
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
    """The statistics of one site in one step.

    `sum`, `sumsq`, `min` and `max` are over all elements, NaN or infinite if an element is, NaN also if not
    measured; `nonzero` and `nonfinite` count elements, -1 if not measured. Sums are in float64 on a CPU (see
    Note [How exact]), in float32 elsewhere.
    """

    site: Site
    step: int
    rows: Rows

    def __getattr__(self, name: str) -> float:
        """A column of the recording, or a derived figure: mean, rms, std, absmax, zero."""
        rows: Rows = self.__dict__["rows"]
        if name in STATISTICS and name not in ("min", "max"):
            return float(rows.statistic(name)[0])
        if name in ("sum", "sumsq", "min", "max", "nonzero", "calls", "count"):
            value = getattr(rows, name)[0]
            return float(value) if isinstance(value, np.floating) else int(value)
        raise AttributeError(name)

    def __str__(self) -> str:
        """The statistics in one line."""
        shown = "  ".join(f"{n} {getattr(self, n):.4g}" for n in _COLUMNS)
        return f"{self.site}  step {self.step}  count {self.count}  {shown}  nonfinite {self.nonfinite:g}"

    def _repr_html_(self) -> str:
        """The line as a table for a notebook."""
        return table_of([self])


_COLUMNS = ("mean", "std", "rms", "min", "max", "zero")


def table_of(found: Sequence[Statistics]) -> str:
    """Return the statistics of several sites as a table for a notebook, a row a site."""
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
    """Return one of several rows."""
    one = slice(i, i + 1)
    numbers = {n: getattr(rows, n)[one] for n in Rows.__dataclass_fields__}
    return Rows(**numbers)
