"""The shares of several ranks in one recording, merged when it is read.

# Note [Ranks]
Each rank writes files of its own and numbers its sites as they fire, so the numbers differ. Sites
of two ranks are the same if their texts are: the sites of the lowest rank keep their numbers, and
sites that only other ranks have come after them. Rows of one site and step are merged like the
rows of a split batch. The rows of a single rank can still be read by themselves.

Of a distributed value a rank has a part, and ranks may have the same part: `copies` of its site
names them. In each step one of their rows is read, so that each element counts once, also if some
of these ranks have died or have not measured this step: one with non-finite values before one
without, a full one before a light one, and then that of the lowest rank. Ranks whose rows are not
alike after all hold no copies: their rows are added up like those of any others.

The stages of a pipeline are put together in `kedge.store.reading.stages`.

Ranks may measure different steps in full. In a step that only some measured in full, the light rows
of the others are left out unless they report non-finite values: they count elements that are in no
sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kedge.store.binary_column import joined
from kedge.store.columns import BINARY, COLUMNS
from kedge.store.events import RunEvent
from kedge.store.reading.stages import Stage, last_output, stages_of, together
from kedge.store.reading.table import SitesInOne, StatsTable, one_after_another
from kedge.store.rows import Ints, Rows, merge
from kedge.store.sites import Root, SiteInfo

_ALIKE = 1e-3
"""By how much of itself the sum of squares may differ between copies, which may come from different devices."""


@dataclass(frozen=True, eq=False)
class RankShare:
    """The recording of one rank, with its own numbers of sites and roots."""

    rank: int
    roots: tuple[Root, ...]
    sites: tuple[SiteInfo, ...]
    events: tuple[RunEvent, ...]
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
    def copies(self) -> dict[int, tuple[int, ...]]:
        """The ranks that hold the same part of a distributed value as this one, where there are others."""
        return {
            site.id: site.copies
            for site in self.sites
            if site.copies is not None and len(site.copies) > 1
        }

    @cached_property
    def _own(self) -> dict[int, int]:
        return {whole: own for own, whole in enumerate(self.ids.tolist())}

    @cached_property
    def _all(self) -> SitesInOne:
        return self.table.all(len(self.ids))

    def rows(self, site: int) -> Rows:
        """Return the rows of a site, which has its number in the whole recording."""
        return self._all.of(self._own.get(site, len(self.ids)))


@dataclass(frozen=True, eq=False)
class RankedTable:
    """The rows of several ranks, read as one table."""

    parts: tuple[RankRows, ...]

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row at any rank, sorted."""
        return np.unique(np.concatenate([part.table.full_steps for part in self.parts]))

    def all(self, sites: int) -> SitesInOne:
        """Return the rows of the sites with the numbers below `sites`, those of one step merged into one."""
        return one_after_another([self.rows(site) for site in range(sites)])

    def rows(self, site: int) -> Rows:
        """Return the rows of one site, those of one step merged into one."""
        read = [(part.rows(site), part.copies.get(site)) for part in self.parts]
        read = [(rows, copies) for rows, copies in read if len(rows)] or read[:1]
        found = [rows for rows, _ in read]
        return found[0] if len(found) == 1 else _merged(found, [copies for _, copies in read])


def _merged(found: Sequence[Rows], copies: Sequence[tuple[int, ...] | None]) -> Rows:
    """Return rows of one site, merged as if one rank had written them; `copies` are the ranks with the same part."""
    level, step = (
        np.concatenate([getattr(rows, name) for rows in found]) for name in ("level", "step")
    )
    _, group = np.unique(step, return_inverse=True)
    most = np.zeros(group.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(most, group, level)
    clean = np.concatenate([rows.clean for rows in found])
    chosen = (level == most[group]) | ~clean
    if any(copies):
        sumsq, count = (
            np.concatenate([getattr(rows, name) for rows in found]) for name in ("sumsq", "count")
        )
        part = _part_numbers(found, copies)
        first = _first_of_each(np.lexsort((-level, clean, part, group)), group, part)
        unlike = (count != count[first]) | (
            np.abs(sumsq - sumsq[first]) > _ALIKE * np.abs(sumsq[first])
        )
        chosen &= (first == np.arange(len(first))) | (unlike & clean & clean[first])
    kept = np.flatnonzero(chosen)
    numbers = [name for name in COLUMNS if name != "site"]
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(rows, name) for rows in found])[kept] for name in numbers
    }
    return merge(
        {
            **columns,
            **{name: joined([rows.held(name) for rows in found]).chosen(kept) for name in BINARY},
        }
    )


