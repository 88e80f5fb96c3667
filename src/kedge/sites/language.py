"""The site language: from text to terms and back."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, replace
from functools import cached_property

from kedge.errors import SelectorError
from kedge.sites.site import ALL_KINDS, KINDS, VARIABLE, Site, kind_called, op_text, unescape


@dataclass(frozen=True)
class Term:
    """One alternative of a selector.

    Attributes:
        path: Segments of the path pattern, as written between dots.
        types: Class names in braces; empty for any.
        call: Call index after ``#``.
        op: Operation after ``/``, with its index.
        kind: The kind of values; None if the text leaves it out, which means ``out``.
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
        if self.types:
            text += "{" + ",".join(self.types) + "}"
        if self.call is not None:
            text += f"#{self.call}"
        text += op_text(self.op)
        if self.kind or not text:
            text += f":{self.kind}"
        if self.leaf is not None:
            text += f"[{self.leaf}]"
        return text

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The path as a regular expression over a dotted name."""
        return re.compile(_path_regex(self.path), re.DOTALL)

    def matches(self, path: str, types: tuple[str, ...]) -> bool:
        """Whether it selects a module or parameter of this path and these class names."""
        # A literal needs no pattern: there may be such a term for each of 10,000 modules.
        if self.literal is not None:
            return path == self.literal
        dotted = f".{path}" if path else ""
        if self.pattern.fullmatch(dotted) is None:
            return False
        return not self.types or any(name in types for name in self.types)

    @cached_property
    def literal(self) -> str | None:
        """The path, if the pattern can select only one."""
        if self.types or re.search(r"(?<!\\)(\\\\)*[*?\[]", ".".join(self.path)):
            return None
        return unescape(".".join(self.path))

    @property
    def is_outside(self) -> bool:
        """Whether it has an operation and no module, as ``/relu``: without a model, one outside of modules."""
        return self.op is not None and not (self.path or self.types or self.call)

    def names(self, site: Site) -> bool:
        """Whether this is the literal name of a site: of its module, and of its operation if it has one.

        The operation that made a saved tensor may be left out: the number of the save tells it
        apart.
        """
        if self.literal != site.path:
            return False
        if self.op is None or site.op is None:
            return self.op is site.op or site.kind == "saved"
        return self.op[0] == site.op[0] and self.op[1] in (None, site.op[1])


@functools.lru_cache(maxsize=1024)
def op_pattern(name: str) -> re.Pattern[str]:
    """The pattern of an operation's name as a regular expression.

    One that ends in "=" selects variables, and any other none.
    """
    no_variable = "" if name.endswith(VARIABLE) else f"(?!.*{VARIABLE}$)"
    return re.compile(no_variable + _segment_regex(name), re.DOTALL)


def means_op(pattern: tuple[str, int | None], op: tuple[str, int | None]) -> bool:
    """Whether a pattern of operations selects one, or all of a name if its index is None."""
    name, index = pattern
    return index in (None, op[1]) and op_pattern(name).fullmatch(op[0]) is not None


def _path_regex(segments: tuple[str, ...]) -> str:
    """Return a regular expression over a path with a dot before each segment.

    With the dots, ``**`` may match none.
    """
    regex = ""
    for segment in segments:
        if segment == "**":
            regex += r"(?:\.[^.]+)*"
        elif segment:
            regex += r"\." + _segment_regex(segment)
    return regex


def _segment_regex(segment: str) -> str:
    pieces = re.findall(r"\\.|\[[^\]]*\]|.", segment, re.DOTALL)
    return "".join(_piece_regex(p) for p in pieces)


def _piece_regex(piece: str) -> str:
    if piece == "*":
        return "[^.]*"
    if piece == "?":
        return "[^.]"
    if piece.startswith("[") and len(piece) > 1:
        inner = piece[1:-1]
        inside = "^" * inner.startswith("!")
        for low, high, one in re.findall(r"(.)-(.)|(.)", inner.removeprefix("!"), re.DOTALL):
            inside += re.escape(one) or f"{re.escape(low)}-{re.escape(high)}"
        return rf"(?!\.)[{inside}]"
    return re.escape(piece.removeprefix("\\"))


_SEGMENT = re.compile(r"(?:\\.|\[[^\]]*\]|[^.\\\[])+|(?<=\.)(?=\.|$)|^(?=\.)", re.DOTALL)


class _Reader:
    """A reader of the site language that keeps the position for the caret of an error."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0

    def error(self, problem: str, at: int | None = None, advice: str = "") -> SelectorError:
        if at is None:
            at = self.at
        lines = [
            f"cannot read the selector, column {at + 1}: {problem}",
            f"  {self.text}",
            f"  {' ' * at}^",
        ]
        if advice:
            lines.append(advice)
        return SelectorError("\n".join(lines))

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
        """Return the characters up to one of the stops.

        Escapes and character classes are read whole.
        """
        start = self.at
        while (char := self.peek()) and char not in stops:
            if char == "[":
                self._character_class()
            elif char == "\\":
                self.at += 2
            else:
                self.at += 1
        if self.at > len(self.text):
            raise self.error("nothing follows the backslash", len(self.text) - 1)
        return self.text[start : self.at]

    def _character_class(self) -> None:
        end = self.text.find("]", self.at)
        if end < 0:
            raise self.error("this bracket is never closed")
        inside = self.text[self.at + 1 : end]
        if inside in ("", "!"):
            raise self.error("empty brackets match nothing")
        for low, high in re.findall(r"(.)-(.)", inside, re.DOTALL):
            if low > high:
                raise self.error("this range runs backwards")
        self.at = end + 1

    def enclosed(self, close: str) -> str:
        start = self.at
        end = self.text.find(close, start)
        if end < 0:
            raise self.error(f'no "{close}" closes this', start - 1)
        if not self.text[start:end].strip():
            raise self.error("there is nothing between these", start - 1)
        self.at = end + 1
        return self.text[start:end].strip()

    def index(self) -> int:
        start = self.at
        while self.peek().isdecimal():
            self.at += 1
        if start == self.at:
            raise self.error(
                'a number must follow "#"',
                start,
                'calls are counted from 0: "encoder#2:out"',
            )
        return int(self.text[start : self.at])

    def term(self) -> Term:
        self.spaces()
        excluded = self.accept("!")
        path = self.path()
        term = Term(path, excluded=excluded)
        if self.accept("{"):
            start = self.at - 1
            types = [name.strip() for name in self.enclosed("}").split(",")]
            term = replace(term, types=tuple(types))
            if "" in types:
                raise self.error("a name is missing between these", start)
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
            raise self.error(
                "a path is missing here",
                start,
                'write ":out" for the root, "**" for everything',
            )
        segments = _SEGMENT.findall(text)
        if "" in segments:
            raise self.error(
                "an empty segment between dots",
                start,
                f"the path was read as {segments}",
            )
        for segment in segments:
            if segment != "**" and "**" in re.sub(r"\\.|\[[^\]]*\]", "", segment):
                raise self.error(
                    '"**" must stand alone between dots',
                    start + text.find(segment),
                    'within a name write "*"',
                )
        return tuple(segments)

    def op(self) -> tuple[str, int | None]:
        start = self.at
        name = self.until("#:,! \t\n")
        if not name:
            raise self.error(
                'the name of an operation must follow "/"',
                start,
                'such as "layer1.0/relu:out"',
            )
        if name.isdecimal():
            raise self.error(
                f'"{name}" is not the name of an operation, which is a function\'s',
                start,
                'a module inside another has a dot before it, such as "layer1.0"',
            )
        if self.accept("#"):
            return name, self.index()
        return name, None

    def kind(self) -> str:
        start = self.at
        kind = self.until("[,! \t\n")
        if kind not in ALL_KINDS:
            advice = f"kinds are {', '.join(KINDS)}"
            meant = kind_called(kind)
            near = [meant] if meant else difflib.get_close_matches(kind, ALL_KINDS, 1)
            if near:
                advice = f'did you mean ":{near[0]}"? {advice}'
            raise self.error(f'unknown kind "{kind}"', start, advice)
        return kind


