"""Histograms, quantiles and selections, against computations that see all samples at once."""

from __future__ import annotations

import copy
import math
import random
import sys
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kedge.errors import MissingExtra
from kedge.features.reduce import Histogram, Quantiles, TopK, restore

FINITE = st.floats(allow_nan=False, allow_infinity=False)
MOST = float(np.finfo(np.float64).max)


def filled(reducer, values, size=5, keys=None):
    """Pass values to a reducer in batches."""
    for i in range(0, len(values), size):
        reducer.update(values[i : i + size], None if keys is None else keys[i : i + size])
    return reducer


def doubles(numbers):
    """Return numbers as a batch."""
    return torch.tensor(numbers, dtype=torch.float64)


@settings(deadline=None)
@given(st.lists(st.one_of(st.sampled_from([-1.0, 0.1, 0.5, 2.0]), FINITE), min_size=1, max_size=40))
def test_given_edges_are_numpys(numbers):
    """Counts between given edges are numpy's; what is below, above, NaN or infinite is counted by its name."""
    edges = [-1.0, 0.0, 0.1, 0.5, 2.0]
    odd = [math.nan, math.inf, math.inf, -math.inf]
    found = filled(Histogram(edges), doubles([*numbers, *odd])).result()

    assert found["counts"].tolist() == np.histogram(numbers, edges)[0].tolist()
    assert found["under"] == sum(x < -1 for x in numbers)
    assert found["over"] == sum(x > 2 for x in numbers)
    assert (found["nan"], found["inf"], found["-inf"]) == (1, 2, 1)
    assert found["n"] == len(numbers) + 4


def test_float32_is_compared_with_edges_as_the_number_it_is():
    """0.1 in float32 is above 0.1 in float64, and so in the bin above that edge."""
    found = filled(Histogram([0.0, 0.1, 1.0]), torch.tensor([0.1])).result()

    assert found["counts"].tolist() == [0, 1]


