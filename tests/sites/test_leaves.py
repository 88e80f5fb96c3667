"""Structured values: finding tensors by name and putting others in their place."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kedge.sites import leaves


class Pair(NamedTuple):
    """A named tuple."""

    logits: Any
    hidden: Any = None


@dataclasses.dataclass
class Out:
    """A dataclass with a field that holds no tensor."""

    logits: Any
    name: str = "x"
    cache: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """A dataclass that does not let itself be set."""

    logits: Any
    n: int = 3


class Box:
    """A container that torch's pytree knows."""

    def __init__(self, a: Any, b: Any, label: str) -> None:
        self.a, self.b, self.label = a, b, label


pytree.register_pytree_node(
    Box,
    lambda b: ([b.a, b.b], b.label),
    lambda c, label: Box(*c, label),
    serialized_type_name="tests.leaves.Box",
)

A, B, C = torch.zeros(2), torch.ones(3), torch.full((4,), 2.0)


def model_output() -> Any:
    """A `ModelOutput` as `transformers` models return them."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    return outputs.BaseModelOutputWithPast(last_hidden_state=A, hidden_states=(B, C))


CASES = {
    "tensor": (lambda: A, {"": A}),
    "tuple": (lambda: (A, 1, B), {"0": A, "2": B}),
    "list": (lambda: [A, B], {"0": A, "1": B}),
    "namedtuple": (lambda: Pair(A, B), {"logits": A, "hidden": B}),
    "dict": (lambda: {"x": A, "y": {"z": B}, "n": 3}, {"x": A, "y.z": B}),
    "OrderedDict": (lambda: OrderedDict(x=A, y=B), {"x": A, "y": B}),
    "defaultdict": (lambda: defaultdict(list, x=A), {"x": A}),
    "integer keys": (lambda: {0: A, 7: B}, {"0": A, "7": B}),
    "dotted keys": (lambda: {"layer.0": A, "layer.1": B}, {"layer.0": A, "layer.1": B}),
    "dataclass": (lambda: Out(A, cache=[B]), {"logits": A, "cache.0": B}),
    "frozen dataclass": (lambda: Frozen(A), {"logits": A}),
    "nested": (
        lambda: {"a": [Pair((A,), Out(B)), C]},
        {"a.0.logits.0": A, "a.0.hidden.logits": B, "a.1": C},
    ),
    "ModelOutput": (
        model_output,
        {"last_hidden_state": A, "hidden_states.0": B, "hidden_states.1": C},
    ),
    "pytree": (lambda: Box(A, [B], "keep"), {"0": A, "1.0": B}),
    "torch.return_types": (lambda: torch.max(torch.eye(2), dim=0), None),
    "PackedSequence": (
        lambda: torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        None,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_found_by_name(case: str) -> None:
    """Names join keys, fields and indices with dots, in the value's own order."""
    make, expected = CASES[case]
    found = leaves.find(make())

    if expected is None:
        assert len(found) == 2
        return
    assert [name for name, _ in found] == list(expected)
    assert all(tensor is expected[name] for name, tensor in found)


@pytest.mark.parametrize("case", CASES)
def test_putting_back_what_was_found_gives_an_equal_value(case: str) -> None:
    """`put` of what `find` returned has the same type and holds the same tensors."""
    value = CASES[case][0]()
    again = leaves.put(value, dict(leaves.find(value)))

    assert type(again) is type(value)
    assert [(n, id(t)) for n, t in leaves.find(again)] == [
        (n, id(t)) for n, t in leaves.find(value)
    ]


@pytest.mark.parametrize("case", CASES)
def test_each_leaf_can_be_replaced_alone(case: str) -> None:
    """`put` replaces the named leaf, keeps every other, and leaves the given value as it was."""
    value = CASES[case][0]()
    before = leaves.find(value)

    for name, tensor in before:
        new = tensor + 1
        changed = leaves.put(value, {name: new})
        assert type(changed) is type(value)
        assert [id(t) for _, t in leaves.find(changed)] == [
            id(new) if n == name else id(t) for n, t in before
        ]
    assert [(n, id(t)) for n, t in leaves.find(value)] == [(n, id(t)) for n, t in before]


@pytest.mark.parametrize(
    "value",
    [None, (), [], {}, "text", 3, Out(None), [[], {"a": None}], SimpleNamespace(x=A), {1, 2}, Out],
)
def test_a_value_without_tensors_has_no_leaves(value: Any) -> None:
    """What holds no tensor, or hides it in an object that is no container, has none to find and is returned as it is."""
    assert leaves.find(value) == []
    assert leaves.put(value, {}) is value


