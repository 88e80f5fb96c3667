"""Histograms of magnitudes by power of two: how near numbers are to the limits of a format.

# Note [Exponents]
A step draws some elements of a value, evenly spread, and counts the finite non-zero ones among them
by ``floor(log2(abs(x)))``. There are 83 buckets: 80 of one power of two each, from 2^-48 to below
2^32, one for larger numbers, one for smaller numbers from 2^-126 on, and one for numbers below
that, which are subnormal in float32 and bfloat16. In a file a histogram is one byte with the number
of its first non-empty bucket, and the counts from there to the last non-empty bucket, two bytes
each, the low one first. If a count needs more, all have four bytes each and the highest bit of the
first byte is set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kedge.errors import NotARecording
from kedge.store.binary_column import BinaryColumn

LOWEST = -48
HIGHEST = 31
SMALLEST_NORMAL = -126
BUCKETS = HIGHEST - LOWEST + 4

_WIDE = 0x80
_HALF_MOST = np.iinfo(np.uint16).max

_FIRST = [bytes([i]) for i in range(BUCKETS)]
#: The bits of a float32 without its sign.
_MAGNITUDE = np.uint32(0x7FFFFFFF)
#: The number of bits of its mantissa.
_MANTISSA = np.uint32(23)

Counts = NDArray[np.int64]


def spacing(number: int, most: int) -> int:
    """Return the distance at which to draw elements of a flat value, at most ``most`` of them.

    It has no factor in common with the number of elements, and so none with any dimension's size:
    elements a multiple of a row's length apart would all be in one column, which may be the black
    border of an image.

    Args:
        number: The number of elements.
        most: The most elements to draw.
    """
    distance = max(1, -(-number // most))
    while math.gcd(distance, number) > 1:
        distance += 1
    return distance


def _buckets() -> NDArray[np.intp]:
    """Return the bucket of each of float32's 256 exponents; one past the last for non-finite numbers."""
    powers = np.arange(256) - 127
    buckets = np.clip(powers - LOWEST + 2, 1, BUCKETS - 1)
    buckets[0] = 0
    buckets[255] = BUCKETS
    return buckets


_BUCKET_OF = _buckets()


def edges() -> NDArray[np.float64]:
    """Return the 84 borders of the buckets as powers of two, the first -inf and the last inf."""
    inner = [SMALLEST_NORMAL, *range(LOWEST, HIGHEST + 2)]
    return np.array([-np.inf, *inner, np.inf], dtype=np.float64)


def encode(counts: Counts) -> bytes:
    """Return one histogram as bytes; none if it is empty."""
    held = np.flatnonzero(counts)
    if not len(held):
        return b""
    kept = counts[held[0] : held[-1] + 1]
    if kept.max() > _HALF_MOST:
        return bytes([int(held[0]) | _WIDE]) + kept.astype("<u4").tobytes()
    return bytes([int(held[0])]) + kept.astype("<u2").tobytes()


def count_runs(numbers: NDArray[np.float32], runs: NDArray[np.intp]) -> Counts:
    """Return the number of finite non-zero elements of runs of numbers by their power of two.

    Args:
        numbers: The numbers.
        runs: The start and end of each run, shape ``(runs, 2)``.

    Returns:
        Shape ``(runs, 83)``.
    """
    lengths = runs[:, 1] - runs[:, 0]
    run = np.repeat(np.arange(len(runs)), lengths)
    if len(run) != len(numbers):  # the runs are not contiguous
        moved_by = runs[:, 0] - (np.cumsum(lengths) - lengths)
        numbers = numbers[np.arange(len(run)) + np.repeat(moved_by, lengths)]
    magnitude = np.ascontiguousarray(numbers).view(np.uint32) & _MAGNITUDE
    bucket = np.where(magnitude == 0, BUCKETS, _BUCKET_OF[magnitude >> _MANTISSA])
    counts = np.bincount(run * (BUCKETS + 1) + bucket, minlength=len(runs) * (BUCKETS + 1))
    return counts.reshape(len(runs), BUCKETS + 1)[:, :BUCKETS].astype(np.int64)


def encode_all(counts: Counts) -> list[bytes]:
    """Return many histograms as bytes, as :func:`encode` does one.

    No count may need more than two bytes.
    """
    held = counts > 0
    firsts = held.argmax(axis=1).tolist()
    lasts = (BUCKETS - held[:, ::-1].argmax(axis=1)).tolist()
    content = counts.astype("<u2").tobytes()
    histograms = [b""] * len(counts)
    for i in np.flatnonzero(held.any(axis=1)).tolist():
        first, last = firsts[i], lasts[i]
        start = 2 * BUCKETS * i
        histograms[i] = _FIRST[first] + content[start + 2 * first : start + 2 * last]
    return histograms


