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
"""By how much of itself the sum of squares may differ between copies.

They may come from different devices.
"""


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
        """The ranks that hold the same part of a distributed value as this one, if not alone."""
        found = {}
        for site in self.sites:
            if site.copies is not None and len(site.copies) > 1:
                found[site.id] = site.copies
        return found

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
        """Return the rows of the sites below a number, those of one step merged into one."""
        return one_after_another([self.rows(site) for site in range(sites)])

    def rows(self, site: int) -> Rows:
        """Return the rows of one site, those of one step merged into one."""
        found = []
        copies = []
        for part in self.parts:
            rows = part.rows(site)
            if len(rows):
                found.append(rows)
                copies.append(part.copies.get(site))
        if not found:
            return self.parts[0].rows(site)
        if len(found) == 1:
            return found[0]
        return _merged(found, copies)


def _merged(found: Sequence[Rows], copies: Sequence[tuple[int, ...] | None]) -> Rows:
    """Return rows of one site, merged as if one rank had written them.

    Args:
        found: The rows of each rank.
        copies: The ranks with the same part as each.
    """
    level = np.concatenate([rows.level for rows in found])
    step = np.concatenate([rows.step for rows in found])
    clean = np.concatenate([rows.clean for rows in found])
    _, group = np.unique(step, return_inverse=True)
    most = np.zeros(group.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(most, group, level)
    chosen = (level == most[group]) | ~clean
    if any(copies):
        sumsq = np.concatenate([rows.sumsq for rows in found])
        count = np.concatenate([rows.count for rows in found])
        part = _part_numbers(found, copies)
        first = _first_of_each(np.lexsort((-level, clean, part, group)), group, part)
        far = np.abs(sumsq - sumsq[first]) > _ALIKE * np.abs(sumsq[first])
        unlike = far | (count != count[first])
        chosen &= (first == np.arange(len(first))) | (unlike & clean & clean[first])

    kept = np.flatnonzero(chosen)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        if name != "site":
            columns[name] = np.concatenate([getattr(rows, name) for rows in found])[kept]
    for name in BINARY:
        columns[name] = joined([rows.held(name) for rows in found]).chosen(kept)
    return merge(columns)


def _part_numbers(
    found: Sequence[Rows],
    copies: Sequence[tuple[int, ...] | None],
) -> Ints:
    """Return for each row the number of the part of the value that it is of.

    Ranks with copies share one.
    """
    first: dict[tuple[int, ...], int] = {}
    numbers = []
    for number, (rows, held) in enumerate(zip(found, copies, strict=True)):
        own = number
        if held:
            own = first.setdefault(held, number)
        numbers.append(np.full(len(rows), own, dtype=np.int64))
    return np.concatenate(numbers)


def _first_of_each(order: Ints, group: Ints, part: Ints) -> Ints:
    """Return for each row the first one of the same part in the same step.

    Args:
        order: An order of the rows by step and part.
        group: The number of the step of each row.
        part: The number of the part of each row.
    """
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
    all_stages = stages_of([share.roots for share in shares])
    for share, stages in zip(shares, all_stages, strict=True):
        ids = _root_ids(share, roots)
        for root, number in zip(share.roots, ids, strict=True):
            stage = stages.get(root.prefix)
            if stage is not None and stage.number > reached.get(root.prefix, 0):
                # No lower rank has this stage: its modules are added to the root.
                roots[number] = together(roots[number], root)
                reached[root.prefix] = stage.number
        own, numbers = _placed(share, ids, sites, stages)
        for site in own:
            sites.setdefault(site.site, site)
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


def _placed(
    share: RankShare,
    roots: Sequence[int],
    known: Mapping[str, SiteInfo],
    stages: Mapping[str, Stage],
) -> tuple[tuple[SiteInfo, ...], Ints]:
    """Return a rank's sites with their numbers in the whole recording, and the numbers of all.

    The number is -1 for a site that is not there.
    """
    ids = []
    fresh = len(known)
    for site in share.sites:
        if _is_inside(site, share.roots, stages):
            ids.append(-1)
        elif site.site in known:
            ids.append(known[site.site].id)
        else:
            ids.append(fresh)
            fresh += 1

    # What a stage receives was made by the last module of the stages before it.
    before = {}
    for prefix, stage in stages.items():
        if stage.number:
            before[prefix] = last_output(known, prefix)
    placed = []
    for site in share.sites:
        if ids[site.id] < 0:
            continue
        root = site.root
        given = None
        if 0 <= site.root < len(roots):
            root = roots[site.root]
            given = before.get(share.roots[site.root].prefix)
        sources = []
        for source in site.sources:
            if source is None or ids[source] < 0:
                sources.append(given)
            else:
                sources.append(ids[source])
        placed.append(replace(site, id=ids[site.id], root=root, sources=tuple(sources)))
    return tuple(placed), np.array(ids, dtype=np.int64)


def _is_inside(
    site: SiteInfo,
    roots: Sequence[Root],
    stages: Mapping[str, Stage],
) -> bool:
    """Whether a site of a root itself is one between two stages of a pipeline."""
    if not 0 <= site.root < len(roots):
        return False
    prefix = roots[site.root].prefix
    stage = stages.get(prefix)
    return stage is not None and site.path == prefix and not stage.has(site.kind)


def of_rank(sites: Iterable[SiteInfo], part: RankRows) -> tuple[SiteInfo, ...]:
    """Return all sites of a recording as one rank described them, if it had them."""
    own = {site.id: site for site in part.sites}
    return tuple(own.get(site.id, site) for site in sites)
