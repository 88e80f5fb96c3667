"""For all structures: putting back what was found changes nothing, and each leaf can be replaced alone."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.sites import leaves

few = settings(max_examples=80, deadline=None, derandomize=True, database=None)


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Data:
    """A dataclass."""

    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A frozen dataclass."""

    z: Any


leaf = st.one_of(
    st.builds(lambda: torch.zeros(1)), st.none(), st.integers(0, 3), st.text("ab", max_size=2)
)
keys = st.text("abc_", min_size=1, max_size=3)


def containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Every container that holds such things."""
    return st.one_of(
        st.lists(inside, max_size=3),
        st.lists(inside, max_size=3).map(tuple),
        st.dictionaries(keys, inside, max_size=3),
        st.dictionaries(keys, inside, max_size=3).map(OrderedDict),
        st.builds(Pair, inside, inside),
        st.builds(Data, inside, inside),
        st.builds(Frozen, inside),
    )


values = st.recursive(leaf, containers, max_leaves=10)


def shape(value: Any) -> Any:
    """What a structure is made of, with its tensors by identity."""
    if isinstance(value, Tensor):
        return id(value)
    if isinstance(value, dict):
        return type(value), [(k, shape(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [shape(v) for v in value]
    if dataclasses.is_dataclass(value):
        return type(value), [shape(getattr(value, f.name)) for f in dataclasses.fields(value)]
    return value


@few
@given(values)
def test_putting_back_what_was_found_is_the_identity(value: Any) -> None:
    """`put(value, find(value))` holds the same tensors in the same structure, and leaves the given one alone."""
    before = shape(value)

    assert shape(leaves.put(value, dict(leaves.find(value)))) == before
    assert shape(value) == before


@few
@given(values, st.data())
def test_some_leaves_can_be_replaced(value: Any, data: st.DataObject) -> None:
    """The chosen leaves are replaced, every other stays, and names and order are as before."""
    found = leaves.find(value)
    chosen = (
        data.draw(st.lists(st.sampled_from([n for n, _ in found]), unique=True)) if found else []
    )
    new = {name: torch.ones(1) for name in chosen}
    before = shape(value)
    changed = leaves.find(leaves.put(value, new))

    assert [(n, id(t)) for n, t in changed] == [(n, id(new.get(n, t))) for n, t in found]
    assert shape(value) == before
