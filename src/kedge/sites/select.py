"""Selectors: text that says where.

A `Selector` is a value that knows no model; on a model it resolves to a `Selection`, the sites
it stands for. One that stands for nothing is an error that names the nearest sites.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from torch import nn

from kedge.errors import NoSiteMatched, NoSuchKind, SelectorError
from kedge.sites.site import ALL_KINDS, KINDS, LATER_KINDS, MODULE_KINDS, NODE_KINDS, PARAM_KINDS, TENSOR_KINDS, Site, escape


@dataclass(frozen=True)
class Term:
    """One alternative of a selector.

    Attributes:
        path: Segments of the path pattern, as written between dots.
        types: Class names in braces; empty for any.
        call: Call index after ``#``.
        op: Operation after ``/``, with its index.
        kind: What flows; None where the text leaves it out, which means ``out``.
        leaf: Leaf in brackets after the kind.
        excluded: Written with ``!`` in front: takes sites away.
    """

    path: tuple[str, ...]
    types: tuple[str, ...] = ()
    call: int | None = None
    op: tuple[str, int | None] | None = None
    kind: str | None = None
    leaf: str | None = None
    excluded: bool = False

    def __str__(self) -> str:
        """The term in the site language; reading it back gives an equal term."""
        text = "!" * self.excluded + ".".join(self.path)
        text += "{" + ",".join(self.types) + "}" if self.types else ""
        text += "" if self.call is None else f"#{self.call}"
        if self.op:
            text += f"/{self.op[0]}" + ("" if self.op[1] is None else f"#{self.op[1]}")
        text += f":{self.kind}" if self.kind or not text else ""
        return text + (f"[{self.leaf}]" if self.leaf is not None else "")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The path as a regular expression over a dotted name."""
        return re.compile(_path_regex(self.path), re.DOTALL)

    def matches(self, path: str, types: tuple[str, ...]) -> bool:
        """Tell whether a module or parameter of this path and these class names is meant."""
        named = self.pattern.fullmatch(f".{path}" if path else "") is not None
        return named and (not self.types or any(t in types for t in self.types))

    @property
    def literal(self) -> str | None:
        """The path, if the pattern can mean only one."""
        if self.types or re.search(r"(?<!\\)(\\\\)*[*?\[]", ".".join(self.path)):
            return None
        return re.sub(r"\\(.)", r"\1", ".".join(self.path))


def _path_regex(segments: tuple[str, ...]) -> str:
    """Match a path written with a dot before each segment, so that ``**`` may match none."""
    return "".join(r"(?:\.[^.]+)*" if s == "**" else r"\." + _segment_regex(s) for s in segments if s)


def _segment_regex(segment: str) -> str:
    pieces = re.findall(r"\\.|\[[^\]]*\]|.", segment, re.DOTALL)
    return "".join(_piece_regex(p) for p in pieces)


def _piece_regex(piece: str) -> str:
    if piece in ("*", "?"):
        return "[^.]" + ("*" if piece == "*" else "")
    if piece.startswith("[") and len(piece) > 1:
        inner = piece[1:-1]
        negated, chars = inner.startswith("!"), inner.lstrip("!")
        return "[" + "^" * negated + re.sub(r"([\\^\[\]])", r"\\\1", chars) + "]"
    return re.escape(piece[1:] if piece.startswith("\\") else piece)


