"""A recording as it is read: the values seen at each site in each step.

Reading needs numpy alone, and a :class:`Recording` is a value: it never changes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kedge.calls.arguments import called_as, described
from kedge.errors import NoSuchRank, WrongCall
from kedge.files.given_path import given_path
from kedge.store.events import (
    EndEvent,
    LedgerEvent,
    LedgerLine,
    RunEvent,
    SavedEvent,
    StoppedEvent,
    event_from,
)
from kedge.store.exponents import decode_all, encode
from kedge.store.reading import shapes
from kedge.store.reading.json_files import FORMAT, read_manifest, read_ranks
from kedge.store.reading.rank_reader import RankReader
from kedge.store.reading.ranks import RankedTable, RankShare, assemble, of_rank
from kedge.store.reading.table import SitesInOne, StatsTable, tabulate
from kedge.store.rows import FULL, QUANTILES, STATISTICS, Bools, Floats, Ints, Rows
from kedge.store.sites import Root, SiteInfo, SitesByText, root_from, site_from

__all__ = ["FORMAT", "STATISTICS", "Recording", "Root", "Rows", "SiteInfo"]

Entry = Mapping[str, Any]
AnyEvent = TypeVar("AnyEvent", bound=RunEvent)


@called_as('kedge.Recording.open("run.kedge")')
@dataclass(frozen=True, eq=False)
class Recording:
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
    """

    path: Path
    manifest: Entry = field(repr=False)
    roots: tuple[Root, ...]
    sites: tuple[SiteInfo, ...] = field(repr=False)
    events: tuple[RunEvent, ...] = field(repr=False)
    truncated: bool
    table: StatsTable | RankedTable = field(repr=False)

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
                f'Recording.open({described(path)}): give the folder, as in kedge.Recording.open("run.kedge")'
            )
        folder = given_path(path)
        manifest = read_manifest(folder)
        readers = [RankReader(folder, rank) for rank in read_ranks(folder) or (0,)]
        for reader in readers:
            reader.read()
        return recording_of(
            folder, manifest, [reader.share() for reader in readers], any(r.torn for r in readers)
        )

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
            roots=tuple(root if isinstance(root, Root) else root_from(root) for root in roots),
            sites=known,
            events=tuple(e if isinstance(e, RunEvent) else event_from(e) for e in events),
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
        return self.ranks[0] if event.rank is None else event.rank

    @property
    def end(self) -> EndEvent | None:
        """The end of the lowest rank; None while the program runs and after a kill."""
        ends = [end for end in self.of(EndEvent) if self.rank_of(end) == self.ranks[0]]
        return ends[-1] if ends else None

    @property
    def stopped(self) -> StoppedEvent | None:
        """The event of a failure to write, after which the program went on unrecorded; None without one."""
        return next(iter(self.of(StoppedEvent)), None)

    @property
    def saved(self) -> SavedEvent | None:
        """The newest event about saved tensors; a full account has precedence over totals of modules."""
        found = self.of(SavedEvent)
        full = [event for event in found if event.total is not None]
        own = [event for event in full if self.rank_of(event) == self.ranks[0]]
        chosen = own or full or found
        return chosen[-1] if chosen else None

    @property
    def ledger(self) -> tuple[LedgerLine, ...]:
        """The entries of the ledger: sites with the number of their firings, or the reason for none.

        In a run of several ranks, the sites that fired on none of them.
        """
        entries = [entry for event in self.of(LedgerEvent) for entry in event.sites]
        if not isinstance(self.table, RankedTable):
            return tuple(entries)
        known = ((entry, self._by_text.get(entry.site)) for entry in entries)
        silent = [entry for entry, site in known if site is None or not len(self.rows(site))]
        return tuple({entry.site: entry for entry in (*silent, *reversed(silent))}.values())

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
        found = self.site(site) if isinstance(site, str) else site
        if found.id not in self._rows:
            self._rows[found.id] = self.all_rows.of(found.id)
        return self._rows[found.id]

    @cached_property
    def all_rows(self) -> SitesInOne:
        """The rows of all sites, one after the other in the order of their numbers; see Note [One table]."""
        return self.table.all(self._numbers)

    @cached_property
    def _numbers(self) -> int:
        """The number after the highest of a site: more than there are sites if some of them were chosen."""
        return max((site.id for site in self.sites), default=-1) + 1

    @cached_property
    def derived(self) -> dict[Any, Any]:
        """What was derived from this recording and is asked for again, by the function that derives it."""
        return {}

    def series(self, site: SiteInfo | str, statistic: str) -> Floats:
        """Return one statistic of a site for each of ``steps``, NaN where the site has none.

        Args:
            site: A site of this recording, or its text.
            statistic: One of ``STATISTICS``.
        """
        rows = self.rows(site)
        full = rows.level == FULL
        if statistic in QUANTILES:  # the histograms of all sites would take too much memory
            known = rows.statistic(statistic)
        else:
            found = self.site(site) if isinstance(site, str) else site
            known = self.all_rows.part(self.statistic(statistic), found.id)
        if len(rows) == len(self.steps) and full.all():
            return known
        values = np.full(len(self.steps), np.nan)
        values[np.searchsorted(self.steps, rows.step[full])] = known[full]
        return values

    def matrix(self, sites: Sequence[SiteInfo | None], statistic: str) -> Floats:
        """Return one statistic of many sites, as `series` does of one: a row a site, NaN where there is none."""
        numbers = np.array([-1 if site is None else site.id for site in sites], dtype=np.int64)
        table = np.full((len(sites), len(self.steps)), np.nan)
        if not table.size:
            return table
        every = self.statistic(statistic)
        line = np.full(self._numbers + 1, -1)
        line[numbers] = np.arange(len(sites))
        line[-1] = -1
        full = np.flatnonzero((self.all_rows.rows.level == FULL) & (line[self.all_rows.site] >= 0))
        column = np.searchsorted(self.steps, self.all_rows.rows.step[full])
        table[line[self.all_rows.site[full]], column] = every[full]
        again = line[numbers] != np.arange(len(sites))  # a site that stands here twice
        table[again & (numbers >= 0)] = table[line[numbers[again & (numbers >= 0)]]]
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
        rows, channels = (
            self.rows(site),
            (self.site(site) if isinstance(site, str) else site).channels or 0,
        )
        width, held = (channels + 7) // 8, rows.held("active")
        tracked = np.flatnonzero(held.lengths == width) if width else np.zeros(0, dtype=np.int64)
        bits = np.unpackbits(held.chosen(tracked).matrix(width), axis=1, count=channels)
        return rows.step[tracked], rows.count[tracked] // max(channels, 1), bits.astype(bool)

    def exponents(self, site: SiteInfo | str, steps: Ints | None = None) -> tuple[Ints, Ints]:
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
    if len(shares) == 1:
        only = shares[0]
        return Recording(
            folder, manifest, only.roots, only.sites, only.events, truncated, only.table
        )
    roots, sites, table = assemble(shares)
    events = tuple(
        event for place, share in enumerate(shares) for event in _signed(share, others=place > 0)
    )
    return Recording(folder, manifest, roots, sites, events, truncated, table)


