"""The results of measuring that are kept: the statistics of each site in the last steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from kedge.actions.measure import reduce
from kedge.actions.measure.site_table import MeasuredSite, SiteTable
from kedge.errors import NotRecorded, SeveralRecorded
from kedge.notebook import Table
from kedge.sites.language import single
from kedge.sites.names import names_at, site_named
from kedge.sites.site import Site
from kedge.store.columns import BINARY
from kedge.store.reading.table import StatsTable, tabulate
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
        self._newest: NewestRows | None = None  # until the next step

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Keep the statistics of one step."""
        self.steps.setdefault(step, []).append(columns)
        while self.keep is not None and len(self.steps) > self.keep:
            del self.steps[next(iter(self.steps))]
        self._newest = None

    def statistics(self, seat: MeasuredSite) -> list[Statistics]:
        """Return the statistics of a site, one a step."""
        found = []
        for step, parts in self.steps.items():
            for part in parts:
                places = np.flatnonzero(part["site"] == seat.id).tolist()
                found += [KeptRow(step, part, place) for place in places]
        rows = _tabulated(found).all(seat.id + 1).of(seat.id)
        return _each([seat.site] * len(rows), rows)

    def newest(self, seats: Collection[MeasuredSite]) -> list[Statistics]:
        """Return the statistics of the sites that have any, each in its newest step."""
        found = self._newest_rows().find({seat.id for seat in seats})
        there = [seat for seat in seats if seat.id in found]
        if not there:
            return []
        table = _tabulated(chain.from_iterable(found.values())).all(max(found) + 1)
        rows = _joined([table.of(seat.id) for seat in there])
        return _each([seat.site for seat in there], rows)

    def present(self, seats: Collection[MeasuredSite]) -> list[MeasuredSite]:
        """Return those of some sites that have statistics."""
        found = self._newest_rows().find({seat.id for seat in seats})
        return [seat for seat in seats if seat.id in found]

    def _newest_rows(self) -> NewestRows:
        """Return the rows of each site in its newest step, by one object until the next step."""
        if self._newest is None:
            self._newest = NewestRows(sorted(self.steps.items()))
        return self._newest


class KeptRow(NamedTuple):
    """A row of one site.

    Attributes:
        step: Its step.
        columns: The columns that it is in.
        place: Where it is in them.
    """

    step: int
    columns: Mapping[str, Any]
    place: int


class NewestRows:
    """The rows of each site in its newest step; looks through older steps only as far as it must.

    Args:
        steps: The number of each step and its columns, the oldest first.
    """

    def __init__(self, steps: Iterable[tuple[int, list[Mapping[str, Any]]]]) -> None:
        self._unread = list(steps)
        self._places: dict[int, list[KeptRow]] = {}

    def find(self, ids: set[int]) -> dict[int, list[KeptRow]]:
        """Return the rows of those of some sites that have any."""
        while self._unread and not ids <= self._places.keys():
            here: dict[int, list[KeptRow]] = {}
            step, parts = self._unread[-1]
            for part in parts:
                for i, site in enumerate(part["site"].tolist()):
                    here.setdefault(site, []).append(KeptRow(step, part, i))
            self._places = {**here, **self._places}
            self._unread = self._unread[:-1]
        return {site: self._places[site] for site in ids if site in self._places}


def _tabulated(rows: Iterable[KeptRow]) -> StatsTable:
    values = []
    for kept in rows:
        row = {name: kept.columns[name][kept.place] for name in _READ}
        values.append({"step": kept.step, **row})
    return tabulate(values)


def _joined(rows: Sequence[Rows]) -> Rows:
    """Return the rows of several sites as those of one, so that their figures are computed at once."""
    if len(rows) == 1:
        return rows[0]
    columns: dict[str, Any] = {}
    for name in Rows.__dataclass_fields__:
        parts = [getattr(one, name) for one in rows]
        if name in BINARY:
            columns[name] = tuple(chain.from_iterable(parts))
        else:
            columns[name] = np.concatenate(parts)
    return Rows(**columns)


