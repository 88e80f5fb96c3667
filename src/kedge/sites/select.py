"""Selectors: text that names places.

A `Selector` is independent of a model; on a model it resolves to a `Selection`, its sites there. A
selector without sites is an error that names the nearest ones.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.nn import functional

from kedge import notebook
from kedge.calls.arguments import called_as, described, not_a_model
from kedge.errors import NoSiteMatched, NoSuchKind, SelectorError
from kedge.short_text import counted
from kedge.sites.folding import Folding
from kedge.sites.language import Term, means_op, parse
from kedge.sites.site import (
    MODULE_KINDS,
    NODE_KINDS,
    OP_KINDS,
    PARAM_KINDS,
    TENSOR_KINDS,
    Site,
    escape,
)
from kedge.torch_internals.module_tables import named_modules, named_parameters, own_children


@dataclass(frozen=True)
class SitePlace:
    """A site together with its module or parameter.

    Attributes:
        site: The site, under the first name of its module or parameter.
        module: The module; for a parameter the one that owns it.
        param: The parameter of a parameter's site.
        without: Operations that the site excludes, although its pattern would select them.
        many: Whether a pattern selected the module, so that it may have no such operation.
    """

    site: Site
    module: nn.Module
    param: nn.Parameter | None = None
    without: tuple[tuple[str, int | None], ...] = ()
    many: bool = False


class Selector:
    """A selection of places by text, or by several texts.

    On a model it resolves to a `Selection`.
    """

    def __init__(self, text: Selectors) -> None:
        self.terms = _terms(text)

    @classmethod
    def naming(cls, paths: Iterable[str], kind: str) -> Selector:
        """Return the selector of one kind of site at some paths, as its text would be read."""
        named = cls.__new__(cls)
        named.terms = tuple(Term((escape(path),) if path else (), kind=kind) for path in paths)
        return named

    def __str__(self) -> str:
        """The selector as text; `Selector` of it is equal to this one."""
        return ", ".join(map(str, self.terms))

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"select({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        """Equal if the terms are."""
        return isinstance(other, Selector) and self.terms == other.terms

    def __hash__(self) -> int:
        """Equal selectors have equal hashes."""
        return hash(self.terms)

    def on(self, model: nn.Module) -> Selection:
        """Return the selected sites of a model.

        Raises:
            NoSiteMatched: When a term selects nothing; the message names the nearest paths.
            NoSuchKind: When the path exists but not with this kind.
        """
        layout = ModelLayout(model)
        places: dict[Site, SitePlace] = {}
        for term in self.terms:
            found = layout.find(term)
            if term.excluded:
                places = _excluding(places, term, {_key(p.site, term) for p in found})
            else:
                places |= {p.site: p for p in _once(found, places)}
        if not places:
            raise NoSiteMatched(
                f'"{self}" leaves no site: its exclusions remove everything that it selects'
            )
        return Selection(self, tuple(places.values()))


Selectors: TypeAlias = str | Selector | Iterable[str | Selector]
"""Everything that selects sites: a text, a `Selector`, or several, which select the sites of all."""


def selects(given: object) -> bool:
    """Whether an argument is meant as a selector, and not as an action or a value."""
    if isinstance(given, (str, Selector)):
        return True
    return isinstance(given, Iterable) and not (
        callable(given) or hasattr(given, "bind") or isinstance(given, Tensor)
    )


def _terms(given: Selectors) -> tuple[Term, ...]:
    """Return the terms of a selector, or of several; those with ``!`` take sites away from what comes before them.

    Raises:
        SelectorError: If a text cannot be read, one is no text, or there is none.
    """
    if isinstance(given, str):
        return parse(given)
    if isinstance(given, Selector):
        return given.terms
    several = list(given) if isinstance(given, Iterable) else [given]
    odd = [one for one in several if not isinstance(one, (str, Selector))]
    if odd:
        advice = (
            "; print(kedge.sites(model)) lists the paths of its modules"
            if isinstance(odd[0], nn.Module)
            else ""
        )
        raise SelectorError(
            f'{described(odd[0])} is not the text of a selector, such as "layer4"{advice}'
        )
    if not several:
        raise SelectorError(
            'an empty list selects nothing; name at least one site, such as ["layer4"]'
        )
    return parse(", ".join(map(str, several)))


def _key(site: Site, excluding: Term) -> tuple[str, str | None, int | None]:
    """The key that an excluding term compares: kind and call only if it names them."""
    return (
        site.path,
        site.kind if excluding.kind else None,
        None if excluding.call is None else site.call,
    )


def _excluding(places: dict[Site, SitePlace], term: Term, gone: set[Any]) -> dict[Site, SitePlace]:
    """Return the places without those that a term excludes; a pattern of operations loses the excluded operations.

    A term without an operation excludes the operations too if it names no kind: ``!layer1`` is all
    of layer1.
    """
    kept = {}
    for site, place in places.items():
        hit = _key(site, term) in gone
        if site.op is None or term.op is None:
            if not hit or (term.kind is not None if site.op else term.op is not None):
                kept[site] = place
        elif not hit:
            kept[site] = place
        elif not means_op(term.op, site.op):
            kept[site] = replace(place, without=(*place.without, term.op))
    return kept


def _once(found: list[SitePlace], known: dict[Site, SitePlace]) -> Iterator[SitePlace]:
    """Yield the places without operations that the selector named before: an operation fires once for each action."""
    operations = (
        [o for o in known if o.op is not None] if any(place.site.op for place in found) else []
    )
    for place in found:
        site = place.site
        before = [
            o.op
            for o in operations
            if o.op is not None and site.op and replace(o, op=site.op) == site
        ]
        if site.op is None or not any(means_op(op, site.op) for op in before):
            yield replace(place, without=tuple(before)) if before else place


@called_as('kedge.select("layer4"), and .on(model) of the result has its sites')
def select(text: Selectors) -> Selector:
    """Parse a selector, to list the sites that it matches on a model.

    Args:
        text: A selector such as ``"layer4:out"``, or a list of them.

    Returns:
        The selector. `kedge.hook` takes it in place of a text, and ``.on(model)`` returns its
        sites.

    Raises:
        SelectorError: If the text cannot be read; the message marks the place.

    Examples:
        >>> print(kedge.select("**{Conv2d}, fc").on(model))
        "**{Conv2d}, fc" matches 2 sites:
        conv:out  Conv2d
        fc:out    Linear
    """
    return Selector(text)


class Selection(notebook.Printed):
    """The sites of a selector on one model: it prints, counts and iterates them."""

    def __init__(self, selector: Selector, places: tuple[SitePlace, ...]) -> None:
        self.selector, self.places = selector, places

    def __len__(self) -> int:
        """The number of sites."""
        return len(self.places)

    def __iter__(self) -> Iterator[Site]:
        """The sites in the model's order."""
        return (p.site for p in self.places)

    def __str__(self) -> str:
        """One line a site, with the type of its module.

        Of many, those of blocks that are alike share one.
        """
        rows = self._rows()
        width = max(len(name) for name, _ in rows)
        lines = [f"{name:{width}}  {kind}" for name, kind in rows]
        return "\n".join([f"{self._title()}:", *lines])

    def _repr_html_(self) -> str:
        return notebook.table(("site", "type"), self._rows(), title=self._title(), align="mm")

    def _title(self) -> str:
        return f'"{self.selector}" matches {counted(len(self), "site")}'

    def _rows(self) -> list[tuple[str, str]]:
        folding = Folding[SitePlace](
            lambda place: str(place.site), lambda place: type(place.module).__name__
        )
        return [
            (one.name, type(one.members[0].module).__name__) for one in folding.shown(self.places)
        ]


