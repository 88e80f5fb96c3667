"""Quantiles in little memory: a sketch of all values, or of each channel's.

# Note [Which quantile]
The quantile `q` of `n` values is the one of rank ``max(1, ceil(q n))``, the least value with a
share `q` of all values at or below it: one of the values, never a number between two (Hyndman and
Fan's first definition, "Sample quantiles in statistical packages", The American Statistician 50(4),
1996; numpy's ``inverted_cdf``). `q` counts as the decimal number that Python prints for it. NaN
have no order and are left out; infinities have one.

# Note [Error of quantiles]
The sketch is Apache DataSketches' KLL (Z. Karnin, K. Lang and E. Liberty, "Optimal quantile
approximation in streams", FOCS 2016). It keeps about ``3 k`` values, each of which represents a
power of two of the values seen. The rank of a returned value, divided by `n`, differs from `q` by
at most `normalized_rank_error` in 99 of 100 cases, for any distribution: 0.14 % with `k = 2048`.
Merged sketches have the same bound. It bounds the rank and not the value: where values are sparse,
the next rank can be far away. Up to `k` values the sketch keeps all, results are exact, and the
error is 0.

The package selects the kept values at random, with a generator of its own that cannot be seeded.
Two runs over more than `k` values return results that differ within the bound; other random
generators are not affected. The least and the greatest value are always exact.

Values are rounded to float32. Finite values beyond float32's range, 3.4e38, are refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from importlib import import_module
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kedge.errors import ReducerError, required
from kedge.features.reduce.histogram import Per, arranged, check_per
from kedge.features.reduce.reducer import Positions, Reducer, State

SMALLEST_K, LARGEST_K = 8, 65_535
"""The range of `k` that the package accepts."""


class Quantiles(Reducer):
    """A reducer for quantiles of all values or of each channel; see Note [Which quantile] and Note [Error of quantiles].

    The result has `n` (values that are not NaN), `nan`, `q`, `quantiles`, `min`, `max` and
    `normalized_rank_error`; with `per="channel"` all but `q` and the error have the channels as
    their first dimension. Without values a quantile is NaN. The error is the bound on ``|rank / n -
    q|`` that holds in 99 of 100 cases, 0.0 where results are exact. A sketch takes about ``12 k``
    bytes: 24 KB with `k = 2048`.

    Args:
        q: The quantiles, each from 0 to 1.
        per: "whole" for quantiles of all values, "channel" for those of each channel.
        k: The size of a sketch, from 8 to 65,535: doubling it halves the error and doubles the
            memory.
        positions: What to do with values of more than two dimensions: "samples", "mean", "max" or
            "elements".
        channel: The dimension of the channels: 1 for images, -1 for tokens.

    Raises:
        MissingExtra: If the package datasketches is not installed.
    """

    def __init__(
        self,
        q: Sequence[float] = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99),
        *,
        per: Per = "whole",
        k: int = 2048,
        positions: Positions | None = "samples",
        channel: int = 1,
    ) -> None:
        wanted = [float(one) for one in q]
        super().__init__(q=wanted, per=per, k=k, positions=positions, channel=channel)
        if not wanted or not all(0 <= one <= 1 for one in wanted):
            raise ReducerError(f"q={wanted}: quantiles are numbers from 0 to 1, and at least one")
        if not SMALLEST_K <= k <= LARGEST_K:
            raise ReducerError(
                f"k={k}: use {SMALLEST_K} to {LARGEST_K:,}; twice as much halves the error"
            )
        check_per(per)
        _sketch_type()  # a missing package is reported before anything is computed
        self.k = k
        self.sketches: list[Any] = []
        self.nan = torch.zeros(0, dtype=torch.int64)

    def result(self) -> dict[str, Any]:
        """Return the quantiles."""
        wanted = self.settings["q"]
        ends = torch.tensor([_ends(one) for one in self.sketches], dtype=torch.float64)
        ends = ends.reshape(-1, 2)
        values = [_quantiles(one, wanted) for one in self.sketches]
        found = {
            "n": torch.tensor([one.n for one in self.sketches], dtype=torch.int64),
            "nan": self.nan.clone(),
            "quantiles": torch.tensor(values, dtype=torch.float64).reshape(-1, len(wanted)),
            "min": ends[:, 0].clone(),
            "max": ends[:, 1].clone(),
        }
        if self.settings["per"] == "whole":
            found = _only(found, len(wanted))
        q = torch.tensor(wanted, dtype=torch.float64)
        return {"q": q, **found, "normalized_rank_error": self._rank_error()}

    def _rank_error(self) -> float:
        sketches = [one for one in self.sketches if one.is_estimation_mode()]
        return max((one.normalized_rank_error(as_pmf=False) for one in sketches), default=0.0)

    def _take(self, values: Tensor, _keys: Sequence[str] | None, /) -> None:
        for piece in self._pieces(values):
            rows = arranged(piece, self.settings["per"]).float() + 0.0  # -0.0 is 0.0
            if piece.dtype == torch.float64:
                beyond = rows.isinf() & piece.reshape(rows.shape).isfinite()
                if bool(beyond.any()):
                    raise ReducerError(
                        "Quantiles counts values as float32, and some of these exceed "
                        "its 3.4e38; scale the values first"
                    )
            self._prepare(rows.shape[1])
            self.nan += rows.isnan().sum(0).cpu()
            columns = rows.T.contiguous().cpu().numpy()
            for sketch, column in zip(self.sketches, columns, strict=True):
                sketch.update(column)  # skips NaN

    def _prepare(self, channels: int) -> None:
        if not self.sketches:
            self.sketches = [_sketch_type()(self.k) for _ in range(channels)]
            self.nan = torch.zeros(channels, dtype=torch.int64)

    def _merge(self, other: Self) -> None:
        self._prepare(len(other.sketches))
        self.nan += other.nan
        pairs = zip(self.sketches, other.sketches, strict=True)
        self.sketches = [_joined(mine, theirs) for mine, theirs in pairs]

    def _state(self) -> State:
        """Return the sketches as the package's bytes, one after the other."""
        written = [one.serialize() for one in self.sketches]
        lengths = torch.tensor([len(text) for text in written], dtype=torch.int64)
        joined = np.frombuffer(b"".join(written), dtype=np.uint8).copy()
        return {"sketches": torch.from_numpy(joined), "lengths": lengths, "nan": self.nan}

    def _load(self, state: State) -> None:
        written = state["sketches"].numpy().tobytes()
        ends = state["lengths"].cumsum(0).tolist()
        self.sketches = [_read(written[start:end]) for start, end in pairwise([0, *ends])]
        self.nan = state["nan"]

    def __getstate__(self) -> dict[str, Any]:
        """Return the state with sketches as bytes, because a sketch cannot be pickled."""
        written = [one.serialize() for one in self.sketches]
        return {**super().__getstate__(), "sketches": written}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state and read the sketches from bytes."""
        sketches = [_read(written) for written in state["sketches"]]
        self.__dict__.update(state, sketches=sketches)


def rank(q: float, n: int) -> int:
    """Return the rank of a quantile among `n` values, from 1; see Note [Which quantile]."""
    return max(1, math.ceil(Fraction(repr(q)) * n))


def _quantiles(sketch: Any, wanted: Sequence[float]) -> list[float]:
    """Return a sketch's quantiles; the first and the last rank return the extremes, which the sketch knows exactly."""
    n = sketch.n
    if not n:
        return [math.nan] * len(wanted)
    ranks = [rank(q, n) for q in wanted]
    # Half a rank less: the package rounds up, and floating point may give a little more than a
    # whole number.
    found = sketch.get_quantiles([(one - 0.5) / n for one in ranks], inclusive=True)
    ends = dict(zip((1, n), _ends(sketch), strict=True))
    return [ends.get(one, value) for one, value in zip(ranks, found, strict=True)]


def _ends(sketch: Any) -> tuple[float, float]:
    """Return the least and the greatest value; NaN for an empty sketch."""
    if sketch.is_empty():
        return math.nan, math.nan
    return sketch.get_min_value(), sketch.get_max_value()


def _joined(mine: Any, theirs: Any) -> Any:
    """Return the merged sketch; a copy of `theirs` if `mine` is empty."""
    if mine.is_empty():
        return _read(theirs.serialize())
    mine.merge(theirs)
    return mine


def _read(written: bytes) -> Any:
    return _sketch_type().deserialize(written)


def _sketch_type() -> Any:
    with required("datasketches", "quantiles", "Quantiles need"):
        return import_module("datasketches").kll_floats_sketch


def _only(found: dict[str, Tensor], quantiles: int) -> dict[str, Any]:
    """Return the single summary of all values, without the dimension of channels."""
    if not len(found["n"]):
        nothing = torch.full((quantiles,), torch.nan, dtype=torch.float64)
        return {"n": 0, "nan": 0, "quantiles": nothing, "min": math.nan, "max": math.nan}
    one = {name: value[0] for name, value in found.items()}
    return {name: value if value.dim() else value.item() for name, value in one.items()}
