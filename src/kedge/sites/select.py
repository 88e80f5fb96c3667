"""Selectors: text that names places.

A `Selector` is independent of a model; on a model it resolves to a `Selection`, its sites there. A
selector without sites is an error that names the nearest ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn

from kedge import notebook
from kedge.calls.arguments import called_as, not_a_model
from kedge.errors import NoSiteMatched, NoSuchKind, SelectorError
from kedge.short_text import counted
from kedge.sites.folding import Folding
from kedge.sites.language import Term, means_op, parse
from kedge.sites.nearest import is_type_of_modules, kind_of_no_model, nearest, not_a_selector
from kedge.sites.site import (
    MODULE_KINDS,
    NODE_KINDS,
    OP_KINDS,
    PARAM_KINDS,
    TENSOR_KINDS,
    VARIABLE,
    VARIABLE_KINDS,
    Site,
    escape,
)
from kedge.sites.variables import check_variables, has_variable
from kedge.torch_internals.module_tables import named_modules, named_parameters, own_children
from kedge.torch_internals.torchscript import called_by_torchscript, class_name, is_scripted


@dataclass(frozen=True)
class SitePlace:
    """A site together with its module or parameter.

    Attributes:
        site: The site, under the first name of its module or parameter.
        module: The module; for a parameter the one that owns it.
        param: The parameter of a parameter's site.
        without: Operations that the site excludes, although its pattern would select them.
        many: Whether a pattern selected it, so that it may have no such operation, for one.
        silent: Whether nothing fires there because TorchScript runs it; see Note [Called by
            TorchScript].
    """

    site: Site
    module: nn.Module
    param: nn.Parameter | None = None
    without: tuple[tuple[str, int | None], ...] = ()
    many: bool = False
    silent: bool = False


class Selector:
    """A selection of places by text, or by several texts.

    On a model it resolves to a `Selection`.
    """

    def __init__(self, text: Selectors) -> None:
        self.terms = _terms(text)

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
                gone = {_key(place.site, term) for place in found}
                places = _excluding(places, term, gone)
            else:
                places |= {place.site: place for place in _once(found, places)}
        if not places:
            raise NoSiteMatched(
                f'"{self}" leaves no site: its exclusions remove everything that it selects'
            )
        return Selection(self, tuple(places.values()))


class ModulesSelector(Selector):
    """One kind of site of modules that are known already, so that none is searched for.

    Args:
        modules: Modules of one model, by their first paths in it.
        kind: The kind of the sites.
    """

    def __init__(self, modules: Mapping[str, nn.Module], kind: str) -> None:
        terms = (Term((escape(path),) if path else (), kind=kind) for path in modules)
        self.terms = tuple(terms)
        self._modules = modules
        self._kind = kind

    def on(self, model: nn.Module) -> Selection:  # noqa: ARG002 - it has the modules
        """Return the sites in the model that has the modules."""
        places = (
            SitePlace(Site(path, self._kind), module) for path, module in self._modules.items()
        )
        return Selection(self, tuple(places))


Selectors: TypeAlias = str | Selector | Iterable[str | Selector]
"""Everything that selects sites: a text, a `Selector`, or several, which select the sites of all."""


def selects(given: object) -> bool:
    """Whether an argument is meant as a selector, and not as an action or a value.

    A class of modules is, although it is none: no action makes a module of a value.
    """
    if isinstance(given, (str, Selector)) or is_type_of_modules(given):
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
    several: list[Any] = [given]
    if isinstance(given, Iterable) and not is_type_of_modules(given):
        several = [*given]
    odd = [one for one in several if not isinstance(one, (str, Selector))]
    if odd:
        raise SelectorError(not_a_selector(odd))
    if not several:
        raise SelectorError(
            'an empty list selects nothing; name at least one site, such as ["layer4"]'
        )
    return parse(", ".join(map(str, several)))


def _key(site: Site, excluding: Term) -> tuple[str, str | None, int | None]:
    """The key that an excluding term compares: kind and call only if it names them."""
    kind = site.kind if excluding.kind else None
    call = site.call if excluding.call is not None else None
    return site.path, kind, call


def _excluding(places: dict[Site, SitePlace], term: Term, gone: set[Any]) -> dict[Site, SitePlace]:
    """Return the places without those that a term excludes.

    A pattern of operations loses the excluded operations. A term without an operation excludes the
    operations too if it names no kind: ``!layer1`` is all of layer1.
    """
    kept = {}
    for site, place in places.items():
        if _key(site, term) not in gone:
            kept[site] = place
        elif term.op is None:
            if site.op is not None and term.kind is not None:
                kept[site] = place
        elif site.op is None:
            kept[site] = place
        elif not means_op(term.op, site.op):
            kept[site] = replace(place, without=(*place.without, term.op))
    return kept


def _once(found: list[SitePlace], known: dict[Site, SitePlace]) -> Iterator[SitePlace]:
    """Yield the places without operations that the selector named before.

    An operation fires once for each action.
    """
    operations: list[Site] | None = None
    for place in found:
        op = place.site.op
        if op is None:
            yield place
            continue
        if operations is None:
            operations = [site for site in known if site.op is not None]
        alike = (site for site in operations if replace(site, op=op) == place.site)
        before = tuple(site.op for site in alike if site.op is not None)
        if any(means_op(named, op) for named in before):
            continue
        if before:
            yield replace(place, without=before)
        else:
            yield place


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
        self.selector = selector
        self.places = places

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
        rows = self._rows()
        return notebook.table(("site", "type"), rows, title=self._title(), align="mm")

    def _title(self) -> str:
        return f'"{self.selector}" matches {counted(len(self), "site")}'

    def _rows(self) -> list[tuple[str, str]]:
        folding = Folding[SitePlace](lambda place: str(place.site), _class_name)
        return [(one.name, _class_name(one.members[0])) for one in folding.shown(self.places)]


def _class_name(place: SitePlace) -> str:
    return class_name(place.module)


_T = TypeVar("_T")


def _candidates(named: dict[str, _T], term: Term) -> dict[str, _T]:
    """The candidates for a term.

    Only the one of its name if it is literal, which saves a search of large models.
    """
    name = term.literal
    if name is not None and name in named:
        return {name: named[name]}
    return named


def runs(module: nn.Module) -> bool:
    """Whether a module has a forward of its own.

    Lists and dicts of modules have none.
    """
    # TorchScript's have none of their own.
    return getattr(type(module), "forward", None) is not nn.Module.forward


def type_names(module: nn.Module) -> tuple[str, ...]:
    """The names of a module's class and of its base classes, nearest first.

    In TorchScript the first is the class that the module was made from.
    """
    names = [c.__name__ for c in type(module).__mro__ if c not in (object, nn.Module)]
    if is_scripted(module):
        names.insert(0, class_name(module))
    return tuple(names)


class ModelLayout:
    """The modules and parameters of a model, by name."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise NoSiteMatched(f"selectors need a torch.nn.Module, not {not_a_model(model)}")
        self.modules: dict[str, nn.Module] = named_modules(model)
        self.params = named_parameters(model)
        self.silent = called_by_torchscript(self.modules)
        self.first = {id(m): name for name, m in reversed(self.modules.items())}
        self.first_param = {id(p): name for name, p in reversed(self.params.items())}

    def owner(self, param: str) -> nn.Module:
        """The module that a parameter's qualified name belongs to."""
        return self.modules[param.rpartition(".")[0]]

    def find(self, term: Term) -> list[SitePlace]:
        """Every place that a term selects, in the model's order and each once."""
        if term.op is not None:
            what = "an operation"
            kinds: tuple[str, ...] = OP_KINDS
            if term.op[0].endswith(VARIABLE):
                what = "a variable"
                kinds = VARIABLE_KINDS
            if term.kind not in (None, *kinds):
                has = ", ".join(f":{kind}" for kind in kinds)
                raise NoSuchKind(f'"{term}": {what} has no :{term.kind}; it has {has}')
        if term.kind in TENSOR_KINDS + NODE_KINDS:
            has = ", ".join(MODULE_KINDS + PARAM_KINDS)
            raise NoSuchKind(kind_of_no_model(term, self.params, f"a model has {has}"))
        of_params = term.kind in PARAM_KINDS
        found = self._params(term) if of_params else self._modules(term)
        if not found and not (term.excluded and term.literal is None):
            raise self._nothing(term)
        if term.op is not None and term.op[0].endswith(VARIABLE) and not term.excluded:
            check_variables(term, [place.module for place in found])
            found = [place for place in found if has_variable(place.module, term.op[0])]
        return found

    def _modules(self, term: Term) -> list[SitePlace]:
        hits: dict[int, nn.Module] = {}
        for name, module in _candidates(self.modules, term).items():
            if not runs(module) and term.literal != name:
                continue
            if term.matches(name, type_names(module)):
                hits[id(module)] = module
        if not all(map(runs, hits.values())):
            raise self._never_called(term)

        kind = term.kind or "out"
        many = term.literal is None
        places = []
        for i, module in hits.items():
            site = Site(self.first[i], kind, term.leaf, term.call, term.op)
            silent = i in self.silent or (term.op is not None and is_scripted(module))
            places.append(SitePlace(site, module, many=many, silent=silent))
        return places

    def _params(self, term: Term) -> list[SitePlace]:
        hits: dict[int, nn.Parameter] = {}
        for name, param in _candidates(self.params, term).items():
            if term.matches(name, type_names(self.owner(name))):
                hits[id(param)] = param

        kind = term.kind or "param"
        places = []
        for i, param in hits.items():
            name = self.first_param[i]
            site = Site(name, kind, term.leaf, term.call)
            owner = self.owner(name)
            silent = kind == "param" and id(owner) in self.silent
            places.append(SitePlace(site, owner, param, many=term.literal is None, silent=silent))
        return places

    def _never_called(self, term: Term) -> NoSuchKind:
        module = self.modules[term.literal or ""]
        children = [child for child in own_children(module).values() if child is not None]
        inside = [escape(self.first[id(child)]) for child in children[:3]]
        hook = ", ".join(inside) or "it is empty"
        return NoSuchKind(
            f'"{term}" is a {type(module).__name__}, which holds modules and is '
            f"never called itself; hook the modules inside: {hook}"
        )

    def _nothing(self, term: Term) -> NoSiteMatched | NoSuchKind:
        path = term.literal
        of_params = term.kind in PARAM_KINDS
        if path is not None and path in self.params and not of_params:
            kind = term.kind or "out"
            has = ", ".join(f'"{escape(path)}:{each}"' for each in PARAM_KINDS)
            return NoSuchKind(f'"{path}" is a parameter and has no :{kind}; it has {has}')
        if path is not None and path in self.modules and of_params:
            own = [name for name in self.params if name.rpartition(".")[0] == path]
            has = "it owns none"
            if own:
                has = "its parameters are " + ", ".join(own)
            kinds = ", ".join(MODULE_KINDS)
            return NoSuchKind(
                f'"{path}" is a module and has no :{term.kind}; {has}; kinds of modules: {kinds}'
            )
        called = [name for name, module in self.modules.items() if runs(module)]
        advice = nearest(term, self.modules, self.params, called)
        return NoSiteMatched(f'"{term}" matches nothing in this model; {advice}')
