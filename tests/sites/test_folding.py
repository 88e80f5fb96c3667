"""Names that differ only in the numbers of blocks stand as one, and what differs stands alone."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import kedge
from kedge.sites.folding import Folding, block, folded_names, outliers, ranges
from kedge.sites.table import Sites


def folded(names: list[str], like: dict[str, str] | None = None) -> dict[str, int]:
    """Return the names of the folds, each with the number of its members."""
    folding = Folding[tuple[str]](lambda one: one[0], lambda one: (like or {}).get(one[0]))
    made = folding.fold([(name,) for name in names])
    return {one.name: len(one.members) for one in made}


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (
            ["embed", "h.0.attn", "h.0", "h.1.attn", "h.1", "h.2.attn", "h.2", "ln"],
            ["embed", "h.0-2.attn", "h.0-2", "ln"],
        ),
        ([f"e.{a}.x.{b}" for a, b in product(range(3), range(2))], ["e.0-2.x.0-1"]),
        (["s.0.b.0", "s.0.b.1", "s.1.b.0", "s.1.b.1", "s.1.b.2"], ["s.0.b.0-1", "s.1.b.0-2"]),
        (
            ["h.0.w:param", "h.1.w:param", "h.0.w:out[0]", "h.1.w:out[0]"],
            ["h.0-1.w:param", "h.0-1.w:out[0]"],
        ),
        (["conv1", "conv2", "b.01.x", "b.1.x"], ["conv1", "conv2", "b.01.x", "b.1.x"]),
        (["x:out[cache.1]", "x:out[cache.2]"], ["x:out[cache.1]", "x:out[cache.2]"]),
        (["0", "1", "2"], ["0-2"]),
        (["a", ""], ["a", ""]),
    ],
)
def test_whole_numbers_between_dots_fold(names: list[str], found: list[str]) -> None:
    """Only what differs in numbers of blocks folds; numbers in several places need every combination."""
    assert list(folded(names)) == found
    assert folded_names(names) == found


def test_what_is_not_alike_does_not_fold() -> None:
    """A block of another type stands alone."""
    names = [f"h.{i}.{part}" for i in range(5) for part in ("attn", "mlp")]

    assert folded(names, {"h.2.mlp": "other"}) == {
        "h.0-4.attn": 5,
        "h.0-1,3-4.mlp": 4,
        "h.2.mlp": 1,
    }


def test_what_is_in_another_state_stands_next_to_the_others() -> None:
    """A block with a finding comes right after the rest of its name, and several with the same one fold too."""
    names = [f"h.{i}.{part}" for i in range(6) for part in ("attn", "mlp")]
    bad = {"h.1.attn", "h.4.attn", "h.5.attn"}

    made = Folding(str, lambda _: None, lambda name: name in bad).fold(names)

    assert [one.name for one in made] == ["h.0,2-3.attn", "h.1,4-5.attn", "h.0-5.mlp"]


def test_one_that_must_stand_alone_does() -> None:
    """A member that is far from the others is named by itself."""
    sizes = {f"h.{i}": 1.0 + i / 100 for i in range(20)} | {"h.7": 300.0}

    differing = Folding(
        str, lambda _: None, differing=lambda group: outliers([sizes[name] for name in group])
    )
    made = differing.fold(sizes)

    assert [one.name for one in made] == ["h.0-6,8-19", "h.7"]


@given(st.lists(st.lists(st.integers(0, 4), min_size=0, max_size=3), max_size=30))
def test_nothing_is_lost_or_doubled(numbers: list[list[int]]) -> None:
    """Every thing is in one fold, whatever the names."""
    items = [(".".join(["m", *map(str, own), "w"]),) for own in numbers]

    made = Folding[tuple[str]](lambda one: one[0], lambda _: None).fold(items)

    assert sorted(id(item) for one in made for item in one.members) == sorted(map(id, items))
    assert all(one.folded or one.name == one.members[0][0] for one in made)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([0], "0"),
        ([0, 1], "0-1"),
        ([0, 1, 2, 4, 5], "0-2,4-5"),
        ([0, 2, 4, 6, 8], "0,2,…,8"),
        ([0, 3, 5, 9, 12, 40, 41], "0,3,…,40-41"),
    ],
)
def test_numbers_are_written_as_ranges(numbers: list[int], text: str) -> None:
    """Runs, even steps and a few others; of many runs the first and the last are named."""
    assert ranges(numbers) == text


@pytest.mark.parametrize(
    ("values", "share", "found"),
    [
        ([1.0] * 20 + [9.0], False, [20]),
        ([1.0] * 20 + [2.0], False, []),
        ([2.0**i for i in range(20)], False, []),  # a slope has no outlier
        ([1.0, 100.0], False, []),
        ([None, float("nan"), 0.0, 1.0, 1.0, 1.0, 1e-9], False, [6]),
        ([0.5, 0.52, 0.48, 1.0], True, [3]),
        ([1.0] * 40 + [9.0, 1e3, 1e2, 1e4, 1e-5], False, [44, 43, 41, 42, 40]),
        ([1.0] * 30 + [1e3] * 10, False, []),
    ],
)
def test_outliers_are_far_from_the_median(
    values: list[float | None], share: bool, found: list[int]
) -> None:
    """Sizes are compared by their ratio, shares by their difference; where many differ, none stands out."""
    assert outliers(values, share=share) == found


def test_the_block_of_a_path_ends_with_its_last_number() -> None:
    """A path in no block is its own."""
    assert [block(path) for path in ("h.0.attn.c_attn", "s.1.b.2", "lm_head", "")] == [
        "h.0",
        "s.1.b.2",
        "lm_head",
        "",
    ]


def tower(blocks: int) -> nn.Module:
    """Return a network of equal blocks."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(blocks)))


def test_a_long_table_of_sites_folds() -> None:
    """Blocks that are alike have one line in the text; the rows are all there, and the table can be had whole."""
    model = tower(12)
    model[5][0] = nn.Linear(4, 4, bias=False)

    listed = kedge.sites(model)
    lines = [line.split()[0] for line in str(listed).splitlines()]

    assert lines == ["path", '""', "0-11", "0-11.0", "0-11.0.weight", "0-4,6-11.0.bias", "0-11.1"]
    assert len(listed) == len(str(listed.table(folded=False)).splitlines()) - 1 == 60
    assert len(str(Sites(listed.rows[:40])).splitlines()) == 41


def test_a_long_selection_folds() -> None:
    """A selection of many sites prints those of alike blocks as one line, and counts all."""
    chosen = kedge.select("**{Linear}, **{ReLU}").on(tower(30))

    assert len(chosen) == 60
    assert str(chosen).splitlines() == [
        '"**{Linear}, **{ReLU}" matches 60 sites:',
        "0-29.0:out  Linear",
        "0-29.1:out  ReLU",
    ]