_T = TypeVar("_T")


def _candidates(named: dict[str, _T], term: Term) -> dict[str, _T]:
    """The candidates for a term: only the one of its name if it is literal, which saves a search of large models."""
    name = term.literal
    return {name: named[name]} if name is not None and name in named else named


def runs(module: nn.Module) -> bool:
    """Whether a module has a forward of its own.

    Lists and dicts of modules have none.
    """
    return (
        getattr(type(module), "forward", None) is not nn.Module.forward
    )  # TorchScript's have none of their own


def type_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's class and of its base classes, nearest first."""
    return tuple(c.__name__ for c in type(module).__mro__ if c not in (object, nn.Module))


class ModelLayout:
    """The modules and parameters of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise NoSiteMatched(f"selectors need a torch.nn.Module, not {not_a_model(model)}")
        self.modules: dict[str, nn.Module] = named_modules(model)
        self.params = named_parameters(model)
        self.first = {id(m): name for name, m in reversed(self.modules.items())}
        self.first_param = {id(p): name for name, p in reversed(self.params.items())}

    def owner(self, param: str) -> nn.Module:
        """The module that a parameter's qualified name belongs to."""
        return self.modules[param.rpartition(".")[0]]

    def find(self, term: Term) -> list[SitePlace]:
        """Every place that a term selects, in the model's order and each once."""
        if term.op is not None and term.kind not in (None, *OP_KINDS):
            has = ", ".join(f":{kind}" for kind in OP_KINDS)
            raise NoSuchKind(f'"{term}": an operation has no :{term.kind}; it has {has}')
        if term.kind in TENSOR_KINDS + NODE_KINDS:
            has = ", ".join(MODULE_KINDS + PARAM_KINDS)
            raise NoSuchKind(
                f'"{term}": :{term.kind} belongs to tensors and nodes; a model has {has}'
            )
        found = self._params(term) if term.kind in PARAM_KINDS else self._modules(term)
        if not found and not (term.excluded and term.literal is None):
            raise self._nothing(term)
        return found

    def _modules(self, term: Term) -> list[SitePlace]:
        hits = {
            id(m): m
            for name, m in _candidates(self.modules, term).items()
            if (runs(m) or term.literal == name) and term.matches(name, type_names(m))
        }
        if any(not runs(m) for m in hits.values()):
            raise self._never_called(term)
        kind = term.kind or "out"
        many = term.literal is None
        return [
            SitePlace(Site(self.first[i], kind, term.leaf, term.call, term.op), m, many=many)
            for i, m in hits.items()
        ]

    def _params(self, term: Term) -> list[SitePlace]:
        candidates = _candidates(self.params, term)
        hits = {
            id(p): p for n, p in candidates.items() if term.matches(n, type_names(self.owner(n)))
        }
        names = [(self.first_param[i], p) for i, p in hits.items()]
        return [
            SitePlace(Site(n, term.kind or "param", term.leaf, term.call), self.owner(n), p)
            for n, p in names
        ]

    def _never_called(self, term: Term) -> NoSuchKind:
        module = self.modules[term.literal or ""]
        inside = [
            escape(self.first[id(c)]) for c in own_children(module).values() if c is not None
        ][:3]
        return NoSuchKind(
            f'"{term}" is a {type(module).__name__}, which holds modules and is '
            "never called itself; hook the "
            f"modules inside: {', '.join(inside) or 'it is empty'}"
        )

    def _nothing(self, term: Term) -> NoSiteMatched | NoSuchKind:
        path = term.literal
        if path is not None and path in self.params and term.kind not in PARAM_KINDS:
            kinds = ", ".join(f'"{escape(path)}:{k}"' for k in PARAM_KINDS)
            return NoSuchKind(
                f'"{path}" is a parameter and has no :{term.kind or "out"}; it has {kinds}'
            )
        if path is not None and path in self.modules and term.kind in PARAM_KINDS:
            own = [n for n in self.params if n.rpartition(".")[0] == path]
            has = "its parameters are " + ", ".join(own) if own else "it owns none"
            kinds = ", ".join(MODULE_KINDS)
            return NoSuchKind(
                f'"{path}" is a module and has no :{term.kind}; {has}; kinds of modules: {kinds}'
            )
        return NoSiteMatched(f'"{term}" matches nothing in this model; {self._nearest(term)}')

    def _nearest(self, term: Term) -> str:
        known = list(
            self.params
            if term.kind in PARAM_KINDS
            else (n for n, m in self.modules.items() if runs(m))
        )
        if term.types:
            names = sorted({type(m).__name__ for m in self.modules.values()})
            return f"its modules are of types {', '.join(names)}"
        plain = re.sub(r"[*?\\]", "", ".".join(term.path)).strip(".")
        known = [name for name in known if name] or known  # the root has no path to speak of
        near = difflib.get_close_matches(plain, known, 3, 0.3) or known[:3]
        paths = "the nearest paths are " + (
            ", ".join(f'"{n}"' for n in near) or "none: it is empty"
        )
        return paths + self._as_operation(term)

    def _as_operation(self, term: Term) -> str:
        """Return how to select a function of PyTorch that a forward calls, if a path ends in the name of one."""
        parent, _, name = (term.literal or "").rpartition(".")
        if term.kind not in (None, *OP_KINDS) or term.op is not None or parent not in self.modules:
            return ""
        if not any(callable(getattr(owner, name, None)) for owner in (functional, Tensor)):
            return ""
        return f'; a function that a forward calls has a slash before it: "{escape(parent)}/{name}"'
