"""The site language: reading, printing, and resolving on a model."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kedge
from kedge.errors import SelectorError
from kedge.sites.select import Selector, Term, parse
from kedge.sites.site import Site, escape


class Block(nn.Module):
    """Two convolutions and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.relu = (
            nn.Conv2d(2, 2, 1),
            nn.Conv2d(2, 2, 1, bias=False),
            nn.ReLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Never called here: a site needs only a module that could be."""
        return x


class Net(nn.Module):
    """Blocks in a sequence and in a list, and one activation under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Sequential(Block(), Block())
        self.layer2 = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.fc = nn.Linear(2, 2)
        self.act = self.again = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Never called here: a site needs only a module that could be."""
        return x


def sites(text: str, model: nn.Module | None = None) -> list[str]:
    """The sites a selector stands for, as text."""
    return [str(site) for site in Selector(text).on(model or Net())]


@pytest.mark.parametrize(
    ("text", "term"),
    [
        ("layer4", Term(("layer4",))),
        ("layer1.0.conv2:out", Term(("layer1", "0", "conv2"), kind="out")),
        (":out", Term((), kind="out")),
        ("h.3.attn:out[0]", Term(("h", "3", "attn"), kind="out", leaf="0")),
        ("decoder:in[ mask ]", Term(("decoder",), kind="in", leaf="mask")),
        ("m:out[cache.1]", Term(("m",), kind="out", leaf="cache.1")),
        ("fc.weight:param.grad", Term(("fc", "weight"), kind="param.grad")),
        ("encoder#2:out", Term(("encoder",), call=2, kind="out")),
        ("encoder#2", Term(("encoder",), call=2)),
        ("layer1.0/relu:out", Term(("layer1", "0"), op=("relu", None), kind="out")),
        ("layer1.0/add#1", Term(("layer1", "0"), op=("add", 1))),
        ("**{Conv2d, Linear}", Term(("**",), types=("Conv2d", "Linear"))),
        ("!**{Dropout}:out, **", None),
        ("layer[34].?.*", Term(("layer[34]", "?", "*"))),
        (r"a\.b\*", Term((r"a\.b\*",))),
        ("  fc  ", Term(("fc",))),
    ],
)
def test_text_is_read_into_terms(text: str, term: Term | None) -> None:
    """Every form in the description of the site language is read as it says."""
    terms = parse(text)

    assert (
        terms == (term,)
        if term
        else terms == (Term(("**",), ("Dropout",), kind="out", excluded=True), Term(("**",)))
    )


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("  a.b , c:in ", "a.b, c:in"),
        ("**{ Conv2d , Linear }:out", "**{Conv2d,Linear}:out"),
        ("a#1/relu#2:out", "a#1/relu#2:out"),
        ("a, !a.b", "a, !a.b"),
        (":out", ":out"),
        ("{Net}", "{Net}"),
        ("#1", "#1"),
    ],
)
def test_a_selector_prints_as_its_text(text: str, printed: str) -> None:
    """A selector prints without needless spaces, and what it prints is read as an equal selector."""
    selector = Selector(text)

    assert str(selector) == printed
    assert repr(selector) == f"select({printed!r})"
    assert Selector(printed) == selector
    assert hash(Selector(printed)) == hash(selector)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("fc", ["fc:out"]),
        (":out", [":out"]),
        ("layer1.0.conv?", ["layer1.0.conv1:out", "layer1.0.conv2:out"]),
        ("layer1.*", ["layer1.0:out", "layer1.1:out"]),
        ("layer1.**{Conv2d}", [f"layer1.{b}.conv{c}:out" for b in (0, 1) for c in (1, 2)]),
        ("layer1.[!0].conv[2]", ["layer1.1.conv2:out"]),
        ("**.conv1:in.grad", ["layer1.0.conv1:in.grad", "layer1.1.conv1:in.grad"]),
        ("layer2.*", ["layer2.0:out", "layer2.1:out"]),
        ("layer?", ["layer1:out"]),
        ("fc.*:param", ["fc.weight:param", "fc.bias:param"]),
        (
            "layer?.**.bias:param.acc",
            [
                f"{p}.bias:param.acc"
                for p in ("layer1.0.conv1", "layer1.1.conv1", "layer2.0", "layer2.1")
            ],
        ),
        ("fc#1:out[0]", ["fc#1:out[0]"]),
        ("fc, fc:in, fc", ["fc:out", "fc:in"]),
        ("**{ReLU}", ["layer1.0.relu:out", "layer1.1.relu:out", "act:out"]),
        ("{Net}", [":out"]),
        ("layer1.0.**{_ConvNd}", ["layer1.0.conv1:out", "layer1.0.conv2:out"]),
        (
            "**.weight{Linear}:param",
            ["layer2.0.weight:param", "layer2.1.weight:param", "fc.weight:param"],
        ),
    ],
)
def test_a_selector_resolves_to_sites(text: str, expected: list[str]) -> None:
    """A selector stands for the sites that its pattern means, in the model's order and each once."""
    assert sites(text) == expected


def test_two_stars_match_any_depth_and_none() -> None:
    """`**` stands for every module that runs, the root included; a list of modules does not run."""
    paths = [s.path for s in Selector("**").on(Net())]

    assert paths == [n for n, m in Net().named_modules() if not isinstance(m, nn.ModuleList)]
    assert "" in paths


def test_one_segment_stays_one_segment() -> None:
    """`*`, `?` and a class of characters, negated ones too, never reach over a dot."""
    model = nn.ModuleDict({"a": nn.ModuleDict({"b": nn.ReLU()}), "axb": nn.ReLU()})

    assert sites("a?b", model) == ["axb:out"]
    assert sites("a[!y]b", model) == ["axb:out"]
    assert sites("a[.x]b", model) == ["axb:out"]
    assert sites("*", model) == ["axb:out"]


def test_an_escaped_character_means_itself() -> None:
    """A name made of characters of the language is reached through its escaped text, which sites print."""
    odd = "x*y[1]{z}#2/3:4,!? \\".replace("\\\\", "\\")
    model = nn.Sequential(OrderedDict([(odd, nn.ReLU()), ("xy", nn.ReLU())]))

    site = Selector(escape(odd)).on(model).places[0].site
    assert site.path == odd
    assert Selector(str(site)).on(model).places[0].site == site


def test_a_literal_star_may_stand_beside_a_wild_one() -> None:
    """`\\**` in a name is a literal star and then any characters."""
    model = nn.Sequential(OrderedDict([("*ab", nn.ReLU())]))

    assert sites(r"\**", model) == [r"\*ab:out"]


def test_a_shared_module_fires_under_its_first_name() -> None:
    """Every name of a module selects it, and its site bears the first one."""
    assert sites("act") == sites("again") == sites("a*") == ["act:out"]


def test_a_shared_parameter_has_one_site() -> None:
    """Tied weights are one parameter: each name selects it, under the first."""
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(4, 2), head=nn.Linear(2, 4, bias=False)))
    model.head.weight = model.embed.weight

    assert (
        sites("head.weight:param.grad", model)
        == sites("**.weight:param.grad", model)
        == ["embed.weight:param.grad"]
    )