@dataclass(frozen=True)
class Statistics:
    """The statistics of one site in one step, over all elements of all its values in that step.

    Figures that were not measured are NaN, and counts of elements -1. `sum`, `sumsq`, `mean`,
    `std`, `rms`, `min`, `max` and `absmax` are NaN or infinite if an element is. Sums are in
    float64 on a CPU and where the driver or Triton measures on the device (see Note [How exact]),
    in float32 elsewhere. ``pandas.DataFrame(stats.values())`` has a column for each figure.

    Attributes:
        name: The text of the site, such as "layer4:out".
        step: The optimizer's step; without an optimizer the number of the forward pass.
        calls: The number of values.
        count: The number of elements.
        mean: Their mean.
        std: Their standard deviation.
        rms: The root of the mean of their squares.
        min: The smallest.
        max: The largest.
        absmax: The largest magnitude.
        zero: The share that is exactly zero, from 0 to 1.
        nonfinite: The number of NaN and infinite elements.
        nan: The number of NaN elements.
        inf: The number of infinite elements.
        nonzero: The number that is not exactly zero.
        sum: Their sum.
        sumsq: The sum of their squares.
        saturated: The share of the drawn elements at which an activation is flat.
        q05: The 5% quantile of the magnitudes of the drawn elements that are not zero, to within a
            factor of 2.
        q50: Their median, as `q05`.
        q95: Their 95% quantile, as `q05`.
    """

    name: str
    step: int
    calls: int
    count: int
    mean: float
    std: float
    rms: float
    min: float
    max: float
    absmax: float
    zero: float
    nonfinite: float
    nan: float
    inf: float
    nonzero: int
    sum: float
    sumsq: float
    saturated: float
    q05: float
    q50: float
    q95: float

    @property
    def site(self) -> Site:
        """The site."""
        return site_named(self.name)

    def __str__(self) -> str:
        """The statistics in one line."""
        figures = "  ".join(f"{name} {getattr(self, name):.4g}" for name in _COLUMNS)
        head = f"{self.name}  step {self.step}  count {self.count}"
        return f"{head}  {figures}  nonfinite {self.nonfinite:g}"

    def _repr_html_(self) -> str:
        """The line as a table for a notebook."""
        return table_of([self]).html()


_COLUMNS = ("mean", "std", "rms", "min", "max", "zero")


def _each(sites: Sequence[Site], rows: Rows) -> list[Statistics]:
    """Return the statistics of rows, each of its site."""
    given = ("step", "calls", "count", "nonzero", "sum", "sumsq")
    columns = {name: getattr(rows, name).tolist() for name in given}
    for name in STATISTICS:
        if name not in given:
            columns[name] = rows.statistic(name).tolist()
    found = []
    for i, site in enumerate(sites):
        figures = {name: values[i] for name, values in columns.items()}
        found.append(Statistics(name=str(site), **figures))
    return found


def table_of(found: Sequence[Statistics]) -> Table:
    """Return the statistics of several sites as a table, a row a site."""
    rows = []
    for one in found:
        figures = [f"{getattr(one, name):.4g}" for name in _COLUMNS]
        rows.append((one.name, one.step, f"{one.count:,}", *figures, f"{one.nonfinite:g}"))
    note = ""
    if not rows:
        note = "nothing is measured yet"
    columns = ("site", "step", "count", *_COLUMNS, "not finite")
    return Table(columns, rows, "m" + "r" * (len(columns) - 1), note)


class MeasuredValues:
    """The statistics that are kept of the measured sites, read by name.

    Attributes:
        sites: The sites that have fired.
        kept: Their statistics in the last steps.
    """

    sites: SiteTable
    kept: KeptSteps

    def finish(self) -> None:
        """Called before reading: passes on all that was measured."""

    def read(self, name: str, why: Callable[[str], str]) -> Statistics:
        """Return the statistics of a site in its newest step."""
        self.finish()
        found = self.kept.newest(self._named(name))
        if not found:
            raise NotRecorded(f'nothing was measured under "{name}": {why(name)}')
        return found[0]

    def records(self, name: str) -> list[Any]:
        """Return the statistics of a site, one a step."""
        self.finish()
        return list(chain.from_iterable(map(self.kept.statistics, self._named(name))))

    def names(self) -> list[str]:
        """Return the names of the sites, in the order in which they first fired."""
        self.finish()
        return list(self._seats())

    def table(self, names: Collection[str] | None = None) -> Table:
        """Return a table of some sites, or of all, in the newest step of each."""
        self.finish()
        seats = self._seats()
        if names is None:
            names = seats.keys()
        return table_of(self.kept.newest([seats[name] for name in names]))

    def _repr_html_(self) -> str:
        """The table for a notebook."""
        return self.table().html()

    def _seats(self) -> dict[str, MeasuredSite]:
        """Return the sites that have statistics, by name."""
        seats = list(self.sites.seats.values())
        names = names_at(seat.site for seat in seats)
        present = {seat.id for seat in self.kept.present(seats)}
        by_name = zip(names, seats, strict=True)
        return {name: seat for name, seat in by_name if seat.id in present}

    def _named(self, name: str) -> list[MeasuredSite]:
        found = self.sites.named(name)
        # The row of the first tensor has the name without a leaf.
        if len(found) > 1 and single(name).leaf is None:
            found = [seat for seat in found if seat.site.leaf is None] or found
        if len(found) > 1:
            names = ", ".join(f'"{seat.site}"' for seat in found)
            raise SeveralRecorded(
                f'"{name}" matches {len(found)} measured sites; read one of {names}'
            )
        return found