def decode(histogram: bytes) -> Counts:
    """Return the counts of one histogram, shape ``(83,)``; zeros for no bytes."""
    counts = np.zeros(BUCKETS, dtype=np.int64)
    if not histogram:
        return counts
    width = 2
    if histogram[0] & _WIDE:
        width = 4
    start = histogram[0] & ~_WIDE
    number, rest = divmod(len(histogram) - 1, width)
    _must_fit(rest == 0 and start + number <= BUCKETS)
    counts[start : start + number] = np.frombuffer(histogram, f"<u{width}", offset=1)
    return counts


def decode_all(histograms: BinaryColumn) -> Counts:
    """Return the counts of many histograms, shape ``(histograms, 83)``."""
    counts = np.zeros((len(histograms), BUCKETS), dtype=np.int64)
    drawn = np.flatnonzero(histograms.lengths)
    firsts = histograms.data[histograms.starts[drawn]]
    for width, marked in ((2, 0), (4, _WIDE)):
        which = firsts & _WIDE == marked
        _decode_into(counts, drawn[which], firsts[which] & ~np.uint8(_WIDE), histograms, width)
    return counts


def _decode_into(
    counts: Counts,
    rows: NDArray[np.int64],
    firsts: NDArray[np.uint8],
    histograms: BinaryColumn,
    width: int,
) -> None:
    """Write the counts of histograms of one width into their rows."""
    lengths, rest = np.divmod(histograms.lengths[rows] - 1, width)
    _must_fit(not rest.any() and bool((firsts + lengths <= BUCKETS).all()))
    begins = np.cumsum(lengths) - lengths
    within = np.arange(lengths.sum()) - np.repeat(begins, lengths)
    places = np.repeat(histograms.starts[rows] + 1, lengths) + width * within
    kept = np.zeros(len(places), dtype=np.int64)
    for digit in range(width):
        kept |= histograms.data[places + digit].astype(np.int64) << 8 * digit
    counts[np.repeat(rows, lengths), np.repeat(firsts, lengths) + within] = kept


def _must_fit(fits: bool) -> None:
    if not fits:
        raise NotARecording(
            "the recording is damaged: a histogram in it does not fit its buckets; "
            "record the run again"
        )


def quantile(counts: Counts, q: float) -> NDArray[np.float64]:
    """Return an estimate of a quantile of the magnitudes.

    They are taken to be log-uniform within their bucket.

    Args:
        counts: Histograms, shape ``(..., 83)``.
        q: Between 0 and 1.

    Returns:
        Shape ``(...)``; NaN where nothing was counted.
    """
    return quantiles(counts, (q,))[0]


def quantiles(counts: Counts, qs: Sequence[float]) -> list[NDArray[np.float64]]:
    """Return estimates of several quantiles, as :func:`quantile` does of one."""
    borders = edges()
    # The open buckets are taken to be a factor of two wide, as their neighbours are.
    borders[0] = borders[1] - 1
    borders[-1] = borders[-2] + 1
    upto = np.cumsum(counts, axis=-1)
    return [_located(counts, upto, q * upto[..., -1:], borders) for q in qs]


def _located(
    counts: Counts,
    upto: Counts,
    wanted: NDArray[np.floating],
    borders: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return the magnitude below which the wanted number of elements lie."""
    at = np.minimum((upto < wanted).sum(axis=-1), BUCKETS - 1)
    held = np.take_along_axis(counts, at[..., None], axis=-1)[..., 0]
    before = np.take_along_axis(upto, at[..., None], axis=-1)[..., 0] - held
    with np.errstate(invalid="ignore", divide="ignore"):
        within = np.where(held > 0, (wanted[..., 0] - before) / held, np.nan)
        power = borders[at] + within * (borders[at + 1] - borders[at])
    return np.asarray(np.where(upto[..., -1] > 0, np.exp2(power), np.nan))


def below(counts: Counts, power: int) -> NDArray[np.float64]:
    """Return the share of the counted elements smaller than ``2 ** power``.

    Args:
        counts: Histograms, shape ``(..., 83)``.
        power: A border of the buckets: -126, or from -48 to 32.

    Returns:
        Shape ``(...)``; NaN where nothing was counted.
    """
    place = int(np.searchsorted(edges(), power))
    if edges()[place] != power:
        raise ValueError(
            f"2**{power} is inside a bucket; "
            f"ask at {SMALLEST_NORMAL}, or from {LOWEST} to {HIGHEST + 1}"
        )
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(counts[..., :place].sum(axis=-1) / counts.sum(axis=-1))