def test_what_is_not_replaced_is_not_copied() -> None:
    """Parts of a structure that hold none of the named leaves stay the same objects."""
    kept = [B]
    value = {"a": A, "kept": kept}

    assert leaves.put(value, {"a": C})["kept"] is kept
    assert leaves.put(value, {}) is value


def test_the_rest_of_a_structure_survives() -> None:
    """Fields that hold no tensor, a container's own state and a default factory are carried over."""
    out = leaves.put(Out(A, name="kept"), {"logits": B})
    assert (type(out), out.logits is B, out.name, out.cache) == (Out, True, "kept", None)
    assert leaves.put(Frozen(A, n=9), {"logits": B}).n == 9
    assert leaves.put(Box(A, B, "kept"), {"0": C}).label == "kept"
    assert leaves.put(defaultdict(list, x=A), {"x": B}).default_factory is list


def test_a_subclass_of_a_container_stays_one() -> None:
    """A list or dict of a class of its own keeps its class."""

    class MyList(list[Any]):
        pass

    class MyDict(dict[str, Any]):
        pass

    assert type(leaves.put(MyList([A]), {"0": B})) is MyList
    assert type(leaves.put(MyDict(a=A), {"a": B})) is MyDict


def test_a_model_output_keeps_attribute_and_key_equal() -> None:
    """A replaced leaf of a `ModelOutput` is seen by key, by attribute and by position."""
    changed = leaves.put(model_output(), {"last_hidden_state": C})

    assert changed["last_hidden_state"] is changed.last_hidden_state is changed[0] is C
    assert changed.to_tuple()[1][0] is B


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (A, "float32[2]"),
        (torch.zeros((), dtype=torch.int64), "int64[]"),
        ((A, B), "tuple with [0], [1]"),
        ({"x": A}, "dict with [x]"),
        (None, "NoneType with no tensor"),
        ([A] * 9, "list with [0], [1], [2], [3], [4], [5], [6], [7], ..."),
    ],
)
def test_a_value_is_described_in_a_few_words(value: Any, text: str) -> None:
    """Messages name the type, and the shape or the leaves."""
    assert leaves.describe(value) == text


def test_a_prefix_stands_before_every_name() -> None:
    """Arguments are found under their own name, and put back under it."""
    value: dict[str, Tensor] = {"k": A}

    assert [n for n, _ in leaves.find(value, "mask")] == ["mask.k"]
    assert leaves.put(value, {"mask.k": B}, "mask")["k"] is B
    assert leaves.put(A, {"mask": B}, "mask") is B


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ({0: 1, "0": 2}, ["0", "0@str"]),
        ({"0": 1, 0: 2}, ["0", "0@int"]),
        ({True: 1, "True": 2, "True@str": 3}, ["True", "True@str", "True@str@str"]),
        ({"a.b": 1, "a": {"b": 2, "c": 3}}, ["a.b", "a@str.b", "a@str.c"]),
        ({"a": {"b": 1}, "a.b": 2, "a.c": 3}, ["a.b", "a.b@str", "a.c"]),
        ({"a": {"c": 1}, "a.b": 2}, ["a.c", "a.b"]),
        ({"x": {0: 1, "0": 2}}, ["x.0", "x.0@str"]),
    ],
)
def test_no_two_leaves_have_one_name(value: dict[Any, Any], names: list[str]) -> None:
    """Keys that are equal as text are told apart, when they are found and when they are put back."""

    def of_tensors(inner: Any) -> Any:
        return (
            {k: of_tensors(v) for k, v in inner.items()}
            if isinstance(inner, dict)
            else torch.tensor(inner)
        )

    whole = of_tensors(value)
    found = leaves.find(whole)
    assert [name for name, _ in found] == names
    for name, tensor in found:
        changed = leaves.find(leaves.put(whole, {name: tensor + 10}))
        assert [int(t) - 10 * (n == name) for n, t in changed] == [int(t) for _, t in found]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_memory_that_was_freed_is_noticed(layout: torch.memory_format) -> None:
    """All of it, or only that of the last element: reading it would end the process."""
    value = torch.ones(2, 3, 4, 5).contiguous(memory_format=layout)
    end, none = value[1:, :, 3], value[:0]
    assert all(map(leaves.has_memory, (value, end, none)))
    for left in (value.nbytes - value.itemsize, 0):
        value.untyped_storage().resize_(left)
        assert [*map(leaves.has_memory, (value, end, none))] == [False, False, True]
