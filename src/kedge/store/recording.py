"""A recording, read: what was seen at which site in which step.

The reader needs numpy alone, and a :class:`Recording` is a value: it never changes once read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kedge.errors import NoSuchRank, NoSuchSite
from kedge.store.exponents import decode_all, encode
from kedge.store.json_files import FORMAT, read_manifest, read_ranks
from kedge.store.rank_reader import ShareReader
from kedge.store.ranks import RankedTable, Share, assemble, of_rank
from kedge.store.rows import FULL, STATISTICS, Bools, Floats, Ints, Rows
from kedge.store.sites import Root, SiteInfo, root_from, site_from
from kedge.store.table import Table, tabulate

__all__ = ["FORMAT", "STATISTICS", "Recording", "Root", "Rows", "SiteInfo"]

Entry = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Recording:
    """What one run left behind.

    ``truncated`` says that the last thing being written was incomplete and left out. Of a run of
    several ranks it holds all together; see Note [Ranks]. Events of other ranks than the lowest
    have a key ``rank``.
    """

    path: Path
    manifest: Entry
    roots: tuple[Root, ...]
    sites: tuple[SiteInfo, ...]
    events: tuple[Entry, ...]
    truncated: bool
    table: Table | RankedTable = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Recording:
        """Read a recording, finished or not.

        Raises:
            NotARecording: The path is no recording, or a file of it is damaged.
            NewerFormat: A newer Kedge wrote it.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        readers = [ShareReader(folder, rank) for rank in read_ranks(folder) or (0,)]
        for reader in readers:
            reader.read()
        return cls.of(folder, manifest, [reader.share() for reader in readers], any(r.torn for r in readers))

    @classmethod
    def of(cls, folder: Path, manifest: Entry, shares: Sequence[Share], truncated: bool) -> Recording:
        """Put together what was read of each rank, the lowest first."""
        if len(shares) == 1:
            only = shares[0]
            return cls(folder, manifest, only.roots, only.sites, only.events, truncated, only.table)
        roots, sites, table = assemble(shares)
        events = tuple(event for place, share in enumerate(shares) for event in _signed(share, others=place > 0))
        return cls(folder, manifest, roots, sites, events, truncated, table)

    @classmethod
    def build(
        cls,
        sites: Iterable[SiteInfo | Entry | str] = (),
        rows: Iterable[Entry] = (),
        manifest: Entry | None = None,
        events: Iterable[Entry] = (),
        roots: Iterable[Root | Entry] = (),
    ) -> Recording:
        """Make a recording in memory, as tests and rules need it.

        Args:
            sites: Sites, entries as in ``sites.json`` (only ``site`` must be there; ``id`` is the
                position), or site texts.
            rows: Rows by column name; ``site`` may be an id or a site's text, ``active`` packed
                bytes or one bool per channel, ``exponents`` bytes or the 83 counts. What is left
                out was not measured. Rows of several ranks have a ``rank``, 0 where it is left out.
            manifest: What ``manifest.json`` would hold.
            events: What ``events.jsonl`` would hold.
            roots: Roots, or entries as in ``sites.json``.
        """
        known = tuple(_built_site(i, site) for i, site in enumerate(sites))
        ids = {site.site: site.id for site in known}
        return cls(
            path=Path(),
            manifest=dict(manifest or {}),
            roots=tuple(root if isinstance(root, Root) else root_from(root) for root in roots),
            sites=known,
            events=tuple(dict(event) for event in events),
            truncated=False,
            table=_built_table([_built_row(row, ids) for row in rows], known),
        )

    @property
    def steps(self) -> Ints:
        """Every step with full statistics, sorted."""
        return self.table.full_steps

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks whose rows are here, the lowest first."""
        if isinstance(self.table, RankedTable):
            return tuple(part.rank for part in self.table.parts)
        return (int(self.manifest.get("rank", 0)),)

    def of_rank(self, rank: int) -> Recording:
        """Give what one rank recorded, with the same sites, so that ranks can be compared.

        Raises:
            NoSuchRank: Nothing of this rank is here.
        """
        if rank not in self.ranks:
            raise NoSuchRank(f"{self._name} holds nothing of rank {rank}: it holds {_ranks_named(self.ranks)}")
        if not isinstance(self.table, RankedTable):
            return self
        part = next(part for part in self.table.parts if part.rank == rank)
        events = tuple(event for event in self.events if event.get("rank", self.ranks[0]) == rank)
        sites = of_rank(self.sites, part)
        return replace(self, sites=sites, events=events, table=RankedTable((part,)))

    @property
    def end(self) -> Entry | None:
        """The closing event, of the lowest rank; None while the program runs and after a kill."""
        ends = (event for event in reversed(self.events) if event.get("kind") == "end")
        return next((end for end in ends if end.get("rank", self.ranks[0]) == self.ranks[0]), None)

    @property
    def ledger(self) -> tuple[Entry, ...]:
        """Sites that the ledger has something to say about: how often they fired, or why not.

        Of a run of several ranks these are the sites that fired at none.
        """
        written = (event["sites"] for event in self.events if event.get("kind") == "ledger")
        entries = [entry for entries in written for entry in entries]
        if not isinstance(self.table, RankedTable):
            return tuple(entries)
        silent = [entry for entry in entries if not self._fired(entry)]
        return tuple({entry["site"]: entry for entry in (*silent, *reversed(silent))}.values())

    def site(self, text: str) -> SiteInfo:
        """Look a site up by its text; ``layer4`` is ``layer4:out``.

        Raises:
            NoSuchSite: The recording holds no such site.
        """
        found = self._by_text.get(text) or self._by_text.get(f"{text}:out")
        if found is None:
            raise NoSuchSite(self._unknown(text))
        return found

    def of_kind(self, kind: str) -> tuple[SiteInfo, ...]:
        """List the sites of one kind in data-flow order."""
        return tuple(site for site in self.sites if site.kind == kind)

    def rows(self, site: SiteInfo | str) -> Rows:
        """Give all rows of a site, one per step, those of off-schedule steps included."""
        found = self._same(site)
        if found.id not in self._rows:
            self._rows[found.id] = self.table.rows(found.id)
        return self._rows[found.id]

    def series(self, site: SiteInfo | str, statistic: str) -> Floats:
        """Give the course of one statistic of a site over ``steps``.

        Args:
            site: A site of this recording, or its text.
            statistic: One of ``STATISTICS``.

        Returns:
            One value for each of ``steps``, NaN where the site has none.
        """
        rows = self.rows(site)
        full = rows.level == FULL
        if len(rows) == len(self.steps) and full.all():
            return rows.statistic(statistic)
        course = np.full(len(self.steps), np.nan)
        course[np.searchsorted(self.steps, rows.step[full])] = rows.statistic(statistic)[full]
        return course

    def active(self, site: SiteInfo | str) -> tuple[Ints, Ints, Bools]:
        """Tell which channels of a site were above zero, for each step that tracked it.

        Returns:
            The steps, how many values each channel had in each of them, and a bool for every
            step and channel.
        """
        rows, channels = self.rows(site), self._same(site).channels or 0
        width, held = (channels + 7) // 8, rows.held("active")
        tracked = np.flatnonzero(held.lengths == width) if width else np.zeros(0, dtype=np.int64)
        bits = np.unpackbits(held.chosen(tracked).matrix(width), axis=1, count=channels)
        return rows.step[tracked], rows.count[tracked] // max(channels, 1), bits.astype(bool)

    def exponents(self, site: SiteInfo | str, steps: Ints | None = None) -> tuple[Ints, Ints]:
        """Give how many of the drawn elements had which power of two, for each step that drew some.

        Args:
            site: A site of this recording, or its text.
            steps: Only those of these steps; all if None.

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
    def _by_text(self) -> dict[str, SiteInfo]:
        return {site.site: site for site in self.sites}

    @cached_property
    def _rows(self) -> dict[int, Rows]:
        return {}

    def _same(self, site: SiteInfo | str) -> SiteInfo:
        return self.site(site) if isinstance(site, str) else site

    def _fired(self, entry: Entry) -> bool:
        found = self._by_text.get(entry["site"])
        return found is not None and len(self.rows(found)) > 0

    @property
    def _name(self) -> str:
        return self.path.name or "this recording"

    def _unknown(self, text: str) -> str:
        near = get_close_matches(text, self._by_text, n=3, cutoff=0.4)
        hint = f"the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}" if near else "none is near it"
        count = f"{len(self.sites)} site{'' if len(self.sites) == 1 else 's'}"
        return f"{self._name} has no site {text!r}: it holds {count}, {hint}"