@pytest.mark.parametrize(
    ("text", "gone"),
    [
        ("**, !**{Conv2d}", "layer1.0.conv1:out"),
        ("**, !fc", "fc:out"),
        ("**:out, **:in, !fc", "fc:in"),
        ("**, !again", "act:out"),
        ("**, !layer1.**", "layer1:out"),
    ],
)
def test_an_exclusion_takes_sites_away(text: str, gone: str) -> None:
    """`!` takes away what its term matches, of every kind if it names none."""
    found = sites(text)

    assert gone not in found
    assert len(found) > 2


def test_an_exclusion_of_one_kind_leaves_the_others() -> None:
    """An excluding term that names a kind takes only sites of this kind away."""
    assert sites("fc:out, fc:in, !fc:in") == ["fc:out"]


def test_an_exclusion_holds_for_what_stands_before_it() -> None:
    """Terms work from left to right: what an exclusion took away may be taken again."""
    assert sites("**{Linear}, !**, fc") == ["fc:out"]


def test_an_exclusion_of_one_call_leaves_the_other_calls() -> None:
    """`!fc#1` takes the second call's site away, not the first call's."""
    assert sites("fc#0, fc#1, !fc#1") == ["fc#0:out"]


def test_an_exclusion_that_takes_nothing_is_no_error() -> None:
    """A pattern may exclude types that this model happens not to have."""
    assert sites("fc, !**{Dropout}") == ["fc:out"]


