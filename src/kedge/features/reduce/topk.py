"""The samples, or their positions, with the largest or the smallest value of each channel.

# Note [Order of the best]
Samples are ordered by value, those of equal value by key, as text, and those of equal key by
position. That is an order of all samples, so the first `k` do not depend on batches or on the order
of merges. -0.0 is 0.0. NaN has no place in an order: it is left out and counted. A sample that
comes twice counts twice.

# Note [Ties]
How many values equal the last one that is kept is counted over all values, so the result says how
many of them were left out for their keys alone. A value better than the last is always kept, so if
another value becomes the last, those equal to it are all in the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from kedge.errors import ReducerError
from kedge.features.reduce.reducer import Positions, Reducer, State

Entry = tuple[float, str, int]
"""A value, the key of its sample, and its position there."""
Best = list[Entry]


class TopK(Reducer):
    """A reducer for the k samples with the largest, or smallest, value of each channel; see Note [Order of the best].

    The result has `n` (samples, or positions of samples), `nan` ``[channels]``, `values`
    ``[channels, k]`` in float64, the best first and NaN where there are fewer samples, `keys`, a
    list of at most k keys for each channel, `positions` ``[channels, k]`` and `tied`
    ``[channels]``: how many more have the last of these values, see Note [Ties]. A position counts
    over all dimensions of positions, and is -1 for a mean of several, and where there is no value.

    Args:
        k: The number of samples to keep for each channel.
        largest: Whether to keep the largest values; False for the smallest.
        positions: What to do with values of more than two dimensions: "max" or "mean" for one
            value of each sample, "samples" for the best positions of all samples, of which one may
            have several; or "elements".
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
        self.k = k
        self.n = 0
        self.nan = torch.zeros(0, dtype=torch.int64)
        self.best: list[Best] = []
        self.equal = torch.zeros(0, dtype=torch.int64)

    def result(self) -> dict[str, Any]:
        """Return `n`, `nan`, and the best samples' values, keys and positions, and what is tied."""
        keys = [[key for _, key, _ in best] for best in self.best]
        kept = torch.tensor([_equal_to_last(best) for best in self.best], dtype=torch.int64)
        return {
            "n": self.n,
            "nan": self.nan.clone(),
            "values": self._table(),
            "keys": keys,
            "positions": self._places(),
            "tied": self.equal - kept,
        }

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
        for piece in self.layout.split(ordered):
            rows = self.layout.rows(piece).double() + 0.0
            self._fix_channels(rows.shape[1])
            several = len(rows) // len(piece)
            some = order[at : at + len(piece)]
            names = [keys[i] for i in some for _ in range(several)]
            self._select(rows, self.layout.places(piece).expand(rows.shape), names)
            at += len(piece)

    def _select(self, rows: Tensor, positions: Tensor, keys: list[str]) -> None:
        """Add rows in the order of their keys and positions.

        Of each channel at most k are looked at: those better than the k-th best, and of those equal
        to it the first, which are few to sort.
        """
        self._prepare(rows.shape[1])
        self.n += len(rows)
        missing = rows.isnan()
        self.nan += missing.sum(0).cpu()
        rank = rows if self.settings["largest"] else -rows
        rank = rank.masked_fill(missing, -torch.inf)
        count = min(self.k, len(rows))
        last = rank.topk(count, dim=0).values[-1]
        better = rank > last
        equal = (rank == last) & ~missing
        among_first = equal.cumsum(0) <= count - better.sum(0)
        chosen = better | (equal & among_first)
        channels, places = chosen.T.nonzero(as_tuple=True)
        values = rows[places, channels].tolist()
        at = positions[places, channels].tolist()
        names = [keys[i] for i in places.tolist()]
        entries = list(zip(values, names, at, strict=True))

        before = list(self.best)
        start = 0
        for channel, number in enumerate(chosen.sum(0).tolist()):
            new = entries[start : start + number]
            start += number
            known = self.best[channel]
            if new and (
                len(known) < self.k
                or self._order(min(new, key=self._order)) < self._order(known[-1])
            ):
                self._enter(channel, new)
        ends = [best[-1][0] if best else torch.nan for best in self.best]
        at_end = (rows == torch.tensor(ends, dtype=rows.dtype, device=rows.device)).sum(0)
        self._count(before, at_end.cpu())

    def _enter(self, channel: int, new: Best) -> None:
        self.best[channel] = sorted(self.best[channel] + new, key=self._order)[: self.k]

    def _count(self, before: list[Best], added: Tensor) -> None:
        """Count the values equal to the last ones; see Note [Ties].

        Args:
            before: The best before some values came.
            added: How many of these equal the last ones.
        """
        for channel, best in enumerate(self.best):
            known = before[channel]
            if best and (len(known) < self.k or known[-1][0] != best[-1][0]):
                self.equal[channel] = sum(value == best[-1][0] for value, _, _ in known)
        self.equal += added

    def _order(self, entry: Entry) -> Entry:
        value, key, position = entry
        if self.settings["largest"]:
            value = -value
        return value, key, position

    def _prepare(self, channels: int) -> None:
        if not self.best:
            self.best = [[] for _ in range(channels)]
            self.nan = torch.zeros(channels, dtype=torch.int64)
            self.equal = torch.zeros(channels, dtype=torch.int64)

    def _merge(self, other: Self) -> None:
        self._prepare(len(other.best))
        self.n += other.n
        self.nan += other.nan
        before = list(self.best)
        for channel, best in enumerate(other.best):
            self._enter(channel, best)
        added = torch.zeros_like(self.equal)
        for channel, (best, theirs) in enumerate(zip(self.best, other.best, strict=True)):
            if not theirs:
                continue
            if theirs[-1][0] == best[-1][0]:
                added[channel] = other.equal[channel]
            else:
                added[channel] = sum(value == best[-1][0] for value, _, _ in theirs)
        self._count(before, added)

    def _table(self) -> Tensor:
        table = torch.full((len(self.best), self.k), torch.nan, dtype=torch.float64)
        for row, best in zip(table, self.best, strict=True):
            row[: len(best)] = torch.tensor([value for value, _, _ in best], dtype=torch.float64)
        return table

    def _places(self) -> Tensor:
        table = torch.full((len(self.best), self.k), -1, dtype=torch.int64)
        for row, best in zip(table, self.best, strict=True):
            row[: len(best)] = torch.tensor([position for _, _, position in best])
        return table

    def _state(self) -> State:
        """Return the counts and values, and the keys as concatenated bytes."""
        texts: list[bytes] = []
        for best in self.best:
            texts += [key.encode("utf-8", "surrogatepass") for _, key, _ in best]
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
            "positions": self._places(),
            "equal": self.equal,
        }

    def _load(self, state: State) -> None:
        self.n, self.nan = int(state["n"]), state["nan"]
        joined = state["keys"].numpy().tobytes()
        ends = state["lengths"].cumsum(0).tolist()
        starts = [0, *ends]
        pieces = [joined[start:end] for start, end in zip(starts, ends, strict=False)]
        texts = [piece.decode("utf-8", "surrogatepass") for piece in pieces]
        keys = iter(texts)
        places = state.get("positions")  # states of before have none
        if places is None:
            places = torch.full_like(state["values"], -1).long()
        rows = zip(state["values"].tolist(), places.tolist(), state["held"].tolist(), strict=True)
        self.best = []
        for row, positions, held in rows:
            best = zip(row[:held], positions[:held], strict=True)
            self.best.append([(value, next(keys), position) for value, position in best])
        kept = torch.tensor([_equal_to_last(best) for best in self.best], dtype=torch.int64)
        self.equal = state.get("equal", kept)


def _equal_to_last(best: Best) -> int:
    """Return how many of some entries have the value of the last one."""
    return sum(value == best[-1][0] for value, _, _ in best)
