"""Filters: the site language on recorded names."""

from __future__ import annotations

import pytest

from kedge.errors import NoSuchKind, NoSuchSite, SelectorError
from kedge.sites.filters import SiteFilter, check_watched, chosen_sites, nearest, widened
from kedge.sites.language import parse
from kedge.store.recording import Recording

SITES = Recording.build(
    [
        {"site": "h.0.attn:out", "type": "Attention"},
        {"site": "h.0.attn:out.grad", "type": "Attention"},
        {"site": "h.0.attn.weight:param", "owner": "h.0.attn", "type": "Attention"},
        {"site": "h.0.attn.weight:update", "owner": "h.0.attn", "type": "Attention"},
        {"site": "h.0.mlp#0:out[x]", "path": "h.0.mlp", "kind": "out[x]", "type": "Mlp"},
        {"site": "h.0.mlp#1:out[x]", "path": "h.0.mlp", "kind": "out[x]", "type": "Mlp"},
        {"site": ":out", "type": "Net"},
    ]
).sites
PATHS = {path for site in SITES for path in (site.path, site.owner)}


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("h.0.attn", SITES[:4]),
        ("attn", SITES[:4]),
        ("attn:out.grad", SITES[1:2]),
        ("attn:param", SITES[2:3]),
        ("**.weight:param", SITES[2:3]),
        ("h.0.attn.weight", SITES[2:4]),
        ("**{Mlp}", SITES[4:6]),
        ("mlp#1", SITES[5:6]),
        ("attn#0", SITES[:4]),
        ("attn#1", ()),
        ("attn[x]", ()),
        ("attn/add", ()),
        ("mlp:out[x]", SITES[4:6]),
        ("mlp:out[y]", ()),
        (":out", SITES[6:]),
        ("**, !attn", SITES[4:]),
        ("**, !**:out", [*SITES[1:4]]),
        ("ttn", ()),
    ],
)
def test_a_filter_selects_recorded_sites(text: str, chosen: list[object]) -> None:
    """Without a kind all sites of a module; a word stands for the names that begin with it."""
    found = SiteFilter(text, PATHS)

    assert [site for site in SITES if found.chooses(site)] == list(chosen)


def test_a_filter_that_cannot_be_read_says_where() -> None:
    """It is the language of selectors, with its errors."""
    with pytest.raises(SelectorError, match="column 3"):
        SiteFilter("h.**x", PATHS)


def test_only_what_is_no_name_is_widened() -> None:
    """A path that there is stays itself, as does a pattern."""
    terms = widened(parse("attn, h.0.attn, *.attn, !drop:in, **{Mlp}"), PATHS)

    assert ", ".join(map(str, terms)) == "**.attn*, h.0.attn, *.attn, !**.drop*:in, **{Mlp}"


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("atn", '"attn"'),
        ("*.attn", '"**.attn"'),
        ("h.0-47.attn", '"h.*.attn"'),
        ("h.0.atn", '"h.0.attn"'),
        ("**{Mpl}", '"**{Mlp}"'),
        ("zzz", ""),
    ],
)
def test_the_nearest_names(text: str, near: str) -> None:
    """Of a mistyped word its spelling, of a pattern its depth, of folded blocks a pattern for them."""
    (term,) = widened(parse(text), PATHS)

    assert nearest(term, PATHS, {"Mlp", "Net"}).split(", ")[0] == near


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("attn, mlp, !zzz", ""),
        ("mlp, atn, zzz", '"atn" selects nothing in run.kedge; the nearest are "attn"'),
        (
            "attn:in",
            '"attn:in" selects nothing in run.kedge; of the modules and parameters it names there is :out, :out.grad, :param',
        ),
        ("zzz", '"zzz" selects nothing in run.kedge; "**" selects everything'),
    ],
    ids=["all select", "a mistyped word", "another kind", "nothing like it"],
)
def test_the_first_part_that_selects_nothing_is_named(text: str, problem: str) -> None:
    """With what there is instead; a part that excludes need not exclude anything."""
    assert SiteFilter(text, PATHS).problem(SITES, "run.kedge") == problem


def test_sites_are_chosen_in_the_order_of_the_recording() -> None:
    """A part that selects none of them is an error, whatever the others select."""
    assert chosen_sites("mlp#1, attn:out", SITES) == (SITES[0], SITES[5])
    with pytest.raises(NoSuchSite, match='"atn" selects nothing in this recording'):
        chosen_sites("mlp, atn", SITES)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("fc, fc:out[0]", "one leaf or one call alone"),
        ("fc, fc#1", "one leaf or one call alone"),
        ("fc, fc:saved", ":saved"),
        ("fc, fc/add", 'the operation "add"'),
    ],
)
def test_what_a_watch_does_not_record_is_refused(text: str, part: str) -> None:
    """Each leaf, call, operation or kind that only hooks have, with the hook that has it."""
    check_watched("fc, fc:out, !**.weight:param")
    with pytest.raises(NoSuchKind, match=f"does not record {part}; .*use a hook: kedge.hook"):
        check_watched(text)