def _part_numbers(found: Sequence[Rows], copies: Sequence[tuple[int, ...] | None]) -> Ints:
    """Return for each row the number of the part of the value that it is of; ranks with copies share one."""
    first = {held: number for number, held in reversed(list(enumerate(copies))) if held}
    own = [first[held] if held else number for number, held in enumerate(copies)]
    return np.repeat(np.array(own, dtype=np.int64), [len(rows) for rows in found])


def _first_of_each(order: Ints, group: Ints, part: Ints) -> Ints:
    """Return for each row the first one, in an order by step and part, of the same part in the same step."""
    begins = (np.diff(group[order], prepend=-1) != 0) | (np.diff(part[order], prepend=-1) != 0)
    first = np.empty_like(order)
    first[order] = order[np.flatnonzero(begins)[np.cumsum(begins) - 1]]
    return first


def assemble(
    shares: Sequence[RankShare],
) -> tuple[tuple[Root, ...], tuple[SiteInfo, ...], RankedTable]:
    """Return the roots, sites and rows of several ranks, the lowest rank first; see Note [Ranks]."""
    shares = sorted(shares, key=lambda share: share.rank)
    roots: list[Root] = []
    sites: dict[str, SiteInfo] = {}
    parts = []
    reached: dict[str, int] = {}
    for share, stages in zip(shares, stages_of([share.roots for share in shares]), strict=True):
        ids = _root_ids(share, roots)
        new = {prefix for prefix, stage in stages.items() if stage.number > reached.get(prefix, 0)}
        _join_stages(share, ids, roots, new)
        reached |= {
            prefix: max(stage.number, reached.get(prefix, 0)) for prefix, stage in stages.items()
        }
        own, numbers = _placed(share, ids, sites, stages)
        sites.update((site.site, site) for site in own if site.site not in sites)
        parts.append(RankRows(share.rank, share.table, numbers, own))
    return tuple(roots), tuple(sites.values()), RankedTable(tuple(parts))


def _root_ids(share: RankShare, roots: list[Root]) -> list[int]:
    """Return the numbers of a rank's roots, which are identified by prefix; new ones are added."""
    known = {root.prefix: number for number, root in enumerate(roots)}
    for root in share.roots:
        if root.prefix not in known:
            known[root.prefix] = len(roots)
            roots.append(root)
    return [known[root.prefix] for root in share.roots]


def _join_stages(
    share: RankShare, ids: Sequence[int], roots: list[Root], prefixes: set[str]
) -> None:
    """Add the modules of a rank's stages to their roots, of stages that no lower rank has."""
    for root, number in zip(share.roots, ids, strict=True):
        if root.prefix in prefixes:
            roots[number] = together(roots[number], root)


def _placed(
    share: RankShare,
    roots: Sequence[int],
    known: Mapping[str, SiteInfo],
    stages: Mapping[str, Stage],
) -> tuple[tuple[SiteInfo, ...], Ints]:
    """Return a rank's sites with their numbers in the whole recording, and the numbers of all; -1: it is not there."""
    fresh = iter(range(len(known), len(known) + len(share.sites)))
    ids = [
        -1
        if _is_inside(site, share.roots, stages)
        else known[site.site].id
        if site.site in known
        else next(fresh)
        for site in share.sites
    ]
    before = {
        prefix: last_output(known, prefix) for prefix, stage in stages.items() if stage.number
    }
    placed = []
    for site in share.sites:
        given = (
            before.get(share.roots[site.root].prefix) if 0 <= site.root < len(share.roots) else None
        )
        sources = (
            None if source is None or ids[source] < 0 else ids[source] for source in site.sources
        )
        placed.append(
            replace(
                site,
                id=ids[site.id],
                root=roots[site.root] if site.root < len(roots) else site.root,
                sources=tuple(given if source is None else source for source in sources),
            )
        )
    return tuple(site for site in placed if site.id >= 0), np.array(ids, dtype=np.int64)


def _is_inside(site: SiteInfo, roots: Sequence[Root], stages: Mapping[str, Stage]) -> bool:
    """Whether a site of a root itself is one between two stages of a pipeline."""
    stage = stages.get(roots[site.root].prefix) if 0 <= site.root < len(roots) else None
    return stage is not None and site.path == roots[site.root].prefix and not stage.has(site.kind)


def of_rank(sites: Iterable[SiteInfo], part: RankRows) -> tuple[SiteInfo, ...]:
    """Return all sites of a recording as one rank described them; sites it never had as others did."""
    own = {site.id: site for site in part.sites}
    return tuple(own.get(site.id, site) for site in sites)
