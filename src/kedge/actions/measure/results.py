"""The results of measuring that are kept: the statistics of each site in the last steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge import notebook
from kedge.actions.measure import reduce
from kedge.actions.measure.site_table import MeasuredSite
from kedge.sites.site import Site
from kedge.store.reading.table import tabulate
from kedge.store.rows import STATISTICS, Rows

_READ = ("site", "count", *reduce.STATISTICS, "sampled", "saturated", "exponents")
"""The columns that are read again."""


class KeptSteps:
    """A sink that keeps the last steps; see `kedge.flow.Sink`.

    Attributes:
        keep: How many steps to keep; None for all.
        steps: The columns of each kept step.
    """

    def __init__(self, keep: int | None) -> None:
        self.keep = keep
        self.steps: dict[int, list[Mapping[str, Any]]] = {}

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Keep the statistics of one step."""
        self.steps.setdefault(step, []).append({"step": step, **columns})
        while self.keep is not None and len(self.steps) > self.keep:
            del self.steps[next(iter(self.steps))]

    def statistics(self, seat: MeasuredSite) -> list[Statistics]:
        """Return the statistics of a site, one a step."""
        parts = [part for parts in self.steps.values() for part in parts]
        found = ((part, i) for part in parts for i in np.flatnonzero(part["site"] == seat.id))
        rows = tabulate({"step": part["step"], **{n: part[n][i] for n in _READ}} for part, i in found).rows(seat.id)
        return [Statistics(seat.site, int(step), nth(rows, i)) for i, step in enumerate(rows.step)]


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


def nth(rows: Rows, i: int) -> Rows:
    """Return one of several rows."""
    one = slice(i, i + 1)
    numbers = {n: getattr(rows, n)[one] for n in Rows.__dataclass_fields__}
    return Rows(**numbers)
