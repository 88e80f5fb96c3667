"""What all reducers have in common: any order and cut of the samples gives one result, in any type, copied or stored."""

from __future__ import annotations

import copy
import json
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from kedge.errors import ReducerError, SettingsDiffer
from kedge.features.reduce import Covariance, Histogram, Mean, Quantiles, Reducer, TopK, restore
from tests.marks import DEVICE, needs_device

SUMS = [
    Mean(positions="samples"),
    Mean(positions="elements", nonfinite="skip", ddof=0),
    Covariance(positions="mean"),
    Covariance(positions="samples", nonfinite="skip"),
]
COUNTS = [
    Histogram(),
    Histogram(per="channel", bins=5),
    Histogram(positions="mean", bins=7),
    Histogram(edges=[-2, -0.5, 0, 0.1, 3]),
    Histogram(edges=[0, 1], per="channel", positions="max"),
    TopK(3, positions="max"),
    TopK(2, positions="mean", largest=False),
    TopK(4, positions="elements"),
    TopK(3, positions="samples"),
    TopK(2, positions="samples", largest=False),
]
SKETCHES = [Quantiles(k=128), Quantiles(per="channel"), Quantiles(positions="mean", k=65_535)]
ALL = SUMS + COUNTS + SKETCHES
each = pytest.mark.parametrize("made", ALL, ids=repr)

NUMBERS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, 3.0]),
    st.floats(-4, 4, width=32),
)
TYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
]


@st.composite
def samples(draw, numbers=NUMBERS):
    """Draw a few samples of two channels and three positions, with keys."""
    n = draw(st.integers(1, 9))
    values = draw(st.lists(numbers, min_size=n * 6, max_size=n * 6))
    keys = draw(st.lists(st.text(max_size=3), min_size=n, max_size=n, unique=True))
    return torch.tensor(values, dtype=torch.float32).reshape(n, 2, 3), keys


def taken(made, values, keys, order, cuts):
    """Pass the samples to a fresh reducer in an order, cut into batches."""
    reducer = copy.deepcopy(made)
    for part in np.split(np.array(order), sorted(cuts)):
        reducer.update(values[part.tolist()], [keys[i] for i in part])
    return reducer


def same_bits(a, b):
    """Whether two states hold the same bits."""
    return a.keys() == b.keys() and all(
        a[n].dtype == b[n].dtype
        and a[n].shape == b[n].shape
        and a[n].numpy().tobytes() == b[n].numpy().tobytes()
        for n in a
    )


def assert_near(a, b):
    """Hold two results of sums to the rounding of float64, of numbers up to 1000."""
    assert a.keys() == b.keys()
    for name, value in a.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(value, b[name], rtol=1e-9, atol=1e-8, equal_nan=True)
        else:
            assert value == b[name], name


@pytest.mark.parametrize("made", COUNTS, ids=repr)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_counts_and_selections_have_one_result(made, data):
    """Any order, any cut into batches and any grouping of merges gives the same state, to the last bit."""
    values, keys = data.draw(samples())
    n = len(values)
    whole = copy.deepcopy(made)
    whole.update(values, keys)
    order = data.draw(st.permutations(range(n)))
    cuts = data.draw(st.lists(st.integers(0, n), max_size=4))
    assert same_bits(taken(made, values, keys, order, cuts).state(), whole.state())

    parts = [
        taken(made, values, keys, part.tolist(), [])
        for part in np.split(np.array(order), sorted(cuts))
    ]
    while len(parts) > 1:
        i = data.draw(st.integers(0, len(parts) - 2))
        parts[i].merge(parts.pop(i + 1))
    assert same_bits(parts[0].state(), whole.state())


@pytest.mark.parametrize("made", SUMS, ids=repr)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sums_have_one_result_within_rounding(made, data):
    """Any order, cut and grouping of merges gives the same mean and covariance, but for the rounding of float64."""
    odd = st.sampled_from([float("nan"), float("inf"), -float("inf")])
    values, keys = data.draw(
        samples(
            st.one_of(st.floats(-1e3, 1e3, width=32), odd)
            if data.draw(st.booleans())
            else st.floats(-1e3, 1e3, width=32)
        )
    )
    n = len(values)
    whole = copy.deepcopy(made)
    whole.update(values, keys)
    order = data.draw(st.permutations(range(n)))
    cuts = data.draw(st.lists(st.integers(0, n), max_size=4))
    assert_near(whole.result(), taken(made, values, keys, order, cuts).result())

    parts = [
        taken(made, values, keys, part.tolist(), [])
        for part in np.split(np.array(order), sorted(cuts))
    ]
    while len(parts) > 1:
        i = data.draw(st.integers(0, len(parts) - 2))
        parts[i].merge(parts.pop(i + 1))
    assert_near(whole.result(), parts[0].result())