@settings(deadline=None, max_examples=300)
@given(st.lists(FINITE, min_size=1, max_size=30), st.integers(2, 9))
@example([5e-324], 2)
@example([-5e-324, MOST], 3)
@example([-MOST, MOST], 2)
@example([-5e-324, 5e-324, 0.0, -0.0], 4)
@example([1.0, 1.0 + 2**-52], 2)
def test_automatic_edges_hold_every_value(numbers, bins):
    """Bins of one width, a power of two, hold every value, in so few bins that half as wide ones would be too many."""
    reducer = filled(Histogram(bins=bins), doubles(numbers))
    found, power = reducer.result(), int(reducer.grid.power[0])
    edges, counts = found["edges"].tolist(), found["counts"].tolist()
    expected = [sum(a <= x < b for x in numbers) for a, b in pairwise(edges)]

    assert counts == expected
    assert sum(counts) == len(numbers)
    assert len(counts) <= bins
    assert counts[0] > 0 < counts[-1]
    assert all(b - a in (2.0 ** min(power, 1023), math.inf) for a, b in pairwise(edges))
    half = 2.0 ** (power - 1) if power > -1074 else 0.0
    if half and max(map(abs, numbers)) / half < 2**52:
        low, high = (Fraction(x) // Fraction(half) for x in (min(numbers), max(numbers)))
        assert high - low >= bins


def test_each_channel_has_edges_of_its_own():
    """Channels of different scale are each shown as finely as if they were alone."""
    x = torch.randn(60, 3) * torch.tensor([1e-6, 1.0, 1e6])
    together = filled(Histogram(per="channel", bins=16), x).result()
    for channel in range(3):
        alone = filled(Histogram(bins=16), x[:, channel]).result()
        length = len(alone["counts"])
        assert together["counts"][channel, :length].tolist() == alone["counts"].tolist()
        assert together["edges"][channel, : length + 1].tolist() == alone["edges"].tolist()
        assert together["n"][channel] == 60


def test_channels_with_nothing_to_show_stay_empty():
    """A channel of NaN alone has counts of zero, and one with NaN in places counts the rest."""
    x = torch.randn(20, 2)
    x[:, 0] = torch.nan
    x[3, 1] = torch.nan
    for histogram in (Histogram(per="channel", bins=8), Histogram([-9, 0, 9], per="channel")):
        found = filled(histogram, x).result()
        assert found["counts"].sum(1).tolist() == [0, 19]
        assert found["nan"].tolist() == [20, 1]


def rank(q, n):
    """The rank that a quantile written in decimal has, by whole numbers."""
    digits = 10**6
    return max(1, -(-round(q * digits) * n // digits))


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(st.floats(width=32, allow_nan=False), st.floats(-2, 2, width=32)),
        min_size=1,
        max_size=40,
    ),
    st.integers(40, 65_535),
)
@example([3.4028234663852886e38], 2048)
@example([math.inf, -math.inf, 0.0], 2048)
@example([1e-45, 1e-40, 1.1754943508222875e-38], 65_535)
def test_quantiles_of_no_more_than_k_values_are_exact(numbers, k):
    """Each quantile is the value of its rank, as float32 has it, and the error is stated to be 0."""
    q = [0.0, 0.07, 0.25, 0.5, 0.9, 0.99, 1.0]
    found = filled(Quantiles(q, k=k), torch.tensor(numbers)).result()
    ordered = sorted(torch.tensor(numbers).tolist())

    assert found["n"] == len(numbers)
    assert found["normalized_rank_error"] == 0
    assert found["quantiles"].tolist() == [ordered[rank(one, len(numbers)) - 1] for one in q]
    assert (found["min"], found["max"]) == (ordered[0], ordered[-1])


SHAPES = {
    "normal": lambda n, c: torch.randn(n, c),
    "heavy tails": lambda n, c: torch.randn(n, c) / torch.randn(n, c).abs().clamp(min=1e-9),
    "few values": lambda n, c: torch.randint(-3, 4, (n, c)),
    "sorted": lambda n, c: torch.arange(n)[:, None].expand(n, c),
}


def rank_errors(found, x):
    """How far the rank of each quantile is from the one asked for; a value that occurs often has a range of ranks."""
    ordered = x.double().numpy().T
    q = found["q"].numpy()
    errors = []
    for values, quantiles in zip(ordered, found["quantiles"].numpy(), strict=True):
        below = (values[:, None] < quantiles).mean(0)
        upto = (values[:, None] <= quantiles).mean(0)
        errors.append(np.maximum(0, np.maximum(below - q, q - upto)))
    return np.array(errors)


@pytest.mark.parametrize("merged", [False, True], ids=["alone", "merged"])
@pytest.mark.parametrize("shape", SHAPES)
def test_quantiles_are_within_their_bound(shape, merged):
    """In 99 of 100 cases a quantile's rank is as near as stated, from one reducer or merged from ten, for any distribution."""
    x = SHAPES[shape](6000, 60)
    made = Quantiles([0.01, 0.1, 0.5, 0.9, 0.99], per="channel", k=64)
    parts = [filled(copy.deepcopy(made), part, 100) for part in (x.chunk(10) if merged else [x])]
    for part in parts[1:]:
        parts[0].merge(restore(part.state()))
    found = parts[0].result()
    errors = rank_errors(found, x)

    assert 0.03 < found["normalized_rank_error"] < 0.05
    assert (errors <= found["normalized_rank_error"]).mean() > 0.95  # of 300 cases
    assert torch.equal(found["min"], x.double().amin(0))
    assert torch.equal(found["max"], x.double().amax(0))
    assert found["n"].tolist() == [6000] * 60


def test_an_infinity_that_is_given_is_one():
    """The largest number of float32 beside it is finite."""
    found = filled(
        Quantiles([0.5]), torch.tensor([[math.inf, 1.0, 3e38]], dtype=torch.float64)
    ).result()

    assert found["max"] == math.inf


def test_twice_the_k_halves_the_error():
    """The error that is stated is that of the package for this size, and 0.14 % by default."""
    errors = [
        filled(Quantiles(k=k), torch.randn(20_000), 5000).result()["normalized_rank_error"]
        for k in (1024, 2048)
    ]

    assert errors[1] == pytest.approx(0.0014, abs=0.0001)
    assert errors[0] == pytest.approx(2 * errors[1], rel=0.05)


def test_the_ends_of_a_sketch_are_exact():
    """The quantiles 0 and 1 are the least and the greatest value, whether the sketch has kept them or not."""
    values = torch.randn(100_000)
    found = filled(Quantiles([0.0, 1.0], k=8), values, 10_000).result()

    assert found["quantiles"].tolist() == [values.min().item(), values.max().item()]


def test_a_sketch_stays_small():
    """A million values take about 12 k bytes, and ten times as many next to nothing more."""
    reducer = filled(Quantiles(k=256), torch.randn(1_000_000), 100_000)
    sizes = [len(reducer.state()["sketches"])]
    filled(reducer, torch.randn(9_000_000), 1_000_000)
    sizes.append(len(reducer.state()["sketches"]))

    assert sizes[0] < 14 * 256
    assert sizes[1] < 1.1 * sizes[0]


def test_quantiles_touch_no_random_numbers_of_the_program():
    """The state of PyTorch's, numpy's and Python's generators is what it was."""
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002 - what programs share
    filled(Quantiles(k=8), torch.arange(10_000.0), 1000).result()

    assert torch.equal(before[0], torch.get_rng_state())
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]  # noqa: NPY002 - as above


