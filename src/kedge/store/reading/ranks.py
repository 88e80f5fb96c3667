"""The shares of several ranks in one recording, merged when it is read.

# Note [Ranks]
Each rank writes files of its own and numbers its sites as they fire, so the numbers differ. Sites
of two ranks are the same if their texts are: the sites of the lowest rank keep their numbers, and
sites that only other ranks have come after them. Rows of one site and step are merged like the
rows of a split batch. The rows of a single rank can still be read by themselves.

Ranks may measure different steps in full. In a step that only some measured in full, the light rows of
the others are left out unless they report non-finite values: they count elements that are in no sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kedge.store.binary_column import joined
from kedge.store.columns import BINARY, COLUMNS
from kedge.store.reading.table import StatsTable
from kedge.store.rows import Ints, Rows, merge
from kedge.store.sites import Root, SiteInfo

Entry = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class RankShare:
    """The recording of one rank, with its own numbers of sites and roots."""

    rank: int
    roots: tuple[Root, ...]
    sites: tuple[SiteInfo, ...]
    events: tuple[Entry, ...]
    table: StatsTable


@dataclass(frozen=True, eq=False)
class RankRows:
    """The rows of one rank.

    Attributes:
        rank: The rank.
        table: The rows, with the rank's own numbers of sites.
        ids: The number of each of its sites in the whole recording.
        sites: The rank's description of its sites, with those numbers.
    """

    rank: int
    table: StatsTable
    ids: Ints
    sites: tuple[SiteInfo, ...]

    @cached_property
    def _own(self) -> dict[int, int]:
        return {whole: own for own, whole in enumerate(self.ids.tolist())}

    def rows(self, site: int) -> Rows:
        """Return the rows of a site, which has its number in the whole recording."""
        return self.table.rows(self._own.get(site, len(self.ids)))


@dataclass(frozen=True, eq=False)
class RankedTable:
    """The rows of several ranks, read as one table."""

    parts: tuple[RankRows, ...]

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row at any rank, sorted."""
        return np.unique(np.concatenate([part.table.full_steps for part in self.parts]))

    def rows(self, site: int) -> Rows:
        """Return the rows of one site, those of one step merged into one."""
        found = [part.rows(site) for part in self.parts]
        found = [rows for rows in found if len(rows)] or found[:1]
        return found[0] if len(found) == 1 else _merged(found)


def _merged(found: Sequence[Rows]) -> Rows:
    """Return rows of one site, merged as if one rank had written them."""
    level, step = (np.concatenate([getattr(rows, name) for rows in found]) for name in ("level", "step"))
    _, group = np.unique(step, return_inverse=True)
    most = np.zeros(group.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(most, group, level)
    kept = np.flatnonzero((level == most[group]) | ~np.concatenate([rows.clean for rows in found]))
    numbers = [name for name in COLUMNS if name != "site"]
    columns: dict[str, Any] = {name: np.concatenate([getattr(rows, name) for rows in found])[kept] for name in numbers}
    return merge({**columns, **{name: joined([rows.held(name) for rows in found]).chosen(kept) for name in BINARY}})


def assemble(shares: Sequence[RankShare]) -> tuple[tuple[Root, ...], tuple[SiteInfo, ...], RankedTable]:
    """Return the roots, sites and rows of several ranks, the lowest rank first; see Note [Ranks]."""
    roots: list[Root] = []
    sites: dict[str, SiteInfo] = {}
    parts = []
    for share in sorted(shares, key=lambda share: share.rank):
        own = _placed(share, _root_ids(share, roots), sites)
        sites.update((site.site, site) for site in own if site.site not in sites)
        ids = np.array([site.id for site in own], dtype=np.int64)
        parts.append(RankRows(share.rank, share.table, ids, own))
    return tuple(roots), tuple(sites.values()), RankedTable(tuple(parts))


def _root_ids(share: RankShare, roots: list[Root]) -> list[int]:
    """Return the numbers of a rank's roots, which are identified by prefix; new ones are added."""
    known = {root.prefix: number for number, root in enumerate(roots)}
    for root in share.roots:
        if root.prefix not in known:
            known[root.prefix] = len(roots)
            roots.append(root)
    return [known[root.prefix] for root in share.roots]


def _placed(share: RankShare, roots: Sequence[int], known: Mapping[str, SiteInfo]) -> tuple[SiteInfo, ...]:
    """Return a rank's sites with their numbers in the whole recording."""
    fresh = iter(range(len(known), len(known) + len(share.sites)))
    ids = [known[site.site].id if site.site in known else next(fresh) for site in share.sites]
    return tuple(
        replace(
            site,
            id=ids[site.id],
            root=roots[site.root] if site.root < len(roots) else site.root,
            sources=tuple(None if source is None else ids[source] for source in site.sources),
        )
        for site in share.sites
    )


def of_rank(sites: Iterable[SiteInfo], part: RankRows) -> tuple[SiteInfo, ...]:
    """Return all sites of a recording as one rank described them; sites it never had as others did."""
    own = {site.id: site for site in part.sites}
    return tuple(own.get(site.id, site) for site in sites)
