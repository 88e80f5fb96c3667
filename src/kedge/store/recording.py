"""A recording as it is read: the values seen at each site in each step.

Reading needs numpy alone, and a :class:`Recording` is a value: it never changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from kedge.calls.arguments import called_as, described
from kedge.calls.missing_attributes import MissingAttributes
from kedge.errors import NoSuchRank, WrongCall
from kedge.files.given_path import given_path
from kedge.notebook import paragraph
from kedge.short_text import counted
from kedge.store.events import (
    EndEvent,
    LedgerEvent,
    LedgerLine,
    LoggedEvent,
    ModuleTimesEvent,
    RunEvent,
    SavedEvent,
    StoppedEvent,
    event_from,
)
from kedge.store.exponents import decode_all, encode
from kedge.store.logged import LoggedSeries, logged_in
from kedge.store.reading.json_files import FORMAT, SITE_SHAPE, read_manifest, read_ranks
from kedge.store.reading.rank_reader import RankReader
from kedge.store.reading.ranks import RankedTable, RankShare, assemble, of_rank
from kedge.store.reading.table import SitesInOne, StatsTable, tabulate
from kedge.store.rows import FULL, QUANTILES, STATISTICS, Bools, Floats, Ints, Rows
from kedge.store.sites import Root, SiteInfo, SitesByText, root_from, site_from
from kedge.store.timed_modules import TimedModules, timed_in

__all__ = ["FORMAT", "STATISTICS", "Recording", "Root", "Rows", "SiteInfo"]

Entry = Mapping[str, Any]
AnyEvent = TypeVar("AnyEvent", bound=RunEvent)


@dataclass(frozen=True)
class Display:
    """What shows a recording to people: in a terminal, and in a notebook."""

    text: Callable[[Recording], str]
    html: Callable[[Recording], str]


@called_as('kedge.Recording.open("run.kedge")')
@dataclass(frozen=True, eq=False)
class Recording(MissingAttributes):
    """A recorded run, read from disk.

    The ranks of a run are read together; see Note [Ranks]. Events of ranks other than the lowest
    have a ``rank``.

    Attributes:
        path: The folder.
        manifest: The properties of the run, as JSON values.
        roots: The models that the run called.
        sites: The recorded sites.
        events: The events of the run, such as its end; see `kedge.store.events`.
        truncated: Whether an incomplete last batch or event was left out.
        table: The statistics of every site and step.
        display: What shows a recording with its verdict; the rules are needed for that, so
            `kedge.report` sets it.
    """

    _instead_of = dict.fromkeys(("loss", "losses"), 'recording.series("loss", "mean") has it') | {
        "check": "kedge.rules.check(recording) returns the findings",
        "diff": "it is a command of the terminal: kedge diff A B",
        "findings": "kedge.rules.check(recording) returns them",
        "gradients": 'recording.series("layer4:out.grad", "rms") has one of a site',
        "mean": 'recording.series("layer4:out", "mean") has it of a site',
        "plot": "kedge report RUN --html in a terminal draws a recording",
        "report": "it is a command of the terminal: kedge report RUN",
        "stats": 'recording.series("layer4:out", "rms") has one of a site',
        "to_pandas": "kedge export RUN --parquet in a terminal writes a table",
    }

    path: Path
    manifest: Entry
    roots: tuple[Root, ...]
    sites: tuple[SiteInfo, ...]
    events: tuple[RunEvent, ...]
    truncated: bool
    table: StatsTable | RankedTable
    display: ClassVar[Display | None] = None

    def __repr__(self) -> str:
        """What ran, the verdict, the first findings, and what to call next."""
        if self.display is not None:
            return self.display.text(self)
        known = counted(len(self.sites), "site")
        return f"<{_name(self.path)}: {known}, {counted(len(self.steps), 'measured step')}>"

    def _repr_html_(self) -> str:
        """The same for a notebook, with a table of the findings."""
        if self.display is not None:
            return self.display.html(self)
        return paragraph(repr(self))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Recording:
        """Open the recording of a run that has ended or is still going on.

        Args:
            path: The folder.

        Raises:
            NotARecording: If the path is not a recording, or one of its files is damaged.
            NewerFormat: If a newer Kedge wrote it.
        """
        if not isinstance(path, (str, os.PathLike)):
            raise WrongCall(
                f"Recording.open({described(path)}): give the folder, "
                'as in kedge.Recording.open("run.kedge")'
            )
        folder = given_path(path)
        manifest = read_manifest(folder)
        readers = [RankReader(folder, rank) for rank in read_ranks(folder) or (0,)]
        for reader in readers:
            reader.read()
        truncated = any(reader.torn for reader in readers)
        return recording_of(folder, manifest, [reader.share() for reader in readers], truncated)

    @classmethod
    def build(
        cls,
        sites: Iterable[SiteInfo | Entry | str] = (),
        rows: Iterable[Entry] = (),
        manifest: Entry | None = None,
        events: Iterable[RunEvent | Entry] = (),
        roots: Iterable[Root | Entry] = (),
    ) -> Recording:
        """Return a recording in memory, for tests and rules.

        Args:
            sites: Sites, entries as in ``sites.json`` (only ``site`` is required; ``id`` is the
                position), or site texts.
            rows: Rows by column name; ``site`` may be an id or a site's text, ``active`` packed
                bytes or one bool per channel, ``exponents`` bytes or the 83 counts. A column left
                out was not measured. Rows of several ranks have a ``rank``, by default 0.
            manifest: The content of ``manifest.json``.
            events: Events, or lines as in ``events.jsonl``.
            roots: Roots, or entries as in ``sites.json``.
        """
        known = tuple(_built_site(i, site) for i, site in enumerate(sites))
        ids = {site.site: site.id for site in known}
        return cls(
            path=Path(),
            manifest=dict(manifest or {}),
            roots=tuple(map(_built_root, roots)),
            sites=known,
            events=tuple(map(_built_event, events)),
            truncated=False,
            table=_built_table([_built_row(row, ids) for row in rows], known),
        )

    @property
    def steps(self) -> Ints:
        """Every step with full statistics, sorted."""
        return self.table.full_steps

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks with rows in this recording, the lowest first."""
        if isinstance(self.table, RankedTable):
            return tuple(part.rank for part in self.table.parts)
        return (int(self.manifest.get("rank", 0)),)

    def of_rank(self, rank: int) -> Recording:
        """Return the recording of one rank, with the same sites, so that ranks can be compared.

        Raises:
            NoSuchRank: The recording has nothing of this rank.
        """
        if rank not in self.ranks:
            raise NoSuchRank(
                f"{_name(self.path)} has no data of rank {rank}: it has {_ranks_named(self.ranks)}"
            )
        if not isinstance(self.table, RankedTable):
            return self
        part = next(part for part in self.table.parts if part.rank == rank)
        events = tuple(event for event in self.events if self.rank_of(event) == rank)
        sites = of_rank(self.sites, part)
        return replace(self, sites=sites, events=events, table=RankedTable((part,)))

    def of(self, kind: type[AnyEvent]) -> tuple[AnyEvent, ...]:
        """Return the events of one kind, of all ranks, in the order in which each wrote them.

        Args:
            kind: Their class, such as `kedge.store.events.ModesEvent`.
        """
        return tuple(event for event in self.events if isinstance(event, kind))

    def rank_of(self, event: RunEvent) -> int:
        """Return the rank that wrote an event."""
        if event.rank is None:
            return self.ranks[0]
        return event.rank

    @property
    def end(self) -> EndEvent | None:
        """The end of the lowest rank; None while the program runs and after a kill."""
        for end in reversed(self.of(EndEvent)):
            if self.rank_of(end) == self.ranks[0]:
                return end
        return None

    @property
    def stopped(self) -> StoppedEvent | None:
        """The event of a failure to write, after which the program went on unrecorded, if any."""
        return next(iter(self.of(StoppedEvent)), None)

    @property
    def saved(self) -> SavedEvent | None:
        """The newest event about saved tensors, a full account if there is one."""
        found = self.of(SavedEvent)
        full = [event for event in found if event.total is not None]
        own = [event for event in full if self.rank_of(event) == self.ranks[0]]
        chosen = own or full or found
        if not chosen:
            return None
        return chosen[-1]

    @property
    def ledger(self) -> tuple[LedgerLine, ...]:
        """The entries of the ledger: sites with the number of their firings, or the reason for none.

        In a run of several ranks, the sites that fired on none of them.
        """
        entries = list(chain.from_iterable(event.sites for event in self.of(LedgerEvent)))
        if not isinstance(self.table, RankedTable):
            return tuple(entries)
        silent: dict[str, LedgerLine] = {}
        for entry in entries:
            site = self._by_text.get(entry.site)
            if site is None or not len(self.rows(site)):
                silent.setdefault(entry.site, entry)
        return tuple(silent.values())

    @cached_property
    def logged(self) -> dict[str, LoggedSeries]:
        """What the program logged with `kedge.log`, by name: steps and values, of the lowest rank."""
        events = self.of(LoggedEvent)
        return logged_in(event for event in events if self.rank_of(event) == self.ranks[0])

    @cached_property
    def timed_modules(self) -> TimedModules | None:
        """The times of modules, of the lowest rank; None unless the run was to time them."""
        events = self.of(ModuleTimesEvent)
        return timed_in([event for event in events if self.rank_of(event) == self.ranks[0]])

    def site(self, text: str) -> SiteInfo:
        """Return a site by its text; ``layer4`` is ``layer4:out``.

        Raises:
            NoSuchSite: The recording has no such site.
        """
        return self._by_text.find(text)

    def of_kind(self, kind: str) -> tuple[SiteInfo, ...]:
        """Return the sites of one kind in data-flow order."""
        return self._by_kind.get(kind, ())

    def rows(self, site: SiteInfo | str) -> Rows:
        """Return all rows of a site, one per step, including light steps."""
        if isinstance(site, str):
            site = self.site(site)
        if site.id not in self._rows:
            self._rows[site.id] = self.all_rows.of(site.id)
        return self._rows[site.id]

    @cached_property
    def all_rows(self) -> SitesInOne:
        """The rows of all sites in the order of their numbers; see Note [One table]."""
        return self.table.all(self._numbers)

    @cached_property
    def _numbers(self) -> int:
        """The number after the highest of a site, which is more than the sites if some were chosen."""
        return max((site.id for site in self.sites), default=-1) + 1

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What was derived from this recording, by the function that derives it."""
        return {}

    @called_as('recording.series("layer4:out", "mean")')
    def series(self, site: SiteInfo | str, statistic: str) -> Floats:
        """Return one statistic of a site for each of ``steps``, NaN where the site has none.

        Args:
            site: A site of this recording, or its text.
            statistic: One of ``STATISTICS``.
        """
        if isinstance(site, str):
            site = self.site(site)
        rows = self.rows(site)
        full = rows.level == FULL
        if statistic in QUANTILES:  # the histograms of all sites would take too much memory
            known = rows.statistic(statistic)
        else:
            known = self.all_rows.part(self.statistic(statistic), site.id)
        if len(rows) == len(self.steps) and full.all():
            return known
        values = np.full(len(self.steps), np.nan)
        values[np.searchsorted(self.steps, rows.step[full])] = known[full]
        return values

    def matrix(self, sites: Sequence[SiteInfo | None], statistic: str) -> Floats:
        """Return one statistic of many sites, as `series` does of one.

        It has a line for each site, NaN where there is none.
        """
        table = np.full((len(sites), len(self.steps)), np.nan)
        if not table.size:
            return table
        # The line of each site by its number; of one that stands here twice it is the last.
        line = np.full(self._numbers, -1)
        for place, site in enumerate(sites):
            if site is not None:
                line[site.id] = place
        every = self.all_rows
        full = np.flatnonzero((every.rows.level == FULL) & (line[every.site] >= 0))
        column = np.searchsorted(self.steps, every.rows.step[full])
        table[line[every.site[full]], column] = self.statistic(statistic)[full]
        for place, site in enumerate(sites):
            if site is not None and line[site.id] != place:
                table[place] = table[line[site.id]]
        return table

    def statistic(self, name: str) -> Floats:
        """Return one statistic of every row of every site."""
        if name not in self._statistics:
            self._statistics[name] = self.all_rows.rows.statistic(name)
        return self._statistics[name]

    @cached_property
    def _statistics(self) -> dict[str, Floats]:
        return {}

    def active(self, site: SiteInfo | str) -> tuple[Ints, Ints, Bools]:
        """Return which channels of a site were above zero, for each step that tracked it.

        Returns:
            The steps, the number of values that each channel had in each of them, and a bool for
            every step and channel.
        """
        if isinstance(site, str):
            site = self.site(site)
        rows = self.rows(site)
        held = rows.held("active")
        channels = site.channels or 0
        width = (channels + 7) // 8
        tracked = np.zeros(0, dtype=np.int64)
        if width:
            tracked = np.flatnonzero(held.lengths == width)
        bits = np.unpackbits(held.chosen(tracked).matrix(width), axis=1, count=channels)
        return rows.step[tracked], rows.count[tracked] // max(channels, 1), bits.astype(bool)

    def exponents(
        self,
        site: SiteInfo | str,
        steps: Ints | None = None,
    ) -> tuple[Ints, Ints]:
        """Return the histograms of magnitudes of a site, for each step that drew elements.

        Args:
            site: A site of this recording, or its text.
            steps: The steps to return; all if None.

        Returns:
            The steps, and the counts, shape ``(steps, 83)``; see Note [Exponents] and
            `kedge.store.exponents.edges`.
        """
        rows = self.rows(site)
        held = rows.held("exponents")
        drawn = held.lengths > 0
        if steps is not None:
            drawn &= np.isin(rows.step, steps)
        return rows.step[drawn], decode_all(held.chosen(drawn))

    @cached_property
    def _by_text(self) -> SitesByText:
        return SitesByText(self.sites, _name(self.path))

    @cached_property
    def _by_kind(self) -> dict[str, tuple[SiteInfo, ...]]:
        kinds: dict[str, list[SiteInfo]] = {}
        for site in self.sites:
            kinds.setdefault(site.kind, []).append(site)
        return {kind: tuple(sites) for kind, sites in kinds.items()}

    @cached_property
    def _rows(self) -> dict[int, Rows]:
        return {}


def recording_of(
    folder: Path, manifest: Entry, shares: Sequence[RankShare], truncated: bool
) -> Recording:
    """Return the recording of several ranks, the lowest first."""
    table: StatsTable | RankedTable
    events = list(shares[0].events)
    if len(shares) == 1:
        roots = shares[0].roots
        sites = shares[0].sites
        table = shares[0].table
    else:
        roots, sites, table = assemble(shares)
        for share in shares[1:]:
            events += [replace(event, rank=share.rank) for event in share.events]
    return Recording(folder, manifest, roots, sites, tuple(events), truncated, table)


def _name(path: Path) -> str:
    return path.name or "this recording"


def _ranks_named(ranks: tuple[int, ...]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _built_table(
    rows: list[dict[str, Any]], sites: tuple[SiteInfo, ...]
) -> StatsTable | RankedTable:
    by_rank: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_rank.setdefault(row.get("rank", 0), []).append(row)
    if len(by_rank) < 2:
        return tabulate(rows)
    shares = []
    for rank, held in by_rank.items():
        shares.append(RankShare(rank, (), sites, (), tabulate(held)))
    _, _, table = assemble(shares)
    return table


def _built_root(root: Root | Entry) -> Root:
    if isinstance(root, Root):
        return root
    return root_from(root)


def _built_event(event: RunEvent | Entry) -> RunEvent:
    if isinstance(event, RunEvent):
        return event
    return event_from(event)


def _built_site(position: int, site: SiteInfo | Entry | str) -> SiteInfo:
    if isinstance(site, SiteInfo):
        return site
    if isinstance(site, str):
        site = {"site": site}
    return site_from(SITE_SHAPE({"id": position, **site}))


def _built_row(row: Entry, ids: Mapping[str, int]) -> dict[str, Any]:
    site = row["site"]
    if isinstance(site, str):
        site = ids[site]
    active = row.get("active", b"")
    if not isinstance(active, bytes):
        active = np.packbits(np.asarray(active, dtype=bool)).tobytes()
    exponents = row.get("exponents", b"")
    if not isinstance(exponents, bytes):
        exponents = encode(np.asarray(exponents))
    return {**row, "site": site, "active": active, "exponents": exponents}
