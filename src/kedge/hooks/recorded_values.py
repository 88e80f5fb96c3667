"""What the recording action of a hook holds, as a mapping by the names of sites."""

from __future__ import annotations

import difflib
from collections.abc import (
    Callable,
    Collection,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    ValuesView,
)
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

from kedge.errors import NotRecorded, ReadError, SelectorError
from kedge.flow import Readable, Record, V_co
from kedge.hooks.attach import Attachments
from kedge.hooks.firing.tap import Tap
from kedge.hooks.ledger import Ledger
from kedge.notebook import SHOWN, Table
from kedge.sites.language import parse
from kedge.sites.names import matching
from kedge.sites.select import Selector, Selectors, selects, type_names
from kedge.sites.site import Site, escape, short

_SHOWN = 12
_V = TypeVar("_V")


@runtime_checkable
class Listed(Protocol):
    """A recording action that lists the names of its values."""

    def names(self) -> list[str]:
        """Return the names, in the order in which the values came."""

    def table(self, names: Collection[str] | None = None) -> Table:
        """Return a table of the values, of some names or of all."""


class NamedValues(Mapping[str, V_co]):
    """Values by the names of their sites, in the order in which they came.

    Two such mappings are never equal.
    """

    def names(self) -> list[str]:
        """Return the names."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def __len__(self) -> int:
        return len(self.names())

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return object.__hash__(self)

    def keys(self) -> KeysView[str]:
        """Return the names that there are now."""
        return dict.fromkeys(self.names()).keys()

    def values(self) -> ValuesView[V_co]:
        """Return the values that there are now, not copied."""
        return self._now().values()

    def items(self) -> ItemsView[str, V_co]:
        """Return the names and values that there are now; the values are not copied."""
        return self._now().items()

    def _now(self) -> dict[str, V_co]:
        return {name: self[name] for name in self.names()}

    def _ipython_key_completions_(self) -> list[str]:
        return self.names()


class ChosenValues(NamedValues[_V]):
    """The values that a pattern selected, as they were when it was read."""

    def __init__(self, values: Mapping[str, _V], table: Table | None) -> None:
        self._values = dict(values)
        self._table = table

    def __getitem__(self, name: str) -> _V:
        """Return the value of a name.

        Raises:
            NotRecorded: If there is none.
        """
        if name not in self._values:
            nearest = _nearest(name, self.names())
            raise NotRecorded(f"{name!r} is not among the selected values{nearest}")
        return self._values[name]

    def names(self) -> list[str]:
        """Return the names."""
        return list(self._values)

    def __str__(self) -> str:
        if self._table:
            return self._table.text()
        return ", ".join(self._values)

    def __repr__(self) -> str:
        if self._table:
            return self._table.text(SHOWN)
        return f"<values of {self}>"

    def _repr_html_(self) -> str | None:
        if self._table:
            return self._table.html()
        return None


@dataclass(eq=False, repr=False)
class RecordedValues(NamedValues[V_co]):
    """The values that the one recording action of a hook holds.

    Attributes:
        session: The session's `Attachments`.
        taps: The taps of this hook.
        actions: Its actions, in order.
    """

    session: Attachments
    taps: list[Tap]
    actions: tuple[Any, ...]
    _known: HookedPaths | None = field(default=None, init=False)

    @overload
    def __getitem__(self, name: str) -> V_co: ...

    @overload
    def __getitem__(self, name: Selector | list[str] | tuple[str, ...]) -> NamedValues[V_co]: ...

    def __getitem__(self, name: Selectors) -> Any:
        """Return the value recorded under a site's name, such as ``"layer4"`` or ``"layer4#1:out.grad"``.

        A pattern, such as ``"layer*"``, or a list returns a mapping of all values that it selects.
        Each text of a list must select some.

        Raises:
            NotRecorded: If there is none; the message has the cause, and the nearest names. It is a
                KeyError.
            SeveralRecorded: If the name matches several values; the message lists their names.
            Overwritten: If the program changed the tensor in place after it was recorded.
        """
        if not selects(name) or isinstance(name, (bytes, bytearray)):
            raise NotRecorded(
                f"{name!r} is not the name of a site, which is text such as "
                f'"layer4"{_nearest(name, self.names())}'
            )
        if isinstance(name, str) and _is_single(text := self._text(name)):
            return self._action().read(self._canonical(text), self._why)
        if isinstance(name, (str, Selector)):
            return self._chosen(self._selector([name]), each=False)
        return self._chosen(self._selector(name), each=True)

    def _selector(self, parts: Iterable[str | Selector]) -> Selector:
        given: list[str | Selector] = []
        for part in parts:
            if isinstance(part, str):
                given.append(self._text(part))
            else:
                given.append(part)
        return Selector(given)

    def __contains__(self, name: object) -> bool:
        """Whether there is a value under a name, also if it was overwritten since, or if the name matches several.

        Raises:
            SelectorError: If it is a text, or a list, that cannot be read as a selector.
        """
        try:
            self[name]  # type: ignore[call-overload]
        except NotRecorded:
            return False
        except ReadError:
            self._action()
        return True

    def records(self, name: str) -> list[Record]:
        """Return every kept `Record` under a site's name, in order of arrival.

        Of `kedge.measure` the statistics.
        """
        return self._action().records(self._canonical(self._text(name)))

    def names(self) -> list[str]:
        """Return the names of the values, in the order in which they came.

        Each reads one value, unless several threads, or several tensors that were hooked under one
        name, recorded under it: then reading it, also by `dict` or `items`, raises
        `SeveralRecorded`, and `records` returns all of them.
        """
        action = self._action()
        if isinstance(action, Listed):
            return action.names()
        sites = [tap.site for tap in self.taps if action.records(str(tap.site))]
        return list(dict.fromkeys(map(short, sites)))

    def ledger(self) -> Ledger:
        """Return how often each of its sites fired, or why it did not."""
        return Ledger.of(self.taps, self.session)

    def _action(self) -> Readable[V_co]:
        found = [action for action in self.actions if isinstance(action, Readable)]
        if len(found) != 1:
            raise ReadError(
                f"this hook has {len(found)} recording actions, so a name does not "
                "select one record; give it exactly one kedge.record() or "
                "kedge.measure()"
            )
        return found[0]

    def _chosen(self, selector: Selector, *, each: bool) -> ChosenValues[V_co]:
        """Return the selected values; with `each`, every term must select some."""
        terms = [
            "!" * term.excluded + self._canonical(str(replace(term, excluded=False)))
            for term in selector.terms
        ]
        kinds = {tap.site.kind for tap in self.taps}
        names, idle = matching(Selector(terms), self.names(), kinds, self._types)
        if not names or (each and idle):
            known = [f'"{name}"' for name in self.names()[:_SHOWN]]
            there = ", ".join(known) or "none yet"
            wanted = ", ".join(map(str, idle)) if names else str(selector)
            raise NotRecorded(f'nothing was recorded under "{wanted}"; the names are {there}')

        action = self._action()
        table = action.table(names) if isinstance(action, Listed) else None
        return ChosenValues({name: self[name] for name in names}, table)

    def _types(self) -> Callable[[str], tuple[str, ...]]:
        """Return a function from a path to the class names of its module.

        A parameter has those of the module that owns it.
        """
        taps = {tap.site.path: tap for tap in self.taps}
        known: dict[str, tuple[str, ...]] = {}

        def types(path: str) -> tuple[str, ...]:
            if path in known:
                return known[path]

            module = None
            if path in taps:
                module = self.session.module_of(taps[path].gate)
            if module is None:
                models = [target.model() for target in self.session.targets.values()]
                why = "which is not a module, or no longer exists"
                if all(model is None for model in models):
                    why = "because the model is gone"
                raise NotRecorded(
                    f'the type in braces cannot be determined for "{path}", {why}; '
                    "name paths instead"
                )
            known[path] = type_names(module)
            return known[path]

        return types

    def _why(self, name: str) -> str:
        path = parse(name)[0].literal
        why = self.ledger().why(name)
        if any(tap.site.path == path for tap in self.taps):
            return why
        return why + _nearest(name, self.names())

    def _text(self, name: str) -> str:
        """Return a name in the site language: PyTorch's name of a module is one as it stands, "" that of the model."""
        try:
            parse(name)
        except SelectorError:
            if all(tap.site.path != name for tap in self.taps):
                raise
            return escape(name) or ":out"
        return name

    def _paths(self) -> frozenset[str]:
        """Return the paths of the hooked sites."""
        taps = self.taps
        if not taps:
            return frozenset()
        known = self._known
        if known is None or known.count != len(taps) or known.last is not taps[-1]:
            paths = frozenset(tap.site.path for tap in taps)
            known = self._known = HookedPaths(len(taps), taps[-1], paths)
        return known.paths

    def _canonical(self, name: str) -> str:
        """Return the name under which a site fires: the module's first name, and the names of arguments, not positions."""
        term = parse(name)[0]
        paths = self._paths()
        path = term.literal
        if path is not None and path not in paths:
            targets = self.session.targets.values()
            first_names = (target.first_name(path) for target in targets)
            path = next((first for first in first_names if first in paths), path)

        leaf = term.leaf
        of_inputs = term.op is None and term.kind in ("in", "in.grad", "in.share")
        if leaf is not None and of_inputs:
            gates = (tap.gate for tap in self.taps if tap.site.path == path)
            renaming = (gate for gate in gates if hasattr(gate, "canonical"))
            leaf = next((gate.canonical(leaf) for gate in renaming), leaf)

        if path is None or (path, leaf) == (term.literal, term.leaf):
            return name
        site = str(Site(path, term.kind or "", leaf, term.call, term.op))
        if term.kind:
            return site
        return site.removesuffix(":")


@dataclass(frozen=True)
class HookedPaths:
    """The paths of the taps of a hook, as long as no tap is added or removed.

    Attributes:
        count: The number of taps.
        last: The last tap.
        paths: The paths.
    """

    count: int
    last: Tap
    paths: frozenset[str]


def _is_single(text: str) -> bool:
    terms = parse(text)
    op = terms[0].op
    return (
        len(terms) == 1
        and terms[0].literal is not None
        and (op is None or not set(op[0]) & set("*?["))
    )


def _nearest(name: object, names: list[str]) -> str:
    """Return the end of a message: the names that are like one that is missing.

    Empty if there are none.
    """
    near = difflib.get_close_matches(str(name), names, 3, 0.5)
    if not near:
        return ""
    return "; the nearest names are " + ", ".join(f'"{one}"' for one in near)