class _Reader:
    """Reads the site language, keeping the position for the caret of an error."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def error(self, problem: str, at: int | None = None, advice: str = "") -> SelectorError:
        at = self.at if at is None else at
        lines = [f"cannot read the selector, column {at + 1}: {problem}", f"  {self.text}", f"  {' ' * at}^"]
        return SelectorError("\n".join([*lines, *([advice] if advice else [])]))

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def accept(self, char: str) -> bool:
        found = self.peek() == char
        self.at += found
        return found

    def spaces(self) -> None:
        while self.peek().isspace():
            self.at += 1

    def until(self, stops: str) -> str:
        """Take characters up to one of the stops; an escape or a character class is taken whole."""
        start = self.at
        while (char := self.peek()) and char not in stops:
            if char == "[":
                self._character_class()
            else:
                self.at += 2 if char == "\\" else 1
        if self.at > len(self.text):
            raise self.error("nothing follows the backslash", len(self.text) - 1)
        return self.text[start : self.at]

    def _character_class(self) -> None:
        end = self.text.find("]", self.at)
        if end < 0:
            raise self.error("this bracket is never closed")
        if end == self.at + 1 or self.text[self.at + 1 : end] == "!":
            raise self.error("empty brackets match nothing")
        self.at = end + 1

    def enclosed(self, close: str) -> str:
        start = self.at
        end = self.text.find(close, start)
        if end < 0:
            raise self.error(f'no "{close}" closes this', start - 1)
        if not self.text[start:end].strip():
            raise self.error("nothing stands between these", start - 1)
        self.at = end + 1
        return self.text[start:end].strip()

    def index(self) -> int:
        start = self.at
        while self.peek().isdigit():
            self.at += 1
        if start == self.at:
            raise self.error('a number must follow "#"', start, 'calls are counted from 0: "encoder#2:out"')
        return int(self.text[start : self.at])

    def term(self) -> Term:
        self.spaces()
        excluded = self.accept("!")
        path = self.path()
        term = Term(path, excluded=excluded)
        if self.accept("{"):
            term = replace(term, types=tuple(t.strip() for t in self.enclosed("}").split(",")))
        if self.accept("#"):
            term = replace(term, call=self.index())
        if self.accept("/"):
            term = replace(term, op=self.op())
        if self.accept(":"):
            term = replace(term, kind=self.kind())
            if self.accept("["):
                term = replace(term, leaf=self.enclosed("]"))
        self.spaces()
        return term

    def path(self) -> tuple[str, ...]:
        start = self.at
        text = self.until("{#/:,! \t\n}]")
        if not text:
            if self.peek() in (":", "#", "{", "/"):
                return ()
            raise self.error("a path is missing here", start, 'the root is written ":out", everything "**"')
        segments = tuple(re.findall(r"(?:\\.|\[[^\]]*\]|[^.\\\[])+|(?<=\.)(?=\.|$)|^(?=\.)", text, re.DOTALL))
        if "" in segments:
            raise self.error("an empty segment between dots", start, f"the path was read as {list(segments)}")
        odd = next((s for s in segments if "**" in s and s != "**"), None)
        if odd is not None:
            raise self.error('"**" must stand alone between dots', start + text.find(odd), 'within a name write "*"')
        return segments

    def op(self) -> tuple[str, int | None]:
        start = self.at
        name = self.until("#:,! \t\n")
        if not name:
            raise self.error('the name of an operation must follow "/"', start, 'such as "layer1.0/relu:out"')
        return name, self.index() if self.accept("#") else None

    def kind(self) -> str:
        start = self.at
        kind = self.until("[,! \t\n")
        if kind not in ALL_KINDS:
            near = difflib.get_close_matches(kind, ALL_KINDS, 1)
            advice = f'did you mean ":{near[0]}"? ' if near else ""
            raise self.error(f'unknown kind "{kind}"', start, f"{advice}kinds are {', '.join(KINDS)}")
        return kind


def parse(text: str) -> tuple[Term, ...]:
    """Read a selector's text.

    Raises:
        SelectorError: With a caret under the place that cannot be read.
    """
    reader = _Reader(text)
    if not text.strip():
        raise reader.error("it is empty", 0, 'everything that modules return is "**:out"')
    terms = [reader.term()]
    while reader.accept(","):
        terms.append(reader.term())
    if reader.peek():
        raise reader.error(f'unexpected "{reader.peek()}"')
    if all(t.excluded for t in terms):
        raise reader.error('every part is excluded with "!"', 0, 'say first what to take: "**:out, !**{Dropout}"')
    return tuple(terms)


@dataclass(frozen=True)
class Place:
    """A site together with what it is on.

    Attributes:
        site: The site, under the first name of its module or parameter.
        module: The module; for a parameter the one that owns it.
        param: The parameter of a parameter's site.
    """

    site: Site
    module: nn.Module
    param: nn.Parameter | None = None


class Selector:
    """A question about where; on a model it resolves to a `Selection`."""

    def __init__(self, text: str) -> None:
        self.terms = parse(text)

    def __str__(self) -> str:
        """The selector as text; `Selector` of it is equal to this one."""
        return ", ".join(map(str, self.terms))

    def __repr__(self) -> str:
        """As one would write it."""
        return f"select({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        """Equal if the terms are."""
        return isinstance(other, Selector) and self.terms == other.terms

    def __hash__(self) -> int:
        """Equal selectors have equal hashes."""
        return hash(self.terms)

    def on(self, model: nn.Module) -> Selection:
        """Resolve on a model.

        Raises:
            NoSiteMatched: When a term stands for nothing; the message names the nearest paths.
            NoSuchKind: When the path exists but not with this kind.
        """
        layout = Layout(model)
        places: dict[Site, Place] = {}
        for term in self.terms:
            found = layout.find(term)
            if term.excluded:
                gone = {_key(p.site, term) for p in found}
                places = {s: p for s, p in places.items() if _key(s, term) not in gone}
            else:
                places |= {p.site: p for p in found}
        if not places:
            raise NoSiteMatched(f'"{self}" leaves no site: its exclusions take everything away that it selects')
        return Selection(self, tuple(places.values()))


def _key(site: Site, excluding: Term) -> tuple[str, str | None]:
    """What an excluding term compares: the kind only if it names one."""
    return site.path, site.kind if excluding.kind else None


class Selection:
    """The sites that a selector stands for on one model: it prints, counts and iterates them."""

    def __init__(self, selector: Selector, places: tuple[Place, ...]) -> None:
        self.selector, self.places = selector, places

    def __len__(self) -> int:
        """How many sites."""
        return len(self.places)

    def __iter__(self) -> Iterator[Site]:
        """The sites in the model's order."""
        return (p.site for p in self.places)

    def __str__(self) -> str:
        """One line a site, with the type of its module."""
        width = max(len(str(s)) for s in self)
        lines = [f"{p.site!s:{width}}  {type(p.module).__name__}" for p in self.places]
        return "\n".join([f'"{self.selector}" stands for {len(self)} sites:', *lines])


