"""The names by which the values of sites are read, as in ``acts["layer4#1"]``, and the patterns that select several."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import TypeAlias

from kedge.sites.language import Term, means_op, single
from kedge.sites.select import Selector
from kedge.sites.site import TENSOR_KINDS, Site, short

TypesAt: TypeAlias = Callable[[str], tuple[str, ...]]


def kind_meant(term: Term, kinds: Collection[str]) -> str:
    """Return the kind that a name means.

    Its own, else ``out`` or ``grad`` if present, else the only one, else ``out``.
    """
    if term.kind:
        return term.kind
    for usual in ("out", "grad"):
        if usual in kinds:
            return usual
    if len(kinds) == 1:
        return next(iter(kinds))
    return "out"


def site_named(name: str, kind: str = "out") -> Site:
    """Return the site of a name.

    Args:
        name: The name of one site.
        kind: The kind that a name without one has.
    """
    term = single(name)
    return Site(term.literal or "", term.kind or kind, term.leaf, term.call, term.op)


def names_at(sites: Iterable[Site]) -> list[str]:
    """Return the names that read the values of some sites.

    A name has the number of a module's call, or of an operation in it, only if it has several, or a
    later one.
    """
    given = list(sites)
    calls: defaultdict[tuple[str, str], set[int | None]] = defaultdict(set)
    numbers: defaultdict[tuple[str, str, str], set[int | None]] = defaultdict(set)
    for site in given:
        calls[site.path, site.kind].add(site.call)
        if site.op is not None:
            numbers[site.path, site.kind, site.op[0]].add(site.op[1])
    names = []
    for site in given:
        op = site.op
        if op is not None and numbers[site.path, site.kind, op[0]] == {0}:
            op = op[0], None
        call = site.call
        if calls[site.path, site.kind] == {0}:
            call = None
        names.append(short(replace(site, call=call, op=op)))
    return names


def matching(
    selector: Selector,
    names: Iterable[str],
    kinds: Collection[str],
    types: Callable[[], TypesAt],
) -> tuple[list[str], list[Term]]:
    """Return the names that a selector selects, in their order, and its terms that select none.

    Args:
        selector: The selector.
        names: The names, as made by `names_at`.
        kinds: The kinds of the hooked sites.
        types: Returns a function from a path to the class names of its module; called if the
            selector names types.
    """
    types_at = types() if any(term.types for term in selector.terms) else None
    usual = "grad" if any(kind in TENSOR_KINDS for kind in kinds) else "out"
    sites = {name: site_named(name, usual) for name in names}
    found: set[str] = set()
    idle = []
    for term in selector.terms:
        hits = {name for name, site in sites.items() if _selects(term, site, types_at)}
        if term.excluded:
            found -= hits
        else:
            kind = kind_meant(term, {sites[name].kind for name in hits})
            found |= {name for name in hits if sites[name].kind == kind}
            if not hits:
                idle.append(term)
    return [name for name in sites if name in found], idle


def _selects(term: Term, site: Site, types: TypesAt | None) -> bool:
    """Whether a term selects a site, whatever its kind if the term has none.

    A term without an operation selects none, except that it excludes them, and selects what
    operations save.
    """
    if term.kind not in (None, site.kind) or term.leaf not in (None, site.leaf):
        return False
    if term.op is not None:
        if site.op is None or not means_op(term.op, (site.op[0], site.op[1] or 0)):
            return False
    elif site.op is not None and site.kind != "saved":
        excludes_all = term.excluded and term.kind is None
        if not excludes_all:
            return False
    if term.call not in (None, site.call or 0):
        return False
    classes: tuple[str, ...] = ()
    if types and term.types:
        classes = types(site.path)
    return term.matches(site.path, classes)
