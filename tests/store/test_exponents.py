"""Histograms of magnitudes, and the number formats they are held against."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kedge.errors import NotARecording
from kedge.store import exponents
from kedge.store.binary_column import BinaryColumn
from kedge.store.exponents import spacing
from kedge.store.formats import FORMATS


def counted(rows: np.ndarray) -> np.ndarray:
    """Count the numbers of each row, as float32."""
    ends = np.arange(len(rows) + 1) * rows.shape[1]
    return exponents.count_runs(
        rows.astype(np.float32).ravel(), np.column_stack([ends[:-1], ends[1:]])
    )


def test_each_power_of_two_has_its_bucket() -> None:
    """The smallest number of a bucket is counted in it, and the one before in the bucket before."""
    powers = np.arange(exponents.LOWEST, exponents.HIGHEST + 1)
    starts = np.exp2(powers.astype(np.float32))
    assert (
        counted(starts[:, None]).argmax(axis=1).tolist() == (powers - exponents.LOWEST + 2).tolist()
    )
    before = np.nextafter(starts, np.float32(0))
    assert (
        counted(before[:, None]).argmax(axis=1).tolist() == (powers - exponents.LOWEST + 1).tolist()
    )


@pytest.mark.parametrize(
    ("value", "bucket"),
    [(2.0**-127, 0), (2.0**-126, 1), (2.0**-49, 1), (-1.0, 50), (2.0**32, 82), (3e38, 82)],
)
def test_what_is_beyond_has_buckets_of_its_own(value: float, bucket: int) -> None:
    """Subnormal, very small and very large numbers are counted at the ends, whatever their sign."""
    counts = counted(np.array([[value]], dtype=np.float32))[0]
    assert (counts.sum(), counts.argmax()) == (1, bucket)


def test_zeros_and_what_is_not_finite_are_not_counted() -> None:
    """Only finite elements unlike zero have a magnitude to count."""
    assert counted(np.array([[0.0, -0.0, np.nan, np.inf, -np.inf, 1.0]])).sum() == 1


@given(st.lists(st.integers(0, 100_000), min_size=exponents.BUCKETS, max_size=exponents.BUCKETS))
def test_a_histogram_comes_back_as_it_was(counts: list[int]) -> None:
    """Bytes hold every count exactly, small ones and large ones."""
    assert exponents.decode(exponents.encode(np.array(counts))).tolist() == counts


@pytest.mark.parametrize(
    "damaged",
    [bytes([80, *[1, 0] * 4]), bytes([0x80 | 80, *[1, 0, 0, 0] * 4]), bytes([3, 1]), bytes([100])],
)
def test_a_damaged_histogram_is_said_to_be_one(damaged: bytes) -> None:
    """Counts beyond the last bucket, and half of a count, are an error that says what is damaged."""
    whole = exponents.encode(np.ones(exponents.BUCKETS, dtype=np.int64))
    with pytest.raises(NotARecording, match="a histogram in it does not fit"):
        exponents.decode(damaged)
    with pytest.raises(NotARecording, match="a histogram in it does not fit"):
        exponents.decode_all(BinaryColumn.of([whole, b"", damaged]))


def test_a_histogram_takes_few_bytes() -> None:
    """Nothing takes no bytes, and what spans ten powers of two takes twenty-one."""
    assert exponents.encode(np.zeros(exponents.BUCKETS, dtype=np.int64)) == b""
    assert len(exponents.encode(counted(np.exp2(np.arange(10.0))[None])[0])) == 21


@pytest.mark.parametrize("q", [0.05, 0.5, 0.95])
def test_a_quantile_is_right_to_within_a_factor_of_two(q: float) -> None:
    """Quantiles from the histogram and of the numbers themselves differ by less than one bucket."""
    values = np.random.default_rng(0).normal(size=5000)
    found = float(exponents.quantile(counted(values[None])[0], q))
    assert 0.5 < found / np.quantile(np.abs(values), q) < 2


def test_nothing_has_no_quantile() -> None:
    """Where nothing was counted the quantile is NaN."""
    assert np.isnan(exponents.quantile(np.zeros((2, exponents.BUCKETS), dtype=np.int64), 0.5)).all()


def test_the_share_below_a_power_is_exact() -> None:
    """The share below a border is that of the elements; inside a bucket it is refused."""
    counts = counted(np.array([[2.0**-20, 2.0**-15, 2.0**-14, 1.0]]))[0]
    assert exponents.below(counts, -14) == 0.5
    with pytest.raises(ValueError, match="inside a bucket"):
        exponents.below(counts, -100)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_pytorch(name: str) -> None:
    """The limits of each format are those that PyTorch gives."""
    info, own = torch.finfo(getattr(torch, name)), FORMATS[name]
    assert (own.largest, own.smallest_normal) == (info.max, info.smallest_normal)
    smallest = torch.tensor(own.smallest, dtype=torch.float64).to(getattr(torch, name))
    below = torch.tensor(own.smallest / 4, dtype=torch.float64).to(getattr(torch, name))
    assert (float(smallest), float(below)) == (own.smallest, 0.0)


def test_headroom_counts_doublings() -> None:
    """Headroom and depth are how often a number can double and halve."""
    half = FORMATS["float16"]
    assert half.headroom(32752.0) == 1.0
    assert half.depth(2.0**-13) == 1.0
    assert half.lowest_power == -14


SHAPES = [
    (512, 784),
    (64, 1024),
    (64, 16, 8, 8),
    (768, 768),
    (80, 64, 3, 3),
    (4096, 1000),
    (1152, 1152),
    (1000, 1000),
]


@pytest.mark.parametrize("most", [256, 1024])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_row_or_column_is_left_out(shape, most):
    """The drawn elements are of as many places of each dimension as can be, however its size divides the whole."""
    drawn = np.arange(math.prod(shape))[:: spacing(math.prod(shape), most)]

    assert 0.9 * most < len(drawn) <= most
    for size, places in zip(shape, np.unravel_index(drawn, shape), strict=True):
        assert len(np.unique(places)) >= 0.6 * min(size, most)


@pytest.mark.parametrize(
    ("number", "distance"), [(0, 1), (1, 1), (256, 1), (257, 2), (512, 3), (513, 4), (65536, 257)]
)
def test_few_elements_are_all_drawn(number, distance):
    """More of them only at a distance that shares no factor with their number."""
    assert spacing(number, 256) == distance
