"""The shares of several ranks in one recording, put together when it is read.

# Note [Ranks]
Each rank writes files of its own and numbers its sites as they fire, so the numbers differ. A site
is the same as another rank's if its text is the same: the sites of the lowest rank keep their
numbers, those that only other ranks have come after them. Rows of one site and step are merged as
the rows of a split batch are. What belongs to one rank alone can still be read by itself.

Ranks may measure different steps in full. Where one did and another did not, the row of a light step
is left out unless it tells of what is not finite: it counts elements whose sum nobody took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from kedge.store.binary_column import joined
from kedge.store.rows import Ints, Rows, merge
from kedge.store.sites import Root, SiteInfo
from kedge.store.table import BINARY, COLUMNS, OFFSETS, Columns, Table

Entry = Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Share:
    """What one rank wrote, with its own numbers of sites and roots."""

    rank: int
    roots: tuple[Root, ...]
    sites: tuple[SiteInfo, ...]
    events: tuple[Entry, ...]
    table: Table


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one rank.

    Attributes:
        rank: The rank.
        table: The rows, with the rank's own numbers of sites.
        ids: The number of each of its sites in the whole recording.
        sites: Its own description of them, with those numbers.
    """

    rank: int
    table: Table
    ids: Ints
    sites: tuple[SiteInfo, ...]

    @cached_property
    def _own(self) -> dict[int, int]:
        return {whole: own for own, whole in enumerate(self.ids.tolist())}

    def rows(self, site: int) -> Rows:
        """Gather the rows of a site of the whole recording."""
        return self.table.rows(self._own.get(site, len(self.ids)))


@dataclass(frozen=True, eq=False)
class RankedTable:
    """The rows of several ranks, read as one table."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(part.table) for part in self.parts)

    @cached_property
    def full_steps(self) -> Ints:
        """Every step with a full row at any rank, sorted."""
        return np.unique(np.concatenate([part.table.full_steps for part in self.parts]))

    @cached_property
    def columns(self) -> Columns:
        """All rows as they were written, rank after rank, with the numbers of the whole recording."""
        held = [part.table.columns for part in self.parts]
        columns = {name: np.concatenate([of[name] for of in held]) for name in (*COLUMNS, *BINARY)}
        columns["site"] = np.concatenate([p.ids[of["site"]] for p, of in zip(self.parts, held, strict=True)])
        for name in BINARY:
            lengths = np.concatenate([np.diff(of[name + OFFSETS]) for of in held])
            columns[name + OFFSETS] = np.concatenate([[0], np.cumsum(lengths)])
        return columns

    def rows(self, site: int) -> Rows:
        """Gather the rows of one site, those of one step merged into one."""
        found = [part.rows(site) for part in self.parts]
        found = [rows for rows in found if len(rows)] or found[:1]
        return found[0] if len(found) == 1 else _merged(found)


def _merged(found: Sequence[Rows]) -> Rows:
    """Merge rows of one site as if one rank had written them."""
    level, step = (np.concatenate([getattr(rows, name) for rows in found]) for name in ("level", "step"))
    _, group = np.unique(step, return_inverse=True)
    most = np.zeros(group.max(initial=-1) + 1, dtype=np.int64)
    np.maximum.at(most, group, level)
    kept = np.flatnonzero((level == most[group]) | ~np.concatenate([rows.clean for rows in found]))
    numbers = [name for name in COLUMNS if name != "site"]
    columns: dict[str, Any] = {name: np.concatenate([getattr(rows, name) for rows in found])[kept] for name in numbers}
    return merge({**columns, **{name: joined([rows.held(name) for rows in found]).chosen(kept) for name in BINARY}})


def assemble(shares: Sequence[Share]) -> tuple[tuple[Root, ...], tuple[SiteInfo, ...], RankedTable]:
    """Put shares together, the lowest rank first; see Note [Ranks]."""
    roots: list[Root] = []
    sites: dict[str, SiteInfo] = {}
    parts = []
    for share in sorted(shares, key=lambda share: share.rank):
        own = _placed(share, _root_ids(share, roots), sites)
        sites.update((site.site, site) for site in own if site.site not in sites)
        ids = np.array([site.id for site in own], dtype=np.int64)
        parts.append(Part(share.rank, share.table, ids, own))
    return tuple(roots), tuple(sites.values()), RankedTable(tuple(parts))


def _root_ids(share: Share, roots: list[Root]) -> list[int]:
    """Number the roots of a share; the prefix tells which is which, and those not known yet are added."""
    known = {root.prefix: number for number, root in enumerate(roots)}
    for root in share.roots:
        if root.prefix not in known:
            known[root.prefix] = len(roots)
            roots.append(root)
    return [known[root.prefix] for root in share.roots]


def _placed(share: Share, roots: Sequence[int], known: Mapping[str, SiteInfo]) -> tuple[SiteInfo, ...]:
    """Give the sites of a share with the numbers that they have in the whole."""
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


def of_rank(sites: Iterable[SiteInfo], part: Part) -> tuple[SiteInfo, ...]:
    """Describe all sites of a recording as one rank saw them; those it never saw as others did."""
    own = {site.id: site for site in part.sites}
    return tuple(own.get(site.id, site) for site in sites)
