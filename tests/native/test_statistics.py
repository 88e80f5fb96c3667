"""What one pass gives, against float64: every way, every format, every size and every place in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge import native
from kedge.native import reductions
from tests.native.ways import COMPILED, Way, agree, compiled

some = settings(
    max_examples=120, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip

FORMATS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
)
SPECIAL = (
    math.nan,
    math.inf,
    -math.inf,
    0.0,
    -0.0,
    1e-45,
    -1e-45,
    1e-40,
    6e-8,
    1e-30,
    65504.0,
    3e38,
    -3e38,
    1e200,
    5e-324,
)
SIZES = st.one_of(
    st.integers(1, 300),
    st.sampled_from([4095, 4096, 4097, 8193, 16_384, 16_385, 65_535, 65_536, 65_537, 131_073]),
)


@st.composite
def values(draw: st.DrawFn) -> Tensor:
    """Numbers of one magnitude, some of them zero, some of them special, anywhere in memory."""
    dtype, size, seed = draw(st.sampled_from(FORMATS)), draw(SIZES), draw(st.integers(0, 1000))
    scale, zeros = 2.0 ** draw(st.integers(-140, 126)), draw(st.sampled_from([0.0, 0.5, 1.0]))
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size) * scale * (rng.random(size) >= zeros)
    for where, special in draw(
        st.lists(st.tuples(st.floats(0, 0.999), st.sampled_from(SPECIAL)), max_size=4)
    ):
        x[int(where * size)] = special
    value = torch.from_numpy(x)
    if dtype.is_complex:
        value = torch.complex(value, value.flip(0))
    if value.real.dtype is torch.float64 and dtype in (torch.float64, torch.complex128):
        value = (
            value.clamp(-1e150, 1e150) if not dtype.is_complex else value
        )  # squares of float64 have no wider format
    narrow = value.to(dtype)
    if dtype is torch.complex128:
        narrow = torch.complex(narrow.real.clamp(-1e150, 1e150), narrow.imag.clamp(-1e150, 1e150))
    offset = draw(st.integers(0, 64 // narrow.element_size()))
    memory = torch.zeros(size + offset, dtype=dtype)
    memory[offset:] = narrow
    return memory[offset:]


@given(value=values())
@some
def test_every_statistic_is_that_of_float64(way: Way, value: Tensor) -> None:
    """Extremes and counts are exact, sums within the documented bound, whatever the numbers are."""
    agree(way, value)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_size_and_alignment_near_the_width_of_a_vector(way: Way, dtype: torch.dtype) -> None:
    """No number at the end of a block is forgotten or read twice, wherever in memory it begins."""
    memory = torch.randn(700).to(dtype)
    for size in (*range(1, 70), 127, 128, 129, 255, 256, 257, 300, 511, 512, 513):
        agree(way, memory[:size])
    for offset in range(64 // memory.element_size() + 1):
        agree(way, memory[offset : offset + 301])


@pytest.mark.parametrize("size", [(1 << 21) - 1, 1 << 22, (1 << 24) + 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_large_values_too(way: Way, size: int, dtype: torch.dtype) -> None:
    """Errors do not grow with the number of elements."""
    if size > way.most:
        pytest.skip(f"{way.name} would take long")
    x = torch.linspace(-1, 3, size, dtype=torch.float32).to(dtype)
    x[[0, size // 2, -1]] = 0
    wide = x.double()
    found = way.measure(x)
    magnitude = wide.abs().sum().item()
    assert found["count"] == size
    assert found["nonzero"] == torch.count_nonzero(wide).item()
    assert found["nonfinite"] == 0
    assert (found["min"], found["max"]) == (wide.min().item(), wide.max().item())
    assert abs(found["sum"] - wide.sum().item()) <= 2 * way.bound.other * magnitude
    assert found["sumsq"] == pytest.approx(wide.square().sum().item(), rel=2 * way.bound.other)


def test_one_bad_number_among_many_is_found(way: Way) -> None:
    """A single NaN or infinity is counted, wherever it is, and shows in sums and extremes."""
    for at in (0, 1, 70_000, 299_999):
        x = torch.ones(300_000)
        x[at] = -math.inf
        found = way.measure(x)
        assert (found["nonfinite"], found["nan"], found["sum"], found["min"]) == (
            1,
            0,
            -math.inf,
            -math.inf,
        )
        assert found["max"] == 1
        x[at] = math.nan
        found = way.measure(x)
        assert (found["nonfinite"], found["nan"]) == (1, 1)
        assert all(math.isnan(found[name]) for name in ("sum", "sumsq", "min", "max"))


def test_what_is_all_bad_is_counted(way: Way) -> None:
    """Nothing finite is left: extremes are NaN or infinite, and every element is counted."""
    for bad in (math.nan, math.inf, -math.inf):
        found = way.measure(torch.full((5000,), bad))
        assert (found["nonfinite"], found["nonzero"]) == (5000, 5000)
        assert found["nan"] == (5000 if math.isnan(bad) else 0)
        assert [found["min"], found["max"]] == pytest.approx([bad, bad], nan_ok=True)


@pytest.mark.parametrize("dtype", [*FORMATS, torch.float8_e5m2])
def test_nan_and_infinities_are_counted_apart(dtype: torch.dtype) -> None:
    """Of both in one value each is counted, in every format, in all statistics and in the norm alone."""
    x = torch.linspace(-2, 2, 9000)
    x[[3, 4097, 8999]] = math.nan
    x[[0, 5000]] = torch.tensor([math.inf, -math.inf])
    value = torch.complex(x, torch.zeros(9000)).to(dtype) if dtype.is_complex else x.to(dtype)
    for what in ("full", "norm"):
        found = native.measure(value, what)
        assert (found["nonfinite"], found["nan"]) == (5, 3)
        assert (dict(zip(native.FIELDS, reductions.row(value, what), strict=True))["nan"]) == 3
    assert native.measure(value[:, None].expand(9000, 7))["nan"] == 21


@pytest.mark.parametrize("scale", [1e-30, 1e-44, 1e25, 3e38])
def test_squares_neither_vanish_nor_overflow(way: Way, scale: float) -> None:
    """The sum of squares of float32 is that of float64, beyond the range of float32 too."""
    agree(way, torch.full((9001,), scale))
    agree(way, torch.cat([torch.full((5000,), scale), torch.ones(5000)]))


def test_sums_of_float64_may_overflow(way: Way) -> None:
    """There is no wider format; the elements are finite all the same."""
    found = way.measure(torch.full((1000,), 1e308, dtype=torch.float64))
    assert (found["sum"], found["sumsq"], found["nonfinite"], found["max"]) == (
        math.inf,
        math.inf,
        0,
        1e308,
    )


@COMPILED
def test_sums_of_a_thousand_million_numbers_are_exact_enough() -> None:
    """At 2^30 elements the error is within the bound, which one sum in float32 would miss by far."""
    window, windows = 1 << 20, 1 << 10
    x = torch.rand(window + windows - 1) + 0.5
    many = x.as_strided((windows, window), (1, 1))
    times = (
        torch.arange(1, x.numel() + 1)
        .clamp(max=windows)
        .minimum(torch.arange(x.numel(), 0, -1))
        .double()
    )
    found = compiled(many)
    assert found["count"] == 1 << 30
    assert found["sum"] == pytest.approx((x.double() * times).sum().item(), rel=2**-21)
    assert found["sumsq"] == pytest.approx((x.double().square() * times).sum().item(), rel=2**-21)


@COMPILED
@given(value=values())
@some
def test_the_norm_alone_is_that_of_the_full_pass(value: Tensor) -> None:
    """The shorter pass gives the same sum of squares, and counts what is not finite; the rest is not measured."""
    full, short = native.table(1), native.table(1)
    for name in native.instruction_sets():
        before = native.use(name)
        native.measure_into(full, 0, value)
        native.measure_into(short, 0, value, native.CODES["norm"])
        native.use(before)
        assert short[0, 1] == pytest.approx(full[0, 1], rel=2**-20, nan_ok=True)
        assert short[0, 5:].tolist() == full[0, 5:].tolist()
        assert np.isnan(short[0, [2, 3, 4]]).all()
        one = native.FIELDS.index("count"), native.FIELDS.index("sum")
        assert short[0, one[1]] == pytest.approx(
            full[0, one[1]] if full[0, one[0]] == 1 else math.nan, nan_ok=True
        )


@COMPILED
def test_the_norm_of_a_single_number_keeps_its_sign() -> None:
    """A loss is a curve: its value is in the row of a step of norms."""
    rows = native.table(2)
    native.measure_into(rows, 0, torch.tensor(-3.0), native.CODES["norm"])
    rows[1] = reductions.row(torch.tensor([-3.0]), "norm")
    for row in rows:
        assert row == pytest.approx([-3, 9, math.nan, math.nan, math.nan, 0, 0, 1], nan_ok=True)


@COMPILED
def test_the_sum_alone_leaves_the_rest_out() -> None:
    """A row that is asked for the sum has the sum and the count."""
    rows = native.table(1)
    native.measure_into(rows, 0, torch.tensor([1.0, 2.0]), native.CODES["finite"])
    assert rows[0] == pytest.approx([3, *[math.nan] * 6, 2], nan_ok=True)


@given(seed=st.integers(0, 100), bad=st.sampled_from([None, math.nan, math.inf]))
@settings(some, max_examples=30)
def test_a_guarded_step_is_one_call(seed: int, bad: float | None) -> None:
    """All gradients together: the sum of squares, and how many numbers are not finite."""
    torch.manual_seed(seed)
    tensors: list[Tensor | None] = [
        torch.randn(5, 3),
        None,
        torch.randn(0),
        torch.randn(4, 6).t(),
        torch.randn(7, dtype=torch.cfloat),
    ]
    if bad is not None:
        tensors[0][2] = bad
    squares, nonfinite = native.all_finite_and_norm(tensors)
    assert nonfinite == (0 if bad is None else 3)
    rows = [reductions.row(t) for t in tensors if t is not None and t.numel()]
    assert squares == pytest.approx(sum(row[1] for row in rows), rel=1e-6, nan_ok=True)