def test_a_selection_counts_iterates_and_prints() -> None:
    """A selection is a value: its length, its sites, and a line a site with the module's type."""
    selection = Selector("fc, layer1.0.relu:out.grad").on(Net())

    assert len(selection) == 2
    assert list(selection) == [Site("fc"), Site("layer1.0.relu", "out.grad")]
    assert str(selection).splitlines() == [
        '"fc, layer1.0.relu:out.grad" matches 2 sites:',
        "fc:out                  Linear",
        "layer1.0.relu:out.grad  ReLU",
    ]


def test_a_container_that_has_a_forward_of_its_own_runs() -> None:
    """Sequential has a forward and is a site; a ModuleList has none and `*` passes it over."""
    assert sites("layer*") == ["layer1:out"]


@pytest.mark.parametrize(
    ("site", "text"),
    [
        (Site("a.b"), "a.b:out"),
        (Site(""), ":out"),
        (Site("a", "out", "0", 2), "a#2:out[0]"),
        (Site("a b", "in.grad", "mask"), r"a\ b:in.grad[mask]"),
        (Site("a", "out", ""), "a:out"),
    ],
)
def test_a_site_prints_in_the_site_language(site: Site, text: str) -> None:
    """A site's text is what selects it."""
    assert str(site) == text


def test_a_site_is_narrowed_to_a_leaf_or_a_call() -> None:
    """`at` gives the same site for one leaf or one call and keeps what it is not told."""
    assert Site("a", "in").at(leaf="x").at(call=1) == Site("a", "in", "x", 1)


@pytest.mark.parametrize(
    ("several", "text"),
    [
        (["fc"], "fc"),
        (["fc", "layer1.*:in"], "fc, layer1.*:in"),
        (("fc, act", "!act"), "fc, act, !act"),
        (dict.fromkeys(["fc", "act"]), "fc, act"),
        (iter(["fc"]), "fc"),
        ([Selector("fc, act"), "layer1"], "fc, act, layer1"),
        (Selector("fc"), "fc"),
    ],
)
def test_several_selectors_are_one(several: Any, text: str) -> None:
    """A list selects what its texts select, joined by commas; an exclusion takes away from those before it."""
    assert Selector(several) == kedge.select(text)


@pytest.mark.parametrize(
    ("several", "message"),
    [
        ([], "an empty list selects nothing"),
        (["fc", 3], "3 is not the text of a selector"),
        (["!fc"], "every part is excluded"),
        (["fc", "["], "cannot read the selector, column 5"),
        (3, "3 is not the text of a selector"),
    ],
)
def test_a_list_that_selects_nothing_is_refused(several: Any, message: str) -> None:
    """The message names what is wrong with it."""
    with pytest.raises(SelectorError, match=re.escape(message)):
        Selector(several)


def test_a_list_can_be_given_wherever_a_selector_can() -> None:
    """Hooks, sessions, features and watches take it; what is no list of texts is still taken for an action."""
    model, x = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.ones(1, 2)
    with kedge.session() as s, kedge.hook(model, ("0", "2"), kedge.record()) as alone:
        shared = s.hook(model, ["0", kedge.select("2")], kedge.record())
        model(x)

    assert list(alone) == list(shared) == list(kedge.extract(model, ["0", "2"])(x)) == ["0", "2"]
    for wrong in (3, torch.ones(2), None):
        with pytest.raises(TypeError, match="is not an action"):
            kedge.hook(model, wrong, kedge.record())


def cyclic(kind: str) -> nn.Module:
    """Return a model that contains itself, or a list that does."""
    model = nn.Sequential(OrderedDict(fc=nn.Linear(4, 4), inner=nn.Sequential(nn.Linear(4, 4))))
    if kind == "list":
        model.layers = nn.ModuleList([nn.Linear(2, 2)])
        model.layers.append(model.layers)
    else:
        (model if kind == "itself" else model.inner).add_module("parent", model)
    return model


@pytest.mark.parametrize("kind", ["itself", "in a child", "list"])
def test_a_module_that_contains_itself_has_its_first_path(kind: str) -> None:
    """Its paths would never end; all sites are found, each once."""
    model, more = cyclic(kind), ["layers.0:out"] if kind == "list" else []
    assert sites("**", model) == [":out", "fc:out", "inner:out", "inner.0:out", *more]
    assert sites("*.weight:param, inner.**.bias:param", model) == [
        "fc.weight:param",
        "inner.0.bias:param",
    ]
    with pytest.raises(kedge.errors.NoSiteMatched, match="matches nothing"):
        sites("inner.parent.fc", model)