def _name(path: Path) -> str:
    return path.name or "this recording"


def _signed(share: RankShare, *, others: bool) -> Iterable[RunEvent]:
    """Return the events of a rank, each with its ``rank`` if others come before it."""
    if not others:
        return share.events
    return [replace(event, rank=share.rank) for event in share.events]


def _ranks_named(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _built_table(
    rows: list[dict[str, Any]], sites: tuple[SiteInfo, ...]
) -> StatsTable | RankedTable:
    ranks = sorted({row.get("rank", 0) for row in rows})
    if len(ranks) < 2:
        return tabulate(rows)
    own = [[row for row in rows if row.get("rank", 0) == rank] for rank in ranks]
    return assemble(
        [
            RankShare(rank, (), sites, (), tabulate(held))
            for rank, held in zip(ranks, own, strict=True)
        ]
    )[2]


def _built_site(position: int, site: SiteInfo | Entry | str) -> SiteInfo:
    if isinstance(site, SiteInfo):
        return site
    entry = {"site": site} if isinstance(site, str) else site
    return site_from(shapes.SITE({"id": position, **entry}))


def _built_row(row: Entry, ids: Mapping[str, int]) -> dict[str, Any]:
    site, active, counts = row["site"], row.get("active", b""), row.get("exponents", b"")
    bits = (
        active
        if isinstance(active, bytes)
        else np.packbits(np.asarray(active, dtype=bool)).tobytes()
    )
    histogram = counts if isinstance(counts, bytes) else encode(np.asarray(counts))
    return {
        **row,
        "site": ids[site] if isinstance(site, str) else site,
        "active": bits,
        "exponents": histogram,
    }
