"""Histograms of features, exactly mergeable, with given or automatic edges."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor

from kedge.errors import ReducerError
from kedge.features.reduce.bin_grids import FixedGrid, PowerGrid
from kedge.features.reduce.layout import Positions
from kedge.features.reduce.reducer import Reducer, State

Per = Literal["whole", "channel"]

_ASIDE = ("nan", "-inf", "inf")


class Histogram(Reducer):
    """A reducer that counts values between edges; each position of a sample is a value unless positions are pooled.

    With edges, bins are as in `numpy.histogram`: ``[a, b)``, the last ``[a, b]``. Without, all bins
    have the same width, a power of two, and begin at its multiples: the smallest for which at most
    `bins` of them reach from the smallest to the largest value. Either way counts are exact and
    merge exactly.

    The result has `n` (values), `counts`, `edges`, `under`, `over`, `nan`, `-inf` and `inf`; with
    `per="channel"` each has the channels as its first dimension, except for given edges.

    Args:
        edges: Increasing finite numbers; None for automatic edges.
        bins: The largest number of automatic bins.
        per: "whole" for one histogram, "channel" for one of each channel.
        positions: What to do with values of more than two dimensions: "samples", "mean", "max" or
            "elements".
        channel: The dimension of the channels: 1 for images, -1 for tokens.

    Examples:
        >>> histogram = recipes.Histogram(edges=[0, 1, 2])
        >>> histogram.update(torch.tensor([[0.5], [1.5], [1.6]]))
        >>> histogram.result()["counts"].tolist()
        [1, 2]
    """

    def __init__(
        self,
        edges: Sequence[float] | None = None,
        *,
        bins: int = 64,
        per: Per = "whole",
        positions: Positions | None = "samples",
        channel: int = 1,
    ) -> None:
        given = None if edges is None else [float(edge) for edge in edges]
        super().__init__(edges=given, bins=bins, per=per, positions=positions, channel=channel)
        if given is not None and (len(given) < 2 or not _increase(given)):
            raise ReducerError(
                f"edges={given}: a histogram needs two or more finite numbers, each above the last"
            )
        if bins < 2:
            raise ReducerError(f"bins={bins}: values on both sides of zero need two bins or more")
        check_per(per)
        self.grid: FixedGrid | PowerGrid | None = None
        self.aside = torch.zeros(0, len(_ASIDE), dtype=torch.int64)

    def result(self) -> dict[str, Any]:
        """Return the number of values, the counts, the edges, and the counts of values outside the edges."""
        grid = self.grid or self._new_grid(0 if self.settings["per"] == "channel" else 1)
        aside = (
            self.aside
            if self.grid
            else torch.zeros(len(grid.counts), len(_ASIDE), dtype=torch.int64)
        )
        found = grid.result() | {name: aside[:, i].clone() for i, name in enumerate(_ASIDE)}
        counted = found["counts"].sum(1) + found["under"] + found["over"] + aside.sum(1)
        if self.settings["per"] == "whole":
            return {"n": int(counted[0]), **_only(found)}
        return {"n": counted, **found}

    def _new_grid(self, channels: int) -> FixedGrid | PowerGrid:
        edges = self.settings["edges"]
        return (
            PowerGrid(self.settings["bins"], channels)
            if edges is None
            else FixedGrid(tuple(edges), channels)
        )

    def _prepare(self, channels: int) -> FixedGrid | PowerGrid:
        if self.grid is None:
            self.grid = self._new_grid(channels)
            self.aside = torch.zeros(channels, len(_ASIDE), dtype=torch.int64)
        return self.grid

    def _take(self, values: Tensor, _keys: Sequence[str] | None, /) -> None:
        for piece in self._pieces(values):
            rows = arranged(piece, self.settings["per"]).double() + 0.0  # -0.0 is 0.0
            grid = self._prepare(rows.shape[1])
            finite = rows.isfinite()
            if not finite.all():
                self.aside += torch.stack(
                    [rows.isnan().sum(0), rows.isneginf().sum(0), rows.isposinf().sum(0)], 1
                ).cpu()
            grid.count(rows, finite)

    def _merge(self, other: Self) -> None:
        if other.grid is not None:
            grid: Any = self._prepare(
                len(other.aside)
            )  # of the same kind as the other's, because the settings are equal
            grid.merge(other.grid)
            self.aside += other.aside

    def _state(self) -> State:
        return ({} if self.grid is None else self.grid.state()) | {"aside": self.aside}

    def _load(self, state: State) -> None:
        self.grid, self.aside = None, state["aside"]
        if "counts" in state:
            self.grid = self._new_grid(len(self.aside))
            self.grid.load(state)


def arranged(rows: Tensor, per: Per) -> Tensor:
    """Return rows with one column for each summary."""
    return rows.reshape(-1, 1) if per == "whole" else rows


def check_per(per: str) -> None:
    """Check that `per` is "whole" or "channel"."""
    if per not in ("whole", "channel"):
        raise ReducerError(
            f"per={per!r}: use 'whole' for one summary, or 'channel' for one per channel"
        )


def _only(found: dict[str, Tensor]) -> dict[str, Any]:
    """Return the single histogram of all values, without empty automatic bins at its end."""
    automatic = found["edges"].dim() == 2
    edges, counts = found["edges"][0] if automatic else found["edges"], found["counts"][0]
    last = int(counts.nonzero().max()) + 1 if automatic and counts.any() else len(counts)
    outside = {name: int(found[name]) for name in ("under", "over", *_ASIDE)}
    return {"edges": edges[: last + 1], "counts": counts[:last], **outside}


def _increase(edges: list[float]) -> bool:
    return all(map(math.isfinite, edges)) and all(a < b for a, b in itertools.pairwise(edges))