def test_a_missing_datasketches_is_named(monkeypatch):
    """Without the package, making the reducer is one of Kedge's errors, and names the extra that brings it."""
    monkeypatch.setitem(sys.modules, "datasketches", None)
    with pytest.raises(
        MissingExtra,
        match=r"datasketches, which is not installed: pip install 'kedge\[quantiles\]'",
    ):
        Quantiles()


def test_values_of_other_types_have_exact_quantiles():
    """Quantiles of bfloat16, of small whole numbers and of booleans are numpy's."""
    q = [i / 100 for i in range(101)]
    for values in (
        torch.randn(999).bfloat16(),
        torch.randint(-200, 200, (999,)),
        torch.rand(99) > 0.5,
    ):
        found = filled(Quantiles(q), values, 100).result()
        expected = np.quantile(values.double().numpy(), q, method="inverted_cdf")
        assert found["quantiles"].tolist() == expected.tolist()


def test_quantiles_of_each_channel_are_those_of_it_alone():
    """Channels do not mix, NaN is left out and counted, and a channel of NaN alone has none."""
    x = torch.randn(200, 3) * torch.tensor([1e-3, 1.0, 1e3])
    x[5, 0], x[:, 2] = torch.nan, torch.nan
    together = filled(Quantiles(per="channel"), x, 64).result()
    for channel in range(2):
        alone = filled(Quantiles(), x[:, channel], 64).result()
        assert torch.equal(together["quantiles"][channel], alone["quantiles"])
    assert together["nan"].tolist() == [1, 0, 200]
    assert together["n"].tolist() == [199, 200, 0]
    assert together["quantiles"][2].isnan().all()
    assert together["min"][2].isnan()


def test_a_quantile_is_of_the_number_as_it_is_written():
    """The 7 % quantile of 100 values is the 7th, although 0.07 * 100 is above 7 in floating point."""
    found = filled(Quantiles([0.07]), torch.arange(1, 101)).result()

    assert 0.07 * 100 > 7
    assert found["quantiles"].tolist() == [7]


def best(values, keys, k, largest):
    """The best of one channel, by sorting everything."""
    entries = [
        (-v if largest else v, key)
        for v, key in zip(values, keys, strict=True)
        if not math.isnan(v)
    ]
    return [(-v if largest else v, key) for v, key in sorted(entries)[:k]]


@settings(deadline=None)
@given(st.data(), st.integers(1, 6), st.booleans())
def test_the_best_are_those_that_sorting_everything_gives(data, k, largest):
    """For each channel the k best samples with their values, ties in the order of their keys, NaN left out."""
    number = st.one_of(
        st.sampled_from([0.0, -0.0, 1.0, math.inf, -math.inf, math.nan]), st.floats(-3, 3, width=32)
    )
    n = data.draw(st.integers(1, 25))
    values = torch.tensor(data.draw(st.lists(number, min_size=2 * n, max_size=2 * n))).reshape(n, 2)
    keys = data.draw(st.lists(st.text(max_size=4), min_size=n, max_size=n, unique=True))
    found = filled(TopK(k, largest=largest), values, data.draw(st.integers(1, 9)), keys).result()

    assert found["n"] == n
    assert found["nan"].tolist() == values.isnan().sum(0).tolist()
    for channel in range(2):
        expected = best(values[:, channel].tolist(), keys, k, largest)
        assert found["keys"][channel] == [key for _, key in expected]
        assert found["values"][channel, : len(expected)].tolist() == [
            value for value, _ in expected
        ]
        assert found["values"][channel, len(expected) :].isnan().all()


