"""A recording, read: what was seen at which site in which step.

The reader needs numpy alone, and a :class:`Recording` is a value: it never changes once read.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kedge.errors import NoSuchSite, NotARecording
from kedge.store.arrow import read_stats
from kedge.store.documents import FORMAT, SITES, STATS, read_events, read_manifest, read_sites
from kedge.store.rows import FULL, STATISTICS, Bools, Floats, Ints, Rows
from kedge.store.sites import Root, SiteInfo, root_from, site_from
from kedge.store.table import ACTIVE, Table, tabulate

__all__ = ["FORMAT", "STATISTICS", "Recording", "Root", "Rows", "SiteInfo"]

Entry = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Recording:
    """What one run left behind.

    ``truncated`` says that the last thing being written was incomplete and left out.
    """

    path: Path
    manifest: Entry
    roots: tuple[Root, ...]
    sites: tuple[SiteInfo, ...]
    events: tuple[Entry, ...]
    truncated: bool
    table: Table = field(repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Recording:
        """Read a recording, finished or not.

        Raises:
            NotARecording: The path is no recording, or a file of it is damaged.
            NewerFormat: A newer Kedge wrote it.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        # Its writer describes a site before its rows and writes rows before the end event, so the
        # opposite order never meets a row of an unknown site, nor an end without its rows.
        events, torn_event = read_events(folder)
        files = sorted(folder.glob(STATS.format(rank="*")))
        columns, torn_batch = read_stats(files)
        described = read_sites(folder)
        table = Table(columns)
        if described is None and len(table):
            raise NotARecording(
                f"{folder / SITES} is missing, though {files[0].name} holds rows; "
                "copy the whole folder again, or record the run again"
            )
        roots, sites = described or ((), ())
        return cls(folder, manifest, roots, sites, events, torn_event or torn_batch, table)

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
                bytes or one bool per channel. What is left out was not measured.
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
            table=tabulate(_built_row(row, ids) for row in rows),
        )

    @property
    def steps(self) -> Ints:
        """Every step with full statistics, sorted."""
        return self.table.full_steps

    @property
    def end(self) -> Entry | None:
        """The closing event; None while the program runs and after a kill."""
        return next((event for event in reversed(self.events) if event.get("kind") == "end"), None)

    @property
    def ledger(self) -> tuple[Entry, ...]:
        """Sites that the ledger has something to say about: how often they fired, or why not."""
        written = (event["sites"] for event in self.events if event.get("kind") == "ledger")
        return tuple(entry for entries in written for entry in entries)

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
        width = (channels + 7) // 8
        tracked = [i for i, bits in enumerate(rows.active) if bits and len(bits) == width]
        packed = np.frombuffer(b"".join(rows.active[i] for i in tracked), dtype=np.uint8)
        bits = np.unpackbits(packed.reshape(len(tracked), width), axis=1, count=channels)
        return rows.step[tracked], rows.count[tracked] // max(channels, 1), bits.astype(bool)

    @cached_property
    def _by_text(self) -> dict[str, SiteInfo]:
        return {site.site: site for site in self.sites}

    @cached_property
    def _rows(self) -> dict[int, Rows]:
        return {}

    def _same(self, site: SiteInfo | str) -> SiteInfo:
        return self.site(site) if isinstance(site, str) else site

    def _unknown(self, text: str) -> str:
        near = get_close_matches(text, self._by_text, n=3, cutoff=0.4)
        hint = f"the nearest {'is' if len(near) == 1 else 'are'} {', '.join(near)}" if near else "none is near it"
        name = self.path.name or "this recording"
        count = f"{len(self.sites)} site{'' if len(self.sites) == 1 else 's'}"
        return f"{name} has no site {text!r}: it holds {count}, {hint}"


def _built_site(position: int, site: SiteInfo | Entry | str) -> SiteInfo:
    if isinstance(site, SiteInfo):
        return site
    entry = {"site": site} if isinstance(site, str) else site
    return site_from({"id": position, **entry})


def _built_row(row: Entry, ids: Mapping[str, int]) -> dict[str, Any]:
    site, active = row["site"], row.get(ACTIVE, b"")
    bits = active if isinstance(active, bytes) else np.packbits(np.asarray(active, dtype=bool)).tobytes()
    return {**row, "site": ids[site] if isinstance(site, str) else site, ACTIVE: bits}
