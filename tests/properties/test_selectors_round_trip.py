"""For all selectors: what is printed reads back as the same."""

from __future__ import annotations

import contextlib
from collections import OrderedDict

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import nn

from kedge.errors import KedgeError, SelectorError
from kedge.sites.select import Selector, Term, parse
from kedge.sites.site import MODULE_KINDS, OP_KINDS, PARAM_KINDS, Site, escape
from tests.properties.profiles import fuzzed

few = settings(max_examples=150, deadline=None, derandomize=True, database=None)
names = st.text(
    st.characters(codec="utf-8", exclude_characters=".", exclude_categories=["Cs", "Cc", "Z"]),
    min_size=1,
    max_size=6,
)
spaced = st.text("ab *?[]{}#/:,!\\\t\n", min_size=1, max_size=6)
wild = st.one_of(
    names.map(escape),
    st.just("**"),
    st.sampled_from(["*", "?", "[a-c]", "[!x]", "lay*", "conv?", "a[01]b", "\\*x"]),
)
paths = st.lists(wild, min_size=1, max_size=4).map(tuple)
classes = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,6}", fullmatch=True)
leaves = st.from_regex(r"[a-z0-9_]{1,4}(\.[a-z0-9_]{1,4}){0,2}", fullmatch=True)
counts = st.none() | st.integers(0, 99)
ops = st.tuples(classes, counts)
#: The signs and words of the language, and what looks like them.
PIECES = [
    *"*?[]{}()#/:,!\\ .0-", "**", "..", "#-1", "#1e9", "#" + "9" * 30, "#٣", "²", "{Linear}", "{a,b}", "[a-", "[!", "[]]", "\\", "\\\n",
    "\n", "\t", "\x00", "\ud800", "ß", "İ", "out", ":out", ":out.grad", ":param", "/relu", "/relu#0", "weight", "a" * 3000, "*" * 40, "{" * 50,
]  # fmt: skip
Flow = tuple[str, tuple[str, int | None] | None]
flows = st.tuples(st.sampled_from(MODULE_KINDS), st.none()) | st.tuples(
    st.sampled_from(OP_KINDS), ops
)
terms = st.builds(
    Term,
    path=paths,
    types=st.lists(classes, max_size=3).map(tuple),
    call=counts,
    op=st.none() | ops,
    kind=st.sampled_from((*MODULE_KINDS, *PARAM_KINDS)),
    leaf=st.none() | leaves,
    excluded=st.booleans(),
)


@few
@given(st.lists(terms, min_size=1, max_size=4).filter(lambda ts: not all(t.excluded for t in ts)))
def test_every_selector_reads_back_as_printed(parts: list[Term]) -> None:
    """Reading what a selector prints gives the same terms, and printing them again the same text."""
    text = ", ".join(map(str, parts))

    assert parse(text) == tuple(parts)
    assert str(Selector(text)) == text


@few
@given(st.text("ab.*?[]{}#/:,! \\outingrad01-", max_size=16))
def test_any_text_is_read_or_pointed_at(text: str) -> None:
    """Whatever is typed either is a selector that reads back as it prints, or is an error with a caret under its text."""
    try:
        selector = Selector(text)
    except ValueError as error:
        lines = str(error).splitlines()
        assert lines[0].startswith("cannot read the selector, column ")
        assert lines[2].strip() == "^"
        assert len(lines[2]) <= len(text) + 3
        return
    assert Selector(str(selector)) == selector
    for term in selector.terms:
        assert isinstance(term.matches("a.b", ("a",)), bool)


@fuzzed
@example("#²")  # a digit, and no number
@given(st.text(max_size=40) | st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_text_at_all_is_read_or_pointed_at(text: str) -> None:
    """Any Unicode text is a selector that reads back as it prints, or an error of one caret; nothing else ever happens."""
    try:
        selector = Selector(text)
    except SelectorError as error:
        selector, told = None, str(error)
    if selector is None:
        assert told.startswith("cannot read the selector, column ")
        return
    assert Selector(str(selector)) == selector
    assert Selector(str(selector)).terms == selector.terms
    with contextlib.suppress(KedgeError):  # no such site in this model
        selector.on(nn.Sequential(nn.ReLU()))


@few
@given(st.lists(names | spaced, min_size=1, max_size=3), flows, counts, st.none() | leaves)
def test_every_site_selects_itself(
    path: list[str], flow: Flow, call: int | None, leaf: str | None
) -> None:
    """The text of a site, whatever its module is called, selects this site and no other; so does that of an operation."""
    assume(not any(hasattr(nn.Sequential(), name) for name in path))  # torch refuses such a name
    model: nn.Module = nn.ReLU()
    for name in reversed(path):
        model = nn.Sequential(OrderedDict([(name, model), (name + "x", nn.ReLU())]))
    kind, op = flow
    site = Site(".".join(path), kind, leaf, call, op)

    assert list(Selector(str(site)).on(model)) == [site]


@few
@given(
    st.lists(st.sampled_from(["a", "b", "ab", "0"]), min_size=1, max_size=4),
    st.lists(wild, min_size=1, max_size=3),
)
def test_a_wild_segment_never_reaches_over_a_dot(path: list[str], pattern: list[str]) -> None:
    """A pattern without `**` matches only paths with as many segments as it has."""
    segments = tuple("*" if p == "**" else p for p in pattern)

    if Term(segments).matches(".".join(path), ()):
        assert len(segments) == len(path)