def parse(text: str) -> tuple[Term, ...]:
    """Return the terms of a selector's text.

    Raises:
        SelectorError: With a caret under the place that cannot be read.
    """
    reader = _Reader(text)
    if not text.strip():
        raise reader.error(
            "it is empty",
            0,
            '":out" selects the output of the model itself, "**:out" that of every module',
        )
    terms = [reader.term()]
    while reader.accept(","):
        terms.append(reader.term())
    if reader.peek():
        advice = _meant_leaf(reader.text[reader.at :], terms[-1])
        if reader.text[reader.at - 1].isspace():
            advice = 'a comma joins two selectors, and a colon stands before a kind: "a, b:in"'
        raise reader.error(f'unexpected "{reader.peek()}"', advice=advice)
    if all(t.excluded for t in terms):
        raise reader.error(
            'every part is excluded with "!"',
            0,
            'first select sites: "**:out, !**{Dropout}"',
        )
    return tuple(terms)


def _meant_leaf(rest: str, term: Term) -> str:
    """Return the advice for what follows a leaf as in Python, ``out[a][0]`` or ``out[a].grad``."""
    if term.leaf is None:
        return ""
    inner = re.match(r"\[([^\]]+)\]", rest)
    if inner:
        leaf = f"{term.leaf}.{inner[1].strip()}"
        return f'dots lead into a structure: "{replace(term, leaf=leaf)}"'
    ending = re.match(r"\.\w+", rest)
    if ending and f"{term.kind}{ending[0]}" in ALL_KINDS:
        kind = f"{term.kind}{ending[0]}"
        return f'a leaf stands after the whole kind: "{replace(term, kind=kind)}"'
    return ""


def single(name: str) -> Term:
    """Read the name of one site.

    Raises:
        SelectorError: If it could mean several.
    """
    terms = parse(name)
    if len(terms) != 1 or terms[0].literal is None:
        raise SelectorError(
            f'"{name}" may match several sites; records are read by the name of '
            'one, such as "layer4"'
        )
    return terms[0]