def _signed(share: Share, *, others: bool) -> Iterable[Entry]:
    """Give the events of a rank; those of others than the lowest say whose they are."""
    return ({**event, "rank": share.rank} for event in share.events) if others else share.events


def _ranks_named(ranks: tuple[int, ...]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _built_table(rows: list[dict[str, Any]], sites: tuple[SiteInfo, ...]) -> Table | RankedTable:
    ranks = sorted({row.get("rank", 0) for row in rows})
    if len(ranks) < 2:
        return tabulate(rows)
    own = [[row for row in rows if row.get("rank", 0) == rank] for rank in ranks]
    return assemble([Share(rank, (), sites, (), tabulate(held)) for rank, held in zip(ranks, own, strict=True)])[2]


def _built_site(position: int, site: SiteInfo | Entry | str) -> SiteInfo:
    if isinstance(site, SiteInfo):
        return site
    entry = {"site": site} if isinstance(site, str) else site
    return site_from({"id": position, **entry})


def _built_row(row: Entry, ids: Mapping[str, int]) -> dict[str, Any]:
    site, active, counts = row["site"], row.get("active", b""), row.get("exponents", b"")
    bits = active if isinstance(active, bytes) else np.packbits(np.asarray(active, dtype=bool)).tobytes()
    histogram = counts if isinstance(counts, bytes) else encode(np.asarray(counts))
    return {**row, "site": ids[site] if isinstance(site, str) else site, "active": bits, "exponents": histogram}
