"""Quantiles in constant memory: integer counts over the order of floating-point numbers, merged exactly.

# Note [Which quantile]
The quantile `q` of `n` values is the one of rank ``max(1, ceil(q n))``, the least that has a share `q` of all values at or
below it: one of the values, never something between two (Hyndman and Fan's first definition, "Sample quantiles in
statistical packages", The American Statistician 50(4), 1996; numpy's ``inverted_cdf``). `q` is taken as the decimal number
that it is written as. NaN have no order and are left out; infinities have one.

# Note [Error of quantiles]
Values are rounded to float32 and counted by their code (Note [Codes]), so the code of the right value is found exactly;
what is not known is which of the code's numbers it is. Its middle is given, no more than ``2^-(digits + 1)`` of the right
value away (with 7 digits 0.4 %), or 2^-(127 + digits) for numbers below 2^-126; the rounding adds 2^-24. If no value had
digits that were cut off, such as bfloat16 with 7 digits, results are exact and `relative_error` is 0. The least and the
greatest value are always exact, as float32 has them; what float32 has no number for, beyond 3.4e38, is refused.

That is a bound on the value, for every distribution, and merging does not add to it. Sketches such as t-digest (T. Dunning
and O. Ertl, 2019) bound the rank instead, and what they give depends on the order of merging.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Self

import torch
from torch import Tensor

from kedge.errors import ReducerError
from kedge.features.reduce import float_codes
from kedge.features.reduce.exact_quantiles import ExactQuantiles
from kedge.features.reduce.histogram import Per, arranged, check_per
from kedge.features.reduce.layout import Positions
from kedge.features.reduce.reducer import Reducer, State

MOST_DIGITS = 12


class Quantiles(Reducer):
    """Quantiles of all values, or of each channel's; see Note [Which quantile] and Note [Error of quantiles].

    The result holds `n` (values that are not NaN), `nan`, `q`, `quantiles`, `min`, `max` and `relative_error`; with
    `per="channel"` all but `q` and `relative_error` have the channels as their first dimension. A quantile of nothing is NaN.
    It takes 8 bytes for each code between the least and the greatest: at most 0.5 MB a channel with 7 digits, and twice as
    much with each digit more.

    Args:
        q: The quantiles, each from 0 to 1.
        per: "whole": of all values; "channel": of each channel.
        digits: How many binary digits of the mantissa are told apart, from 0 to 12.
        positions: What becomes of values with more than two dimensions: "samples", "mean", "max" or "elements".
        channel: The dimension of the channels.
    """

    def __init__(
        self,
        q: Sequence[float] = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99),
        *,
        per: Per = "whole",
        digits: int = 7,
        positions: Positions | None = "samples",
        channel: int = 1,
    ) -> None:
        wanted = [float(one) for one in q]
        super().__init__(q=wanted, per=per, digits=digits, positions=positions, channel=channel)
        if not wanted or not all(0 <= one <= 1 for one in wanted):
            raise ReducerError(f"q={wanted}: quantiles are numbers from 0 to 1, and at least one")
        if not 0 <= digits <= MOST_DIGITS:
            raise ReducerError(f"digits={digits}: take 0 to {MOST_DIGITS}; each more takes twice the memory")
        check_per(per)
        self.digits = digits
        self.low = 0
        self.counts = torch.zeros(0, 0, dtype=torch.int64)
        self.nan = torch.zeros(0, dtype=torch.int64)
        self.extremes = torch.zeros(2, 0)
        self.cut = False

    def result(self) -> dict[str, Any]:
        """Return the quantiles."""
        counts = self.counts.cpu()
        upto = counts.cumsum(1)
        n = counts.sum(1)
        least, most = torch.where(n > 0, self.extremes.double().cpu(), torch.nan)
        ranks = self._ranks(n)
        values = self._values(self._codes(upto, ranks), n)
        values = torch.where(ranks == n[:, None], most[:, None], values)
        values = torch.where(ranks == 1, least[:, None], values)
        values = torch.maximum(torch.minimum(values, most[:, None]), least[:, None])
        found = {"n": n, "nan": self.nan.cpu(), "quantiles": values, "min": least, "max": most}
        found = {name: value.clone() for name, value in found.items()}
        if self.settings["per"] == "whole":
            found = _only(found, len(self.settings["q"]))
        q = torch.tensor(self.settings["q"], dtype=torch.float64)
        return {"q": q, **found, "relative_error": 2.0 ** -(self.digits + 1) if self.cut else 0.0}

    def second_pass(self) -> ExactQuantiles:
        """Make the reducer that finds these quantiles exactly, given the same values once more.

        Raises:
            ReducerError: If nothing was counted.
        """
        if not len(self.counts):
            raise ReducerError("a second pass follows a first one: give values to update() before")
        counts = self.counts.cpu()
        upto, n = counts.cumsum(1), counts.sum(1)
        ranks = self._ranks(n)
        codes = self._codes(upto, ranks)
        below = (upto - counts).gather(1, codes - self.low) if upto.shape[1] else torch.zeros_like(ranks)
        settings = {name: value for name, value in self.settings.items() if name != "reducer"}
        return ExactQuantiles(torch.stack([codes, ranks - below], 2).tolist(), n.tolist(), **settings)

    def _ranks(self, n: Tensor) -> Tensor:
        ranks = [[rank(q, int(count)) for q in self.settings["q"]] for count in n]
        return torch.tensor(ranks, dtype=torch.int64).reshape(len(n), len(self.settings["q"]))

    def _codes(self, upto: Tensor, ranks: Tensor) -> Tensor:
        """Return the codes of the values of these ranks, and some code where nothing was counted."""
        return torch.searchsorted(upto, ranks).clamp(max=max(0, upto.shape[1] - 1)) + self.low

    def _values(self, codes: Tensor, n: Tensor) -> Tensor:
        """Return the numbers that stand for codes, NaN where nothing was counted."""
        shown = float_codes.middle(codes, self.digits) if self.cut else float_codes.decode(codes, 0, self.digits)
        return torch.where(n[:, None] > 0, shown, torch.nan)

    def _take(self, values: Tensor, _keys: Sequence[str] | None, /) -> None:
        for piece in self._pieces(values):
            rows = arranged(piece, self.settings["per"]).float() + 0.0  # -0.0 is 0.0
            if piece.dtype == torch.float64 and bool((rows.isinf() & piece.reshape(rows.shape).isfinite()).any()):
                raise ReducerError(
                    "Quantiles count numbers as float32 has them, and some here are beyond its 3.4e38; scale the values first"
                )
            self._prepare(rows.shape[1], rows.device)
            self._count(rows.to(self.counts.device))

    def _prepare(self, channels: int, device: torch.device) -> None:
        if not len(self.counts):
            self.counts = torch.zeros(channels, 0, dtype=torch.int64, device=device)
            self.nan = torch.zeros(channels, dtype=torch.int64, device=device)
            self.extremes = _no_extremes(channels, device)

    def _count(self, rows: Tensor) -> None:
        missing = rows.isnan()
        codes, rest = float_codes.encode(rows, self.digits)
        if some := bool(missing.any()):
            self.nan += missing.sum(0)
            codes, rest = codes.masked_fill(missing, 0), rest.masked_fill(missing, 0)
        self.cut = self.cut or bool(rest.any())
        found = torch.stack(
            [rows.masked_fill(missing, torch.inf).amin(0), rows.masked_fill(missing, -torch.inf).amax(0)]
        )
        self._stretch(found)
        self._add(codes, missing if some else None)

    def _add(self, codes: Tensor, missing: Tensor | None) -> None:
        channels, width = self.counts.shape
        places = codes - self.low + torch.arange(channels, device=codes.device) * width
        places = places.flatten() if missing is None else places[~missing]
        if places.numel() * 4 >= channels * width:
            self.counts += torch.bincount(places, minlength=channels * width).reshape(channels, width)
        else:
            ones = torch.ones((), dtype=torch.int64, device=places.device).expand(places.shape)
            self.counts.view(-1).scatter_add_(0, places, ones)

    def _stretch(self, extremes: Tensor) -> None:
        """Widen the counts to hold every code between these extremes, in whole powers of two."""
        least, most = self.extremes
        self.extremes = torch.stack([torch.minimum(least, extremes[0]), torch.maximum(most, extremes[1])])
        least, most = self.extremes[:, (self.extremes[0] <= self.extremes[1])]
        if not len(least):
            return
        ends, _ = float_codes.encode(torch.stack([least.min(), most.max()]), self.digits)
        first, last = (int(end) for end in ends)
        self._resize(first >> self.digits << self.digits, ((last >> self.digits) + 1) << self.digits)

    def _resize(self, low: int, high: int) -> None:
        channels, width = self.counts.shape
        if width:
            low, high = min(low, self.low), max(high, self.low + width)
        if high - low > width:
            counts = torch.zeros(channels, high - low, dtype=torch.int64, device=self.counts.device)
            counts[:, self.low - low : self.low - low + width] = self.counts if width else 0
            self.low, self.counts = low, counts

    def _merge(self, other: Self) -> None:
        if not len(other.counts):
            return
        self._prepare(len(other.counts), other.counts.device)
        device = self.counts.device
        self.cut = self.cut or other.cut
        self.nan += other.nan.to(device)
        self._stretch(other.extremes.to(device))
        where = other.counts.nonzero()
        channels, codes = where[:, 0].to(device), (where[:, 1] + other.low).to(device)
        self.counts[channels, codes - self.low] += other.counts[other.counts > 0].to(device)

    def _state(self) -> State:
        """Return the counts that are not zero, with their codes, whatever memory they were counted in."""
        where = self.counts.nonzero()
        return {
            "channel": where[:, 0].int(),
            "code": (where[:, 1] + self.low).int(),
            "count": self.counts[self.counts > 0],
            "nan": self.nan,
            "extremes": self.extremes,
            "cut": torch.tensor(self.cut),
        }

    def _load(self, state: State) -> None:
        self.nan, self.cut = state["nan"], bool(state["cut"])
        channels = len(self.nan)
        self.low, self.counts = 0, torch.zeros(channels, 0, dtype=torch.int64)
        self.extremes = _no_extremes(channels, self.nan.device)
        self._stretch(state["extremes"])
        self.counts[state["channel"].long(), state["code"].long() - self.low] = state["count"]


def rank(q: float, n: int) -> int:
    """Return the rank of a quantile among so many values, from 1; see Note [Which quantile]."""
    return max(1, math.ceil(Fraction(repr(q)) * n))


def _no_extremes(channels: int, device: torch.device) -> Tensor:
    ends = torch.tensor([[torch.inf], [-torch.inf]], device=device)
    return ends.repeat(1, channels)


def _only(found: dict[str, Tensor], quantiles: int) -> dict[str, Any]:
    """Return the one summary there is of all values."""
    if not len(found["n"]):
        nothing = torch.full((quantiles,), torch.nan, dtype=torch.float64)
        return {"n": 0, "nan": 0, "quantiles": nothing, "min": math.nan, "max": math.nan}
    one = {name: value[0] for name, value in found.items()}
    return {name: value if value.dim() else value.item() for name, value in one.items()}
