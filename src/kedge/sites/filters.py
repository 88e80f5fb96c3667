"""Filters: the site language on names alone, for recordings, pages and command lines. Nothing here needs PyTorch.

# Note [Words]
In a filter a path that is the name of nothing stands for all modules whose names begin so, at any
depth: ``attn`` is ``**.attn*``, and ``mlp.c`` is ``**.mlp.c*``. In code, where a hook may change
values, only the path itself counts.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from kedge.errors import NoSuchKind, NoSuchSite
from kedge.sites.folding import pattern
from kedge.sites.language import Term, means_op, parse, single
from kedge.sites.site import (
    ALL_KINDS,
    KINDS,
    OF_OPERATION,
    OP_KINDS,
    PARAM_KINDS,
    VARIABLE,
    WATCHED_KINDS,
)

#: What is named if nothing is near.
ALL = '"**" selects everything'
_RANGE = re.compile(r"(?<![^.])\d+-\d+(?![^.])")


class Named(Protocol):
    """A recorded site, as far as a filter asks: its text, path and kind, and the path and class of its module."""

    @property
    def site(self) -> str: ...  # noqa: D102

    @property
    def path(self) -> str: ...  # noqa: D102

    @property
    def kind(self) -> str: ...  # noqa: D102

    @property
    def type(self) -> str: ...  # noqa: D102

    @property
    def owner(self) -> str: ...  # noqa: D102


N = TypeVar("N", bound=Named)


class SiteFilter:
    """The sites of a recording that a text selects.

    Args:
        text: A text of the site language; see Note [Words].
        paths: The paths of all modules and parameters.

    Attributes:
        terms: The terms of the text, with words widened.

    Raises:
        SelectorError: The text cannot be read.
    """

    def __init__(self, text: str, paths: Collection[str]) -> None:
        self._paths = paths
        self._read = parse(text)
        self.terms = widened(self._read, paths)

    def chooses(self, site: Named) -> bool:
        """Whether it selects a site."""
        chosen = False
        for term in self.terms:
            if chosen == term.excluded and means(term, site):
                chosen = not term.excluded
        return chosen

    def problem(self, sites: Sequence[Named], where: str = "this recording") -> str:
        """Return what is wrong with the first term that selects none of these sites; empty if each selects some.

        Args:
            sites: The sites.
            where: What has them, as the answer names it.
        """
        for said, term in zip(self._read, self.terms, strict=True):
            if term.excluded or any(means(term, site) for site in sites):
                continue
            problem = f'"{said}" selects nothing in {where}'
            alone = replace(term, kind=None, op=None, leaf=None, call=None)
            if alone != term:
                named = [site.kind for site in sites if means(alone, site)]
                kinds = dict.fromkeys(kind for kind in named if kind in KINDS)
                if kinds:
                    has = ", ".join(f":{kind}" for kind in kinds)
                    return f"{problem}; of the modules and parameters it names there is {has}"
            near = nearest(term, self._paths, (site.type for site in sites))
            if near:
                return f"{problem}; the nearest are {near}"
            return f"{problem}; {ALL}"
        return ""


def check_watched(text: str) -> None:
    """Check that a watch can record what a text selects.

    Raises:
        NoSuchKind: It names an operation of a module, one leaf or call, or a kind that only hooks
            have.
        SelectorError: The text cannot be read.
    """
    for term in parse(text):
        if term.op is not None and not _is_recorded(term):
            part = f'the operation "{term.op[0]}"'
        elif term.op is not None and term.leaf is None:
            continue
        elif term.kind not in (None, *WATCHED_KINDS):
            part = f":{term.kind}"
        elif term.call is not None or (term.leaf is not None and term.kind != "state"):
            part = "one leaf or one call alone"
        else:
            continue
        kinds = ", ".join(f":{kind}" for kind in WATCHED_KINDS)
        raise NoSuchKind(
            f'"{term}": a watch of a whole run does not record {part}; it records '
            "the values of modules and parameters with all their leaves and calls "
            f'({kinds}), and of operations outside of modules ("/cross_entropy"). '
            "Leave that part out, or use a hook: kedge.hook(model, "
            f'"{term}", kedge.measure())'
        )


def _is_recorded(term: Term) -> bool:
    """Whether a watch records an operation: one outside of modules, of which variables are none."""
    if term.op is None or term.op[0].endswith(VARIABLE):
        return False
    return term.is_outside and term.kind in (None, *OP_KINDS)


def chosen_sites(text: str, sites: Sequence[N], where: str = "this recording") -> tuple[N, ...]:
    """Return the sites that a text selects.

    Args:
        text: A text of the site language; see Note [Words].
        sites: The sites to choose from.
        where: What has them, for messages.

    Raises:
        NoSuchSite: A part of the text selects none of them.
        SelectorError: The text cannot be read.
    """
    paths = {site.path for site in sites} | {site.owner for site in sites}
    chosen = SiteFilter(text, paths)
    problem = chosen.problem(sites, where)
    if problem:
        raise NoSuchSite(problem)
    return tuple(filter(chosen.chooses, sites))


def widened(terms: Iterable[Term], paths: Collection[str]) -> tuple[Term, ...]:
    """Return terms with words in place of paths; see Note [Words].

    Args:
        terms: The terms.
        paths: The paths that there are.
    """
    found = []
    for term in terms:
        if term.literal and term.literal not in paths:
            *before, last = term.path
            found.append(replace(term, path=("**", *before, f"{last}*")))
        else:
            found.append(term)
    return tuple(found)


def means(term: Term, site: Named) -> bool:
    """Whether a term selects a site.

    Without a kind, it selects every site of a module, and of its parameters.
    """
    kind = site.kind.partition("[")[0]
    if term.op is not None and kind.startswith(OF_OPERATION):
        own = single(site.site)
        is_meant = term.kind in (None, own.kind) and term.leaf in (None, own.leaf)
        return is_meant and own.op is not None and means_op(term.op, own.op)
    types = (site.type,)
    if term.kind is None:
        named = term.matches(site.owner, types) or (
            term.literal is not None and term.literal == site.path
        )
    else:
        inside = kind in PARAM_KINDS and term.matches(site.owner, types)
        named = kind == term.kind and (inside or term.matches(site.path, types))
    if not named or (term.call is None and term.leaf is None and term.op is None):
        return named
    own = Term(())  # of no call and no leaf, as is an update, which only recordings have
    if kind in ALL_KINDS:
        own = single(site.site)
    leaf = term.leaf in (None, own.leaf)
    return (
        leaf
        and term.call in (None, own.call or 0)
        and (term.op is None or term.op[0] == (own.op or ("",))[0])
    )


def nearest(term: Term, paths: Iterable[str], types: Iterable[str] = ()) -> str:
    """Return what a term may have meant, as text: empty if nothing is near.

    Args:
        term: A term that selects nothing.
        paths: The paths that there are.
        types: The names of the classes that there are.
    """
    known = [path for path in dict.fromkeys(paths) if path]
    classes = sorted(set(types))
    wrong = [name for name in term.types if name not in classes]
    if wrong:
        near = difflib.get_close_matches(wrong[0], classes, 3, 0.5) or classes[:3]
        return ", ".join(f'"**{{{name}}}"' for name in near)
    for other in _variants(term):
        if any(other.matches(path, ()) for path in known):
            return f'"{other}"'
    return ", ".join(f'"{name}"' for name in _near_names(term, known))


def _variants(term: Term) -> Iterator[Term]:
    """Yield terms with ``*`` in place of the numbers of folded blocks, as a report names them, and one at any depth."""
    typed = term.path
    if typed[:1] == ("**",):
        typed = typed[1:]
    if any(map(_RANGE.search, typed)):
        plain = (segment.removesuffix("*") or "*" for segment in typed)
        starred = tuple(_RANGE.sub("*", segment) for segment in plain)
        yield from (Term(starred), Term(("**", *starred)))
    if typed[:1] == ("*",):
        yield Term(("**", *typed[1:]))
    yield Term(("**", *typed))


def _near_names(term: Term, known: Sequence[str]) -> list[str]:
    """Return the nearest segments for a term of one segment, else the nearest paths, one of several alike blocks."""
    typed = ".".join(segment for segment in term.path if segment != "**")
    plain = re.sub(r"[*?\\]", "", typed)
    if "." in plain:
        near = difflib.get_close_matches(plain, known, 12, 0.4)
        return list({pattern(path): path for path in reversed(near)}.values())[::-1][:3]
    segments: dict[str, None] = {}
    for path in known:
        names = (name for name in path.split(".") if not name.isdecimal())
        segments.update(dict.fromkeys(names))
    near = difflib.get_close_matches(plain, segments, 3, 0.5)
    if near or not plain:
        return near
    return sorted(name for name in segments if plain in name)[:3]
