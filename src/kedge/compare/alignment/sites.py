"""Pairs of the same site in two recordings.

# Note [Alignment]
Modules are aligned first, the surest way first: by their model, their path in it and type, where a
model has another name or order; by their path and type; by their path without the
segments of wrappers such as ``torch.compile`` or ``DistributedDataParallel``; by their path without
a beginning that only one side has; by structure, see Note [Structure]; last, if one took the place
of another. Each way gets only the modules that those before it left. Two sites of aligned modules
are the same if the rest of their text is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from kedge.compare.alignment.modules import RecordedModule, flow, modules_of
from kedge.compare.alignment.names import (
    Named,
    Pair,
    by_name,
    in_roots,
    plain,
    prefixes,
    same_roots,
    unwrapped,
    without,
)
from kedge.compare.alignment.structure import Weigh, aligned, alike, changed, gaps
from kedge.store.recording import Recording, SiteInfo

How = Literal["name", "wrapper", "prefix", "structure", "changed"]

#: The number of beginnings of paths that are tried; each wrapped root has one.
MOST_PREFIXES = 8

#: The part of a step in which each kind of site fires.
PHASES = {
    "param": 0,
    "out": 1,
    "in": 1,
    "loss": 2,
    "out.grad": 3,
    "param.grad": 3,
    "grad.norm": 4,
    "update": 5,
    "state": 5,
}
BACKWARD = PHASES["out.grad"]
LAST_PHASE = 6


@dataclass(frozen=True, eq=False, repr=False)
class SameModule:
    """A pair of modules that count as the same, and the way in which they were paired."""

    a: RecordedModule
    b: RecordedModule
    how: How

    def __repr__(self) -> str:
        return f"<SameModule {self.label}, by {self.how}>"

    @property
    def kept(self) -> bool:
        """Whether it has the same type and its parameters have the same names and shapes."""
        return self.a.type == self.b.type and not self.a.unlike(self.b)

    @property
    def leaf(self) -> bool:
        """Whether it holds no other module."""
        return self.a.leaf and self.b.leaf

    @property
    def label(self) -> str:
        """Its name in A, and in B if that differs."""
        if self.a.path == self.b.path:
            return self.a.label
        return f"{self.a.label} = {self.b.label}"


@dataclass(frozen=True, eq=False, repr=False)
class SameSite:
    """A pair of sites that count as the same."""

    a: SiteInfo
    b: SiteInfo
    module: SameModule

    def __repr__(self) -> str:
        return f"<SameSite {self.text}>"

    @property
    def kind(self) -> str:
        """The kind of values there, such as ``out.grad``."""
        return flow(self.a)

    @property
    def phase(self) -> int:
        """The part of a step in which it fires, one of `PHASES`."""
        return PHASES.get(self.kind, LAST_PHASE)

    @property
    def text(self) -> str:
        """Its name in text: the site of A, and that of B if its text differs."""
        if self.a.site == self.b.site:
            return self.a.site
        return f"{self.a.site} = {self.b.site}"


@dataclass(frozen=True, eq=False)
class Alignment:
    """The modules and sites of two recordings that are the same, and the others.

    Attributes:
        modules: The modules that both have, in A's order of the data.
        sites: The sites that both have, in the order in which they fire in a step of A.
        only_a: The modules that A alone has.
        only_b: The modules that B alone has.
        sites_a: The sites of common modules that A alone has.
        sites_b: The sites of common modules that B alone has.
    """

    modules: tuple[SameModule, ...]
    sites: tuple[SameSite, ...]
    only_a: tuple[RecordedModule, ...]
    only_b: tuple[RecordedModule, ...]
    sites_a: tuple[SiteInfo, ...]
    sites_b: tuple[SiteInfo, ...]

    @cached_property
    def renames(self) -> tuple[tuple[str, str, int], ...]:
        """Paths of A with their names in B and the number of modules with each, most first."""
        renamed = [same for same in self.modules if same.a.path != same.b.path]
        numbers = Counter(_moved(same.a, same.b) for same in renamed)
        moved = [(*paths, number) for paths, number in numbers.items()]
        return tuple(sorted(moved, key=lambda row: (-row[2], row[:2])))


def _moved(a: RecordedModule, b: RecordedModule) -> tuple[str, str]:
    """Return the paths of two modules without their common end."""
    ones = list(a.segments)
    others = list(b.segments)
    while ones and others and ones[-1] == others[-1]:
        del ones[-1], others[-1]
    return ".".join(ones), ".".join(others)


def align(a: Recording, b: Recording) -> Alignment:
    """Return the alignment of two recordings; see Note [Alignment]."""
    ones, others = modules_of(a), modules_of(b)
    found = _Pairs(ones, others)
    roots = same_roots(a.roots, b.roots)
    if any(a.roots[one].prefix != b.roots[other].prefix for one, other in roots.items()):
        names_in_a = {one: str(one) for one in roots}
        names_in_b = {other: str(one) for one, other in roots.items()}
        in_a = in_roots(ones, a.roots, names_in_a)
        found.take(by_name(in_a, in_roots(others, b.roots, names_in_b)), "name")
    found.name(plain, "name")
    found.name(unwrapped, "wrapper")
    found.leave_out_prefixes()
    found.match(alike, "structure")
    found.match(changed, "changed")

    place = {id(module): i for i, module in enumerate(ones)}
    modules = sorted(found.same, key=lambda same: place[id(same.a)])
    sites: list[SameSite] = []
    for same in modules:
        sites += _sites(same)
    sites += [*_norms(a, b, modules, sites), *_losses(a, b)]

    taken = _taken(sites)
    sites_a: list[SiteInfo] = []
    sites_b: list[SiteInfo] = []
    for same in modules:
        sites_a += [site for site in same.a.sites if id(site) not in taken]
        sites_b += [site for site in same.b.sites if id(site) not in taken]
    left_a, left_b = found.left
    return Alignment(
        tuple(modules),
        tuple(sorted(sites, key=lambda same: (same.phase, same.a.id))),
        left_a,
        left_b,
        tuple(sites_a),
        tuple(sites_b),
    )


def _taken(sites: Iterable[SameSite]) -> set[int]:
    """Return the ids of the sites that are in a pair."""
    found = set()
    for same in sites:
        found |= {id(same.a), id(same.b)}
    return found


class _Pairs:
    """The pairs found so far, and the modules that are left on either side."""

    def __init__(
        self,
        a: Sequence[RecordedModule],
        b: Sequence[RecordedModule],
    ) -> None:
        self.a = tuple(a)
        self.b = tuple(b)
        self.same: list[SameModule] = []
        self._taken: set[int] = set()

    @property
    def left(self) -> tuple[tuple[RecordedModule, ...], tuple[RecordedModule, ...]]:
        """The modules that are in no pair."""
        return self._rest(self.a), self._rest(self.b)

    def _rest(self, modules: Iterable[RecordedModule]) -> tuple[RecordedModule, ...]:
        return tuple(module for module in modules if id(module) not in self._taken)

    def take(self, pairs: Iterable[Pair], how: How) -> int:
        """Keep the pairs of modules that are in none yet; returns their number."""
        before = len(self.same)
        for a, b in pairs:
            if self._taken.isdisjoint((id(a), id(b))):
                self.same.append(SameModule(a, b, how))
                self._taken |= {id(a), id(b)}
        return len(self.same) - before

    def name(
        self,
        named: Callable[[Iterable[RecordedModule]], Named],
        how: How,
    ) -> None:
        """Pair modules of the same name.

        The names of all modules, also of those in a pair, show which numbered containers count.
        """
        self.take(by_name(named(self.a), named(self.b)), how)

    def leave_out_prefixes(self) -> None:
        """Pair modules of the same name except for its beginning."""
        for _ in range(MOST_PREFIXES):
            a, b = self.left
            found = prefixes(a, b)
            if found is None:
                return
            prefix_a, prefix_b = found
            pairs = by_name(without(a, prefix_a), without(b, prefix_b))
            if not self.take(pairs, "prefix"):
                return

    def match(self, weigh: Weigh, how: How) -> None:
        """Pair by structure the modules that lie between the same pairs."""
        known = [(same.a, same.b) for same in self.same]
        for gap in gaps(self.a, self.b, known):
            self.take(aligned(gap, weigh), how)


def _sites(same: SameModule) -> Iterator[SameSite]:
    """Yield pairs of the sites of two modules.

    They have the rest of their texts in common, or else kind and shape, in order.
    """
    others = {same.b.part(site): site for site in same.b.sites}
    left = []
    for site in same.a.sites:
        other = others.pop(same.a.part(site), None)
        if other is None:
            left.append(site)
        else:
            yield SameSite(site, other, same)
    for site in left:
        for part, other in others.items():
            if flow(other) == flow(site) and other.shape == site.shape:
                del others[part]
                yield SameSite(site, other, same)
                break


def _norms(
    a: Recording, b: Recording, modules: Sequence[SameModule], sites: Sequence[SameSite]
) -> Iterator[SameSite]:
    """Yield pairs of the norms of whole models.

    They have the path of a root, which may itself have no pair.
    """
    taken = _taken(sites)
    modules_of_roots = Counter((same.a.sites[0].root, same.b.sites[0].root) for same in modules)
    root_in_b: dict[int, int] = {}
    for (root, other_root), _ in modules_of_roots.most_common():
        root_in_b.setdefault(root, other_root)
    first_modules: dict[int, SameModule] = {}
    for same in modules:
        first_modules.setdefault(same.a.sites[0].root, same)
    norms_of_b: dict[int | None, SiteInfo] = {}
    for site in b.of_kind("grad.norm"):
        norms_of_b.setdefault(site.root, site)

    for site in a.of_kind("grad.norm"):
        other = norms_of_b.get(root_in_b.get(site.root))
        if other is not None and taken.isdisjoint((id(site), id(other))):
            taken |= {id(site), id(other)}
            yield SameSite(site, other, first_modules[site.root])


def _losses(a: Recording, b: Recording) -> Iterator[SameSite]:
    """Yield pairs of losses, which do not belong to modules, in the order of the program."""
    others = {site.path: site for site in b.of_kind("loss")}
    for site in a.of_kind("loss"):
        other = others.get(site.path)
        if other is not None:
            in_a = RecordedModule(site.path, (site,), leaf=True)
            in_b = RecordedModule(other.path, (other,), leaf=True)
            yield SameSite(site, other, SameModule(in_a, in_b, "name"))