@settings(deadline=None)
@given(st.data(), st.integers(1, 7), st.booleans(), st.sampled_from(["samples", "max"]))
def test_the_best_positions_are_those_that_sorting_everything_gives(data, k, largest, positions):
    """Sample, position and value, and how many more have the last value; however batches are cut and merged."""
    number = st.sampled_from([0.0, -0.0, 1.0, 2.0, -1.0, math.inf, -math.inf, math.nan])
    n = data.draw(st.integers(1, 9))
    values = torch.tensor(data.draw(st.lists(number, min_size=8 * n, max_size=8 * n)))
    values = values.reshape(n, 2, 2, 2)
    keys = data.draw(st.permutations([f"{i}" for i in range(n)]))
    cut = data.draw(st.integers(0, n))
    settings_ = {"largest": largest, "positions": positions}
    first = filled(TopK(k, **settings_), values[:cut], 2, keys[:cut])
    first.merge(
        filled(TopK(k, **settings_), values[cut:], data.draw(st.integers(1, 4)), keys[cut:])
    )
    found = restore(first.state()).result()

    sign = -1 if largest else 1
    for channel in range(2):
        entries = []
        for key, of_sample in zip(keys, values[:, channel].flatten(1), strict=True):
            rows = [(value, place) for place, value in enumerate(of_sample.tolist())]
            if positions == "max":
                rows = [(of_sample.max().item(), int(of_sample.argmax()))]
            entries += [(sign * v, key, place) for v, place in rows if not math.isnan(v)]
        expected = sorted(entries)[:k]
        count = len(expected)
        assert found["keys"][channel] == [key for _, key, _ in expected]
        assert found["values"][channel, :count].tolist() == [sign * v for v, _, _ in expected]
        assert found["positions"][channel, :count].tolist() == [place for _, _, place in expected]
        assert (found["positions"][channel, count:] == -1).all()
        last = [v for v, _, _ in expected[-1:]]
        left = sorted(entries)[k:]
        assert found["tied"][channel] == sum(v in last for v, _, _ in left)


def test_a_position_counts_over_all_dimensions_but_that_of_the_channels():
    """Of images, of tokens, and of values with a single position; a mean has none."""
    image = torch.zeros(1, 2, 3, 4)
    image[0, 1, 2, 1] = 5
    for positions in ("samples", "max"):
        found = filled(TopK(1, positions=positions), image, 1, ["a"]).result()
        assert found["positions"][1].tolist() == [2 * 4 + 1]
        tokens = image.movedim(1, -1)
        found = filled(TopK(1, positions=positions, channel=-1), tokens, 1, ["a"]).result()
        assert found["positions"][1].tolist() == [2 * 4 + 1]
    assert filled(TopK(1), image[:, :, 2, 1], 1, ["a"]).result()["positions"].tolist() == [[0], [0]]
    mean = filled(TopK(1, positions="mean"), image, 1, ["a"]).result()
    assert mean["positions"].tolist() == [[-1], [-1]]


def test_a_state_of_before_has_no_positions():
    """It is read, and goes on."""
    state = filled(TopK(2), torch.tensor([[1.0], [2.0], [1.0]]), 3, ["a", "b", "c"]).state()
    del state["positions"], state["equal"]
    old = restore(state)
    assert old.result()["positions"].tolist() == [[-1, -1]]
    old.update(torch.tensor([[3.0]]), ["d"])
    assert old.result()["keys"] == [["d", "b"]]
    assert old.result()["positions"].tolist() == [[0, -1]]


def test_dead_channels_do_not_make_the_choice_depend_on_the_order():
    """Of a channel that is zero everywhere, the samples with the first keys are kept, whichever came first."""
    keys = [f"{i:03}" for i in range(100)]
    x = torch.zeros(100, 4)
    for order in (range(100), range(99, -1, -1)):
        found = filled(TopK(3), x, 10, [keys[i] for i in order]).result()
        assert found["keys"] == [["000", "001", "002"]] * 4


@pytest.mark.parametrize("positions", ["max", "mean"])
def test_the_best_image_is_chosen_by_its_pooled_answer(positions):
    """An image with one bright spot wins by its maximum; one that is grey all over wins by its mean."""
    spot, grey = torch.zeros(1, 4, 4), torch.full((1, 4, 4), 0.5)
    spot[0, 1, 2] = 1
    found = filled(
        TopK(1, positions=positions), torch.stack([spot, grey]), 2, ["spot", "grey"]
    ).result()

    assert found["keys"] == [["spot" if positions == "max" else "grey"]]
