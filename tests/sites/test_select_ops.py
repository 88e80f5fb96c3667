"""Operations in the site language: resolving, excluding, printing."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from kedge.errors import NoSiteMatched, NoSuchKind
from kedge.sites.language import means_op, parse
from kedge.sites.select import Selector, SitePlace
from kedge.sites.site import PARAM_KINDS, Site


class Net(nn.Module):
    """A sequence of a linear layer and an activation, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.two = nn.ModuleList([nn.Linear(2, 2)])

    def forward(self, x: Tensor) -> Tensor:
        """Never called here."""
        return x


def places(text: str) -> tuple[SitePlace, ...]:
    """What a selector stands for."""
    return Selector(text).on(Net()).places


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one.0/linear", ["one.0/linear:out"]),
        ("/view:out", ["/view:out"]),
        ("one/*:in[0]", ["one/*:in[0]"]),
        ("one.*/add#1:out.grad", ["one.0/add#1:out.grad", "one.1/add#1:out.grad"]),
        ("**/relu", [f"{path}/relu:out" for path in ("", "one", "one.0", "one.1", "two.0")]),
        ("**{ReLU}/relu_:in.grad", ["one.1/relu_:in.grad"]),
        ("one#2/matmul:out", ["one#2/matmul:out"]),
        ("one/relu, one/relu#0, one/relu", ["one/relu:out"]),
        ("one/relu#1, one/relu", ["one/relu#1:out", "one/relu:out"]),
        ("one, one/relu", ["one:out", "one/relu:out"]),
        ("**/relu, !one.*", ["/relu:out", "one/relu:out", "two.0/relu:out"]),
        ("**/relu, !one.*/relu", ["/relu:out", "one/relu:out", "two.0/relu:out"]),
        ("one, one/relu, !one/relu", ["one:out"]),
        ("one, one/relu, !one:out", ["one/relu:out"]),
        ("one/relu, one/relu:in, !one/*:in", ["one/relu:out"]),
    ],
)
def test_a_selector_of_operations_resolves_to_sites(text: str, expected: list[str]) -> None:
    """A module's sites carry the operation as it is written; which ones there are, a forward tells."""
    assert [str(p.site) for p in places(text)] == expected


def test_a_pattern_without_some_operations() -> None:
    """What is excluded, or named before, is not meant by a pattern that would stand for it."""
    assert places("one/*, !one/view, !one/add#1")[0].without == (("view", None), ("add", 1))
    named = places("one/relu, one/add#1, one/*:out, one/*:in")
    assert [p.without for p in named[2:]] == [(("relu", None), ("add", 1)), ()]


def test_a_pattern_of_modules_is_distinguished_from_a_name() -> None:
    """A module that a pattern stands for may well have no such operation; one that is named should."""
    assert [p.many for p in places("one/relu, two.*/relu")] == [False, True]


def test_an_exclusion_that_leaves_nothing_is_an_error() -> None:
    """As with modules."""
    with pytest.raises(NoSiteMatched, match="leaves no site"):
        places("one/relu, !one/*")


@pytest.mark.parametrize("kind", ["saved", "in.share", *PARAM_KINDS, "grad", "pre"])
def test_an_operation_has_values_and_gradients_alone(kind: str) -> None:
    """Other kinds are refused by name."""
    with pytest.raises(
        NoSuchKind, match=r"an operation has no :.*; it has :out, :in, :out\.grad, :in\.grad"
    ):
        places(f"one/relu:{kind}")


@pytest.mark.parametrize(
    ("site", "text"),
    [
        (Site("a.b", op=("relu", None)), "a.b/relu:out"),
        (Site("", "in", "0", op=("add", 1)), "/add#1:in[0]"),
        (Site("a/b", "out.grad", call=2, op=("max", 0)), r"a\/b#2/max#0:out.grad"),
    ],
)
def test_a_site_of_an_operation_prints_in_the_site_language(site: Site, text: str) -> None:
    """What it prints reads back as the same."""
    assert str(site) == text
    (term,) = parse(text)
    assert (term.literal, term.op, term.kind, term.leaf, term.call) == (
        site.path,
        site.op,
        site.kind,
        site.leaf,
        site.call,
    )
    assert term.names(site)


@pytest.mark.parametrize(
    ("pattern", "op", "meant"),
    [
        (("relu", None), ("relu", 3), True),
        (("relu", 1), ("relu", 3), False),
        (("re*", None), ("relu_", 0), True),
        (("relu", None), ("relu_", 0), False),
        (("a[dr]d?", 0), ("add_", 0), True),
        (("add", 1), ("add", None), False),
    ],
)
def test_a_pattern_means_operations(
    pattern: tuple[str, int | None], op: tuple[str, int | None], meant: bool
) -> None:
    """By the whole of the name, and by the index if it has one."""
    assert means_op(pattern, op) is meant
