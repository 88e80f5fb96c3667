"""The statistics of a value as a Triton kernel; imports Triton, so `kedge.native.on_device` imports this file late.

# Note [Folds]
A fold is 8 tiles of 1,024 numbers. A program adds the tiles of a fold up in float32, element by
element, with at most 8 roundings, and then in float64, so the error is that of Note [How exact].
That is two additions in float64 for 8 numbers, which cards can bear on which these are 64 times
slower. Programs take folds in turn. Only the last fold may be short, and only that one is read
under a mask: a mask that may end anywhere would split each load into single numbers.

Each program writes a row of its own, and the host adds the rows up when it has them. So programs
need not wait for each other or count who is last: no atomic operation, no memory to prepare, the
same bits in any order, and a CUDA graph can replay it.

# Note [Numbers that are read again]
As in C, a program's totals show whether float32 was enough. If not, it reads its numbers again,
adds up in float64, and counts NaN and infinities.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE: tl.constexpr = tl.constexpr(1024)
TILES: tl.constexpr = tl.constexpr(8)
FOLD: tl.constexpr = tl.constexpr(8 * 1024)
COLUMNS: tl.constexpr = tl.constexpr(7)
SMALL: tl.constexpr = tl.constexpr(2.0**-90)
"""A smaller sum of squares may lack squares that are subnormal in float32."""
FULL: tl.constexpr = tl.constexpr(0)
NORM: tl.constexpr = tl.constexpr(1)
FINITE: tl.constexpr = tl.constexpr(2)


@triton.jit
def _widened(x: tl.tensor, wide: tl.constexpr) -> tl.tensor:
    """Return numbers in a wider dtype; a bfloat16 is the upper half of a float32, which no conversion can then flush to zero."""
    if x.dtype == tl.bfloat16:
        x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return x.to(wide)


@triton.jit
def _first_pass(numbers: tl.tensor, count: tl.tensor, wide: tl.constexpr) -> tl.tuple:
    """Return sum, sum of squares, extremes without NaN, and the count of non-zero numbers of this program's folds."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    tile = tl.arange(0, TILE)
    folds = count // FOLD
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    low = tl.full([TILE], float("inf"), wide)
    high = tl.full([TILE], float("-inf"), wide)
    nonzero = tl.zeros([TILE], tl.int32)
    for fold in range(program, folds, programs):
        part = tl.zeros([TILE], wide)
        part_squares = tl.zeros([TILE], wide)
        for i in tl.static_range(TILES):
            x = _widened(tl.load(numbers + fold * FOLD + i * TILE + tile), wide)
            part += x
            part_squares += x * x
            nonzero += (x != 0).to(tl.int32)
            low = tl.minimum(low, x)
            high = tl.maximum(high, x)
        total += part.to(tl.float64)
        squares += part_squares.to(tl.float64)
    if folds % programs == program:  # the short fold
        part = tl.zeros([TILE], wide)
        part_squares = tl.zeros([TILE], wide)
        for start in range(folds * FOLD, count, TILE):
            there = start + tile < count
            x = _widened(tl.load(numbers + start + tile, mask=there, other=0), wide)
            part += x
            part_squares += x * x
            nonzero += (x != 0).to(tl.int32)
            low = tl.minimum(low, tl.where(there, x, float("inf")))
            high = tl.maximum(high, tl.where(there, x, float("-inf")))
        total += part.to(tl.float64)
        squares += part_squares.to(tl.float64)
    return tl.sum(total), tl.sum(squares), tl.min(low), tl.max(high), tl.sum(nonzero.to(tl.int64))


@triton.jit
def _second_pass(numbers: tl.tensor, count: tl.tensor) -> tl.tuple:
    """Return sum, sum of squares, and the counts of non-finite numbers and of NaN of this program's folds, all in float64."""
    program = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0).to(tl.int64)
    tile = tl.arange(0, TILE)
    total = tl.zeros([TILE], tl.float64)
    squares = tl.zeros([TILE], tl.float64)
    nonfinite = tl.zeros([TILE], tl.int32)
    nan = tl.zeros([TILE], tl.int32)
    for fold in range(program, tl.cdiv(count, FOLD), programs):
        for i in range(TILES):
            at = fold * FOLD + i * TILE + tile
            x = _widened(tl.load(numbers + at, mask=at < count, other=0), tl.float64)
            total += x
            squares += x * x
            nonfinite += _is_not_finite(x).to(tl.int32)
            nan += (x != x).to(tl.int32)  # noqa: PLR0124 - only NaN differs from itself
    return tl.sum(total), tl.sum(squares), tl.sum(nonfinite.to(tl.int64)), tl.sum(nan.to(tl.int64))


@triton.jit
def _is_not_finite(x: tl.tensor) -> tl.tensor:
    return (x != x) | (tl.abs(x) == float("inf"))  # noqa: PLR0124 - only NaN differs from itself


@triton.jit(do_not_specialize=("first", "count"))
def statistics(
    numbers: tl.tensor, rows: tl.tensor, first: tl.int32, count: tl.int64, what: tl.constexpr
) -> None:
    """Write the statistics of contiguous numbers into a table, a row for each program.

    Args:
        numbers: The numbers.
        rows: The table: columns of sum, sum of squares, minimum, maximum, counts of non-zero and
            of non-finite numbers and of NaN.
        first: The row of the first program.
        count: How many numbers there are.
        what: `FULL`, `NORM` or `FINITE`; columns of other statistics stay as they are.
    """
    exact: tl.constexpr = numbers.dtype.element_ty == tl.float64
    wide: tl.constexpr = tl.float64 if exact else tl.float32
    total, squares, low, high, nonzero = _first_pass(numbers, count, wide)
    again = _is_not_finite(total)
    if what != FINITE and not exact:
        again = again | _is_not_finite(squares) | (squares < SMALL)
    if what == FULL and not exact:
        again = again & (nonzero > 0)
    nonfinite = tl.full([], 0, tl.int64)
    nan = tl.full([], 0, tl.int64)
    if again:
        total, squares, nonfinite, nan = _second_pass(numbers, count)
        low = tl.where(nan > 0, float("nan"), low)
        high = tl.where(nan > 0, float("nan"), high)
    row = rows + (first + tl.program_id(0)).to(tl.int64) * COLUMNS
    tl.store(row, total)
    if what != FINITE:
        tl.store(row + 1, squares)
        tl.store(row + 5, nonfinite.to(tl.float64))
        tl.store(row + 6, nan.to(tl.float64))
    if what == FULL:
        tl.store(row + 2, low)
        tl.store(row + 3, high)
        tl.store(row + 4, nonzero.to(tl.float64))
