"""The samples with the largest, or the smallest, value of each channel.

# Note [Order of the best]
Samples are ordered by value, and those of equal value by key, as text. That is an order of all
samples, so the first `k` do not depend on batches or on the order of merges. -0.0 is 0.0. NaN has
no place in an order: it is left out and counted. A sample that comes twice counts twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kedge.errors import ReducerError
from kedge.features.reduce.reducer import Positions, Reducer, State

Best = list[tuple[float, str]]


class TopK(Reducer):
    """A reducer for the k samples with the largest, or smallest, value of each channel; see Note [Order of the best].

    The result has `n` (samples), `nan` ``[channels]``, `values` ``[channels, k]`` in float64, the
    best first and NaN where there are fewer samples, and `keys`, a list of at most k keys for each
    channel.

    Args:
        k: The number of samples to keep for each channel.
        largest: Whether to keep the largest values; False for the smallest.
        positions: What to do with values of more than two dimensions: "max" or "mean", because a
            sample has one value for each channel here; or "elements".
        channel: The dimension of the channels: 1 for images, -1 for tokens.

    Examples:
        >>> best = recipes.TopK(1)
        >>> best.update(torch.tensor([[1.0], [3.0]]), ["first", "second"])
        >>> best.result()["keys"]
        [['second']]
    """

    def __init__(
        self,
        k: int = 10,
        *,
        largest: bool = True,
        positions: Positions | None = None,
        channel: int = 1,
    ) -> None:
        super().__init__(k=k, largest=largest, positions=positions, channel=channel)
        if k < 1:
            raise ReducerError(f"k={k}: keep at least one sample of each channel")
        if positions == "samples":
            raise ReducerError(
                "positions='samples': a key stands for a sample, not for a position; "
                "use 'max' or 'mean'"
            )
        self.k = k
        self.n = 0
        self.nan = torch.zeros(0, dtype=torch.int64)
        self.best: list[Best] = []

    def result(self) -> dict[str, Any]:
        """Return `n`, `nan`, and the best samples' values and keys."""
        keys: list[list[str]] = [[] for _ in self.best]
        for names, best in zip(keys, self.best, strict=True):
            names += [key for _, key in best]
        return {"n": self.n, "nan": self.nan.clone(), "values": self._table(), "keys": keys}

    def _take(self, values: Tensor, keys: Sequence[str] | None, /) -> None:
        if keys is None:
            raise ReducerError(
                "TopK keeps the keys of samples, and this batch has none; call update(values, keys)"
            )
        if not all(isinstance(key, str) for key in keys):
            raise ReducerError(
                "keys must be texts, which order samples of equal value; give str(key) for each"
            )
        order = sorted(range(len(keys)), key=keys.__getitem__)
        at = 0
        ordered = values[torch.tensor(order, device=values.device)]
        for piece in self._pieces(ordered):
            rows = piece.double() + 0.0
            self._select(rows, [keys[i] for i in order[at : at + len(rows)]])
            at += len(rows)

    def _select(self, rows: Tensor, keys: list[str]) -> None:
        """Add rows in the order of their keys; a stable sort then keeps equal values in that order."""
        self._prepare(rows.shape[1])
        self.n += len(rows)
        missing = rows.isnan()
        self.nan += missing.sum(0).cpu()
        largest = self.settings["largest"]
        worst = -torch.inf if largest else torch.inf
        ordered = rows.masked_fill(missing, worst)
        values, places = ordered.sort(dim=0, descending=largest, stable=True)
        held = (~missing).sum(0)
        aside = missing.gather(0, places).to(torch.uint8)
        # NaN come last, even after infinities.
        last = aside.sort(dim=0, stable=True).indices
        best_values = values.gather(0, last)[: self.k].T.cpu().numpy()
        best_rows = places.gather(0, last)[: self.k].T.cpu().numpy()
        names = np.array(keys, dtype=object)
        for channel, count in enumerate(held.tolist()):
            if not count:
                continue
            known = self.best[channel]
            first = best_values[channel, 0], names[best_rows[channel, 0]]
            if len(known) < self.k or self._order(first) < self._order(known[-1]):
                some = slice(0, min(count, self.k))
                kept = names[best_rows[channel, some]]
                new = zip(best_values[channel, some].tolist(), kept, strict=True)
                self._enter(channel, list(new))

    def _enter(self, channel: int, new: Best) -> None:
        self.best[channel] = sorted(self.best[channel] + new, key=self._order)[: self.k]

    def _order(self, entry: tuple[float, str]) -> tuple[float, str]:
        value, key = entry
        if self.settings["largest"]:
            value = -value
        return value, key

    def _prepare(self, channels: int) -> None:
        if not self.best:
            self.best = [[] for _ in range(channels)]
            self.nan = torch.zeros(channels, dtype=torch.int64)

    def _merge(self, other: Self) -> None:
        self._prepare(len(other.best))
        self.n += other.n
        self.nan += other.nan
        for channel, best in enumerate(other.best):
            self._enter(channel, best)

    def _table(self) -> Tensor:
        table = torch.full((len(self.best), self.k), torch.nan, dtype=torch.float64)
        for row, best in zip(table, self.best, strict=True):
            row[: len(best)] = torch.tensor([value for value, _ in best], dtype=torch.float64)
        return table

    def _state(self) -> State:
        """Return the counts and values, and the keys as concatenated bytes."""
        texts: list[bytes] = []
        for best in self.best:
            texts += [key.encode("utf-8", "surrogatepass") for _, key in best]
        held = torch.tensor([len(best) for best in self.best], dtype=torch.int64)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64)
        joined = torch.from_numpy(np.frombuffer(b"".join(texts), dtype=np.uint8).copy())
        return {
            "n": torch.tensor(self.n),
            "nan": self.nan,
            "held": held,
            "values": self._table(),
            "keys": joined,
            "lengths": lengths,
        }

    def _load(self, state: State) -> None:
        self.n, self.nan = int(state["n"]), state["nan"]
        joined = state["keys"].numpy().tobytes()
        ends = state["lengths"].cumsum(0).tolist()
        starts = [0, *ends]
        pieces = [joined[start:end] for start, end in zip(starts, ends, strict=False)]
        texts = [piece.decode("utf-8", "surrogatepass") for piece in pieces]
        keys = iter(texts)
        rows = zip(state["values"].tolist(), state["held"].tolist(), strict=True)
        self.best = []
        for row, held in rows:
            self.best.append([(value, next(keys)) for value in row[:held]])
