"""A second pass over the same values, which makes quantiles exact.

# Note [Second pass]
The first pass knows the code of each quantile (Note [Codes]) and how many values lie below it. The second counts, for
those codes alone, the digits that were cut off, and so finds the number of the right rank: a radix selection in two
steps. It gives the values as float32 has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from kedge.errors import ReducerError
from kedge.features.reduce import float_codes
from kedge.features.reduce.histogram import Per, arranged
from kedge.features.reduce.layout import Positions
from kedge.features.reduce.reducer import Reducer, State


class ExactQuantiles(Reducer):
    """The quantiles that a first pass has bounded, exactly; made by `Quantiles.second_pass`. See Note [Second pass].

    The result is that of `Quantiles` without extremes. It takes ``8 * 2^(23 - digits)`` bytes for each channel and quantile:
    0.5 MB with 7 digits.

    Args:
        wanted: For each channel the code of each quantile, and its rank among the values of that code.
        counted: How many values of each channel the first pass has counted.
        q: The quantiles.
        per: As in the first pass, and so are `digits`, `positions` and `channel`.
    """

    def __init__(
        self,
        wanted: Sequence[Sequence[Sequence[int]]],
        counted: Sequence[int],
        q: Sequence[float],
        **first: Any,
    ) -> None:
        positions: Positions | None = first.pop("positions")
        channel: int = first.pop("channel")
        super().__init__(wanted=wanted, counted=counted, q=q, positions=positions, channel=channel, **first)
        self.per: Per = first["per"]
        self.channels = len(counted) if self.per == "channel" else None
        self.digits: int = first["digits"]
        self.codes, self.ranks = torch.tensor(wanted, dtype=torch.int64).unbind(2)
        width = 1 << (float_codes.MANTISSA - self.digits)
        self.counts = torch.zeros(*self.codes.shape, width, dtype=torch.int64)
        self.seen = torch.zeros(len(counted), dtype=torch.int64)

    def result(self) -> dict[str, Any]:
        """Return the quantiles.

        Raises:
            ReducerError: If not as many values came as in the first pass.
        """
        counted = torch.tensor(self.settings["counted"])
        if not torch.equal(self.seen, counted):
            raise ReducerError(
                f"the second pass has seen {int(self.seen.sum())} values and the first {int(counted.sum())}; "
                "give both the same values"
            )
        # The digits of a negative number grow with its magnitude, so there the last come first.
        negative = self.codes[..., None] < 0
        upto = torch.where(negative, self.counts.flip(2), self.counts).cumsum(2)
        rest = torch.searchsorted(upto, self.ranks[..., None].contiguous())
        rest = torch.where(negative, self.counts.shape[2] - 1 - rest, rest)[..., 0]
        values = torch.where(counted[:, None] > 0, float_codes.decode(self.codes, rest, self.digits), torch.nan)
        q = torch.tensor(self.settings["q"], dtype=torch.float64)
        if self.per == "whole":
            return {"q": q, "n": int(counted[0]), "quantiles": values[0], "relative_error": 0.0}
        return {"q": q, "n": counted, "quantiles": values, "relative_error": 0.0}

    def _take(self, values: Tensor, _keys: Sequence[str] | None, /) -> None:
        for piece in self._pieces(values):
            rows = arranged(piece, self.per).float() + 0.0
            self._count(rows)

    def _count(self, rows: Tensor) -> None:
        there = ~rows.isnan()
        self.seen += there.sum(0).cpu()
        codes, rest = float_codes.encode(rows, self.digits)
        channels, quantiles, width = self.counts.shape
        places = rest + torch.arange(channels, device=rows.device) * width
        for number in range(quantiles):
            hits = places[there & (codes == self.codes[:, number].to(rows.device))]
            found = torch.bincount(hits, minlength=channels * width).reshape(channels, width)
            self.counts[:, number] += found.cpu()

    def _merge(self, other: Self) -> None:
        self.counts += other.counts
        self.seen += other.seen

    def _state(self) -> State:
        return {"counts": self.counts, "seen": self.seen}

    def _load(self, state: State) -> None:
        self.counts, self.seen = state["counts"], state["seen"]