@pytest.mark.parametrize("made", SKETCHES, ids=repr)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_sketches_of_few_values_have_one_result(made, data):
    """Of no more values than a sketch keeps, any order, cut and grouping of merges gives the same result."""
    values, keys = data.draw(samples())
    n = len(values)
    whole = copy.deepcopy(made)
    whole.update(values, keys)
    order = data.draw(st.permutations(range(n)))
    cuts = data.draw(st.lists(st.integers(0, n), max_size=4))
    parts = [
        taken(made, values, keys, part.tolist(), [])
        for part in np.split(np.array(order), sorted(cuts))
    ]
    while len(parts) > 1:
        i = data.draw(st.integers(0, len(parts) - 2))
        parts[i].merge(parts.pop(i + 1))
    for other in (taken(made, values, keys, order, cuts), parts[0]):
        assert_near(whole.result(), other.result())


@each
@settings(max_examples=25, deadline=None)
@given(drawn=samples())
def test_a_state_comes_back_as_it_was(made, drawn):
    """Through a file's bytes, `load`, `restore`, a pickle or a copy, a reducer is what it was and goes on the same way."""
    values, keys = drawn
    reducer = copy.deepcopy(made)
    reducer.update(values, keys)
    state = load(save(reducer.state()))
    loaded = copy.deepcopy(made)
    loaded.load(state)
    others = [loaded, restore(state), pickle.loads(pickle.dumps(reducer)), copy.deepcopy(reducer)]

    assert all(same_bits(other.state(), reducer.state()) for other in others)
    for other in (*others, reducer):
        other.update(values, keys)
    assert all(same_bits(other.state(), reducer.state()) for other in others)


@each
def test_an_empty_one_changes_nothing(made):
    """Merging one that has seen nothing, from either side, and batches of nothing leave everything as it is."""
    values, keys = torch.randn(5, 2, 3), list("abcde")
    full, empty = copy.deepcopy(made), copy.deepcopy(made)
    full.update(values, keys)
    before = full.state()
    full.merge(empty)
    full.update(values[:0], [])
    full.update(torch.zeros(0, 9, 9), [])
    assert same_bits(full.state(), before)

    empty.update(values[:0], [])
    blank = empty.state()
    assert same_bits(restore(blank).state(), blank)
    empty.result()
    empty.merge(full)
    assert same_bits(empty.state(), before)
    empty.update(values, keys)
    assert same_bits(full.state(), before)  # nothing is shared


@each
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_type_of_number_is_what_it_is_in_float64(made, dtype):
    """Half precision, integers and booleans are summed up as the numbers that they stand for."""
    values, keys = (torch.randn(6, 2, 3) * 3).to(dtype), list("abcdef")
    one, other = copy.deepcopy(made), copy.deepcopy(made)
    one.update(values, keys)
    other.update(values.double(), keys)

    assert same_bits(one.state(), other.state())


@each
def test_values_are_only_read(made):
    """A value with a graph, or out of inference mode, is summed up, and is unchanged afterwards."""
    values, keys = torch.randn(4, 2, 3, requires_grad=True), list("abcd")
    before = values.detach().clone()
    reducer, other = copy.deepcopy(made), copy.deepcopy(made)
    reducer.update(values, keys)
    with torch.inference_mode():
        other.update(values.detach() * 1, keys)

    assert torch.equal(values, before)
    assert not any(value.requires_grad for value in reducer.state().values())
    assert same_bits(reducer.state(), other.state())
    other.update(values, keys)


@pytest.mark.parametrize("made", SUMS + COUNTS, ids=repr)
def test_memory_does_not_grow_with_the_samples(made):
    """The state of a hundred batches takes no more bytes than a fixed number for each channel."""
    reducer = copy.deepcopy(made)
    sizes = []
    for i in range(100):
        values = torch.randn(8, 2, 3).clamp(-3, 3).mul(4).round().div(4)
        reducer.update(values, [f"{i:03}-{j}" for j in range(8)])
        sizes.append(len(pickle.dumps(reducer)))

    assert sizes[-1] <= sizes[20] * 1.05