def runs(module: nn.Module) -> bool:
    """Tell whether a module has a forward of its own; lists and dicts of modules have none."""
    forward = getattr(type(module).forward, "__name__", "")
    return forward != "_forward_unimplemented"


def type_names(module: nn.Module) -> tuple[str, ...]:
    """Names of a module's class and of what it inherits from, nearest first."""
    return tuple(c.__name__ for c in type(module).__mro__ if c not in (object, nn.Module))


class Layout:
    """What a model consists of, by name."""

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise NoSiteMatched(f"selectors need a torch.nn.Module, this is a {type(model).__name__}")
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.params = dict(model.named_parameters(remove_duplicate=False))
        self.first = {id(m): name for name, m in reversed(self.modules.items())}
        self.first_param = {id(p): name for name, p in reversed(self.params.items())}

    def owner(self, param: str) -> nn.Module:
        """The module that a parameter's qualified name belongs to."""
        return self.modules[param.rpartition(".")[0]]

    def find(self, term: Term) -> list[Place]:
        """Every place a term stands for, in the model's order and each once."""
        if term.op is not None or term.kind in LATER_KINDS:
            what = "operations inside a forward" if term.op is not None else '":saved" sites'
            raise NoSuchKind(f'"{term}" asks for {what}, which this version of Kedge cannot hook yet')
        if term.kind in TENSOR_KINDS + NODE_KINDS:
            raise NoSuchKind(f'"{term}": :{term.kind} is of tensors and nodes; a model has {", ".join(MODULE_KINDS + PARAM_KINDS)}')
        found = self._params(term) if term.kind in PARAM_KINDS else self._modules(term)
        if not found and not (term.excluded and term.literal is None):
            raise self._nothing(term)
        return found

    def _modules(self, term: Term) -> list[Place]:
        hits = {
            id(m): m
            for name, m in self.modules.items()
            if (runs(m) or term.literal == name) and term.matches(name, type_names(m))
        }
        if any(not runs(m) for m in hits.values()):
            raise self._never_called(term)
        kind = term.kind or "out"
        return [Place(Site(self.first[i], kind, term.leaf, term.call), m) for i, m in hits.items()]

    def _params(self, term: Term) -> list[Place]:
        hits = {id(p): p for n, p in self.params.items() if term.matches(n, type_names(self.owner(n)))}
        names = [(self.first_param[i], p) for i, p in hits.items()]
        return [Place(Site(n, term.kind or "param", term.leaf, term.call), self.owner(n), p) for n, p in names]

    def _never_called(self, term: Term) -> NoSuchKind:
        module = self.modules[term.literal or ""]
        inside = [escape(self.first[id(c)]) for c in module.children()][:3]
        return NoSuchKind(
            f'"{term}" is a {type(module).__name__}, which holds modules and is never called itself; '
            f"hook what it holds: {', '.join(inside) or 'it is empty'}"
        )

    def _nothing(self, term: Term) -> NoSiteMatched | NoSuchKind:
        path = term.literal
        if path is not None and path in self.params and term.kind not in PARAM_KINDS:
            kinds = ", ".join(f'"{escape(path)}:{k}"' for k in PARAM_KINDS)
            return NoSuchKind(f'"{path}" is a parameter and has no :{term.kind or "out"}; it has {kinds}')
        if path is not None and path in self.modules and term.kind in PARAM_KINDS:
            own = [n for n in self.params if n.rpartition(".")[0] == path]
            has = "its parameters are " + ", ".join(own) if own else "it owns none"
            return NoSuchKind(f'"{path}" is a module and has no :{term.kind}; {has}; kinds of modules: {", ".join(MODULE_KINDS)}')
        return NoSiteMatched(f'"{term}" matches nothing in this model; {self._nearest(term)}')

    def _nearest(self, term: Term) -> str:
        known = list(self.params if term.kind in PARAM_KINDS else (n for n, m in self.modules.items() if runs(m)))
        if term.types:
            names = sorted({type(m).__name__ for m in self.modules.values()})
            return f"its modules are of types {', '.join(names)}"
        plain = re.sub(r"[*?\\]", "", ".".join(term.path)).strip(".")
        near = difflib.get_close_matches(plain, known, 3, 0.3) or known[:3]
        return "the nearest paths are " + (", ".join(f'"{n}"' for n in near) or "none: it is empty")
