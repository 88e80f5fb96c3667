"""The site language: from text to terms and back."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, replace
from functools import cached_property

from kedge.errors import SelectorError
from kedge.sites.site import ALL_KINDS, KINDS, Site, op_text


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
        text += "{" + ",".join(self.types) + "}" if self.types else ""
        text += "" if self.call is None else f"#{self.call}"
        text += op_text(self.op)
        text += f":{self.kind}" if self.kind or not text else ""
        return text + (f"[{self.leaf}]" if self.leaf is not None else "")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """The path as a regular expression over a dotted name."""
        return re.compile(_path_regex(self.path), re.DOTALL)

    def matches(self, path: str, types: tuple[str, ...]) -> bool:
        """Whether it selects a module or parameter of this path and these class names."""
        if (
            self.literal is not None
        ):  # no pattern to compile: there may be such a term for each of 10,000 modules
            return path == self.literal
        named = self.pattern.fullmatch(f".{path}" if path else "") is not None
        return named and (not self.types or any(t in types for t in self.types))

    @cached_property
    def literal(self) -> str | None:
        """The path, if the pattern can select only one."""
        if self.types or re.search(r"(?<!\\)(\\\\)*[*?\[]", ".".join(self.path)):
            return None
        return re.sub(r"\\(.)", r"\1", ".".join(self.path), flags=re.DOTALL)

    def names(self, site: Site) -> bool:
        """Whether this is the literal name of a site: of its module, and of its operation if it has one.

        The operation that made a saved tensor may be left out: the number of the save tells it
        apart.
        """
        if self.literal != site.path or (
            (self.op is None) != (site.op is None) and site.kind != "saved"
        ):
            return False
        return (
            self.op is None
            or site.op is None
            or (self.op[0] == site.op[0] and self.op[1] in (None, site.op[1]))
        )


@functools.lru_cache(maxsize=1024)
def op_pattern(name: str) -> re.Pattern[str]:
    """The pattern of an operation's name as a regular expression."""
    return re.compile(_segment_regex(name), re.DOTALL)


def means_op(pattern: tuple[str, int | None], op: tuple[str, int | None]) -> bool:
    """Whether a pattern of operations selects one, or all of a name if its index is None."""
    return pattern[1] in (None, op[1]) and op_pattern(pattern[0]).fullmatch(op[0]) is not None


def _path_regex(segments: tuple[str, ...]) -> str:
    """Return a regular expression over a path with a dot before each segment, so that ``**`` may match none."""
    return "".join(
        r"(?:\.[^.]+)*" if s == "**" else r"\." + _segment_regex(s) for s in segments if s
    )


def _segment_regex(segment: str) -> str:
    pieces = re.findall(r"\\.|\[[^\]]*\]|.", segment, re.DOTALL)
    return "".join(_piece_regex(p) for p in pieces)


def _piece_regex(piece: str) -> str:
    if piece in ("*", "?"):
        return "[^.]" + ("*" if piece == "*" else "")
    if piece.startswith("[") and len(piece) > 1:
        inner = piece[1:-1]
        negated, chars = inner.startswith("!"), inner.removeprefix("!")
        pieces = re.findall(r"(.)-(.)|(.)", chars, re.DOTALL)
        inside = "".join(
            re.escape(one) or f"{re.escape(low)}-{re.escape(high)}" for low, high, one in pieces
        )
        return r"(?!\.)[" + "^" * negated + inside + "]"
    return re.escape(piece.removeprefix("\\"))


class _Reader:
    """A reader of the site language that keeps the position for the caret of an error."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def error(self, problem: str, at: int | None = None, advice: str = "") -> SelectorError:
        at = self.at if at is None else at
        lines = [
            f"cannot read the selector, column {at + 1}: {problem}",
            f"  {self.text}",
            f"  {' ' * at}^",
        ]
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
        """Return the characters up to one of the stops.

        Escapes and character classes are read whole.
        """
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
        if any(
            low > high
            for low, high in re.findall(r"(.)-(.)", self.text[self.at + 1 : end], re.DOTALL)
        ):
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
                'a number must follow "#"', start, 'calls are counted from 0: "encoder#2:out"'
            )
        return int(self.text[start : self.at])

    def term(self) -> Term:
        self.spaces()
        excluded = self.accept("!")
        path = self.path()
        term = Term(path, excluded=excluded)
        if self.accept("{"):
            start = self.at - 1
            term = replace(term, types=tuple(t.strip() for t in self.enclosed("}").split(",")))
            if "" in term.types:
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
                "a path is missing here", start, 'write ":out" for the root, "**" for everything'
            )
        segments = tuple(
            re.findall(r"(?:\\.|\[[^\]]*\]|[^.\\\[])+|(?<=\.)(?=\.|$)|^(?=\.)", text, re.DOTALL)
        )
        if "" in segments:
            raise self.error(
                "an empty segment between dots", start, f"the path was read as {list(segments)}"
            )
        odd = next(
            (s for s in segments if "**" in re.sub(r"\\.|\[[^\]]*\]", "", s) and s != "**"), None
        )
        if odd is not None:
            raise self.error(
                '"**" must stand alone between dots',
                start + text.find(odd),
                'within a name write "*"',
            )
        return segments

    def op(self) -> tuple[str, int | None]:
        start = self.at
        name = self.until("#:,! \t\n")
        if not name:
            raise self.error(
                'the name of an operation must follow "/"', start, 'such as "layer1.0/relu:out"'
            )
        return name, self.index() if self.accept("#") else None

    def kind(self) -> str:
        start = self.at
        kind = self.until("[,! \t\n")
        if kind not in ALL_KINDS:
            near = difflib.get_close_matches(kind, ALL_KINDS, 1)
            advice = f'did you mean ":{near[0]}"? ' if near else ""
            raise self.error(
                f'unknown kind "{kind}"', start, f"{advice}kinds are {', '.join(KINDS)}"
            )
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
        raise reader.error(f'unexpected "{reader.peek()}"')
    if all(t.excluded for t in terms):
        raise reader.error(
            'every part is excluded with "!"', 0, 'first select sites: "**:out, !**{Dropout}"'
        )
    return tuple(terms)


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