@each
def test_the_settings_stand_in_the_state(made):
    """A state says as text which reducer it is of, and with which arguments."""
    state = made.state()

    assert json.loads(bytes(state["settings"].tolist())) == made.settings
    assert all(value.device.type == "cpu" and value.is_contiguous() for value in state.values())
    assert isinstance(made, Reducer)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        (Mean(), Mean(ddof=0), "ddof is 1 here and 0 there"),
        (Mean(), Covariance(), "reducer is 'Mean' here and 'Covariance' there"),
        (
            Histogram(edges=[0, 1]),
            Histogram(edges=[0, 2]),
            "edges is [0.0, 1.0] here and [0.0, 2.0] there",
        ),
        (Quantiles(k=512), Quantiles(), "k is 512 here and 2048 there"),
        (TopK(3), TopK(4), "k is 3 here and 4 there"),
        (TopK(3), TopK(3, positions="max"), "positions is None here and 'max' there"),
    ],
    ids=str,
)
def test_different_settings_do_not_mix(one, other, said):
    """Merging, or loading a state of, another reducer or other arguments is an error that names what differs."""
    one, other = copy.deepcopy(one), copy.deepcopy(other)
    with pytest.raises(SettingsDiffer) as merging:
        one.merge(other)
    with pytest.raises(SettingsDiffer) as loading:
        one.load(other.state())

    assert said in str(merging.value)
    assert said in str(loading.value)


@pytest.mark.parametrize(
    ("values", "keys", "said"),
    [
        (torch.ones(3, 2), ["a"], "3 samples came with 1 keys"),
        (torch.tensor(1.0), None, "a single number"),
        (torch.ones(2, 3, dtype=torch.complex64), list("ab"), "complex"),
        (torch.ones(2, 3, device="meta"), list("ab"), "meta"),
        (torch.ones(2, 3, 4), list("ab"), "4 positions for each sample and channel"),
        (torch.ones(2, 3, 0), list("ab"), "hold no elements"),
        (torch.ones(2, 5), list("ab"), "seen values of 3 channels and got 5"),
        (np.ones((2, 3)), list("ab"), "a ndarray"),
    ],
)
@pytest.mark.parametrize(
    "made", [Mean(), Covariance(), TopK(2), Histogram(per="channel", positions=None)], ids=repr
)
def test_what_cannot_be_summed_up_is_refused(made, values, keys, said):
    """Values that are no batch of real numbers of one width are an error that says so, and change nothing."""
    reducer = copy.deepcopy(made)
    reducer.update(torch.ones(2, 3), list("xy"))
    before = reducer.state()
    with pytest.raises(ReducerError, match=said):
        reducer.update(values, keys)

    assert same_bits(reducer.state(), before)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Mean(positions="all"), "positions='all'"),
        (lambda: Mean(channel=0), "channel=0"),
        (lambda: Mean(ddof=-1), "ddof"),
        (lambda: Mean(nonfinite="drop"), "nonfinite must be 'keep' or 'skip'"),
        (lambda: Histogram(edges=[1, 1]), "each above the last"),
        (lambda: Histogram(edges=[0, float("inf")]), "finite"),
        (lambda: Histogram(bins=1), "bins=1"),
        (lambda: Histogram(per="row"), "per='row'"),
        (lambda: Quantiles(q=[]), "at least one"),
        (lambda: Quantiles(q=[1.5]), "from 0 to 1"),
        (lambda: Quantiles(k=7), "k=7: use 8 to 65,535"),
        (
            lambda: Quantiles([0.5]).update(torch.tensor([1e300], dtype=torch.float64)),
            "scale the values",
        ),
        (lambda: TopK(0), "k=0"),
        (lambda: TopK(positions="rows"), "positions='rows': use one of"),
        (lambda: TopK().update(torch.ones(2, 2)), "this batch has none"),
        (lambda: TopK().update(torch.ones(2, 2), [1, 2]), "keys must be texts"),
        (lambda: Mean(channel=3).update(torch.ones(2, 2, 2)), "no such dimension"),
        (lambda: restore({"mean": torch.ones(1)}), "not the state of a reducer"),
    ],
)
def test_arguments_without_meaning_are_refused(make, said):
    """What makes no reducer is an error that names the argument and what can be taken."""
    with pytest.raises(ReducerError, match=said.replace("[", "\\[")):
        make()


def test_a_reducer_of_your_own_is_restored_by_yourself():
    """A state names its class; one that is not Kedge's is an error that says what to do."""

    class Count(Mean):
        pass

    reducer = Count()
    reducer.update(torch.ones(3, 2))
    with pytest.raises(ReducerError, match="'Count', which is not one of"):
        restore(reducer.state())
    other = Count()
    other.load(reducer.state())
    assert other.result()["n"] == 3


def test_positions_are_what_was_asked_for():
    """Positions as samples, pooled by mean or max, or as channels are what numpy makes of them; tokens have theirs last."""
    x = torch.randn(5, 3, 4, 2, dtype=torch.float64)
    y = x.numpy()
    rows = {
        "samples": y.transpose(0, 2, 3, 1).reshape(-1, 3),
        "mean": y.mean((2, 3)),
        "max": y.max((2, 3)),
        "elements": y.reshape(5, -1),
    }
    for positions, expected in rows.items():
        for channel, values in ((1, x), (-1, x.movedim(1, -1)), (2, x.movedim(1, 2))):
            if positions == "elements" and channel != 1:
                continue
            reducer = Covariance(positions=positions, channel=channel)
            reducer.update(values)
            found = reducer.result()
            np.testing.assert_allclose(found["mean"], expected.mean(0), atol=1e-14)
            np.testing.assert_allclose(found["covariance"], np.cov(expected.T), atol=1e-14)
            assert found["n"] == len(expected)


def test_one_position_needs_no_word():
    """Values [n], [n, c] and [n, c, 1, 1] need no argument."""
    x = torch.randn(7, 3)
    for values, shape in ((x, 3), (x[:, :, None, None], 3), (x[:, 0], 1)):
        reducer = Mean()
        reducer.update(values)
        assert torch.equal(reducer.result()["mean"], x.double().mean(0)[:shape])


def test_a_mean_over_positions_has_the_same_bits_in_every_batch():
    """A sample's pooled value does not depend on how many samples are computed with it, nor on their memory layout."""
    x = torch.randn(37, 5, 7, 9).to(memory_format=torch.channels_last)
    layout = Mean(positions="mean").layout
    whole = layout.rows(x)
    alone = torch.cat([layout.rows(one[None].contiguous()) for one in x])

    assert torch.equal(whole, alone)
    torch.testing.assert_close(whole, x.double().mean((2, 3)))


@each
@needs_device
def test_a_device_gives_what_the_cpu_gives(made):
    """Values on a device are summed up there, and counts and selections have the bits that the CPU gives."""
    n = (
        20 if made in SKETCHES else 300
    )  # a sketch of more values than it keeps has more than one result
    values, keys = torch.randn(n, 2, 3), [f"{i:03}" for i in range(n)]
    values[7, 0, 1] = torch.nan
    here, there = (
        taken(made, x, keys, range(n), [n // 3, n * 2 // 3]) for x in (values, values.to(DEVICE))
    )
    mixed = taken(made, values.to(DEVICE), keys, range(n // 2), [])
    mixed.merge(taken(made, values, keys, range(n // 2, n), []))
    for other in (there, mixed, pickle.loads(pickle.dumps(there))):
        if made in COUNTS:
            assert same_bits(here.state(), other.state())
        assert_near(here.result(), other.result())


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.uint16, torch.uint32, torch.uint64], ids=str
)
def test_rare_types_are_numbers_too(dtype):
    """Eight-bit floats and unsigned integers are summed up as the numbers that they stand for."""
    values = torch.tensor([[1, 2], [4, 8]]).to(dtype)
    for made in (Mean(), TopK(1), Quantiles(), Histogram()):
        one, other = copy.deepcopy(made), copy.deepcopy(made)
        one.update(values, ["a", "b"])
        other.update(values.double(), ["a", "b"])
        assert same_bits(one.state(), other.state())


def test_sparse_values_are_what_they_stand_for():
    """A sparse tensor is summed up with its zeros."""
    x = torch.eye(4)
    one, other = Mean(), Mean()
    one.update(x.to_sparse())
    other.update(x)

    assert same_bits(one.state(), other.state())


def test_a_state_with_the_settings_of_another_version_is_refused():
    """Such as the digits that quantiles once had: the error says what to do."""
    reducer = Quantiles()
    reducer.update(torch.ones(3, 2))
    state = reducer.state()
    text = json.dumps(reducer.settings | {"digits": 3}).encode()
    with pytest.raises(
        ReducerError,
        match="written by another version of Kedge, .*digits.*; reduce the features again",
    ):
        restore({**state, "settings": torch.tensor(list(text), dtype=torch.uint8)})
