"""Rows of a binary column: pieces of one array of bytes, processed together rather than one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BinaryColumn:
    """Some rows of a binary column: the start and end of each in one array of bytes."""

    data: Bytes
    starts: Places
    ends: Places

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> BinaryColumn:
        """Return rows given as bytes."""
        lengths = np.fromiter(map(len, rows), np.int64, len(rows))
        ends = np.cumsum(lengths)
        return cls(np.frombuffer(b"".join(rows), np.uint8), ends - lengths, ends)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> Places:
        """The number of bytes of each row."""
        return self.ends - self.starts

    def chosen(
        self,
        which: NDArray[np.integer] | NDArray[np.bool_] | slice,
    ) -> BinaryColumn:
        """Return some of the rows."""
        return BinaryColumn(self.data, self.starts[which], self.ends[which])

    def each(self) -> list[bytes]:
        """Return the bytes of each row."""
        if np.array_equal(self.starts, self.ends):
            return [b""] * len(self)
        data = self.data
        borders = zip(self.starts.tolist(), self.ends.tolist(), strict=True)
        return [data[start:end].tobytes() for start, end in borders]

    def compact(self) -> BinaryColumn:
        """Return the same rows with their bytes alone, one after the other."""
        lengths = self.lengths
        ends = np.cumsum(lengths)
        places = np.arange(lengths.sum()) + np.repeat(self.starts - (ends - lengths), lengths)
        return BinaryColumn(self.data[places], ends - lengths, ends)

    def matrix(self, width: int) -> Bytes:
        """Return a matrix with a line for each row; every row has this many bytes."""
        return np.take(self.data, self.starts[:, None] + np.arange(width))


def joined(parts: Sequence[BinaryColumn]) -> BinaryColumn:
    """Return the rows of several parts as one."""
    if len(parts) == 1:
        return parts[0]
    data = [np.zeros(0, np.uint8)]
    starts = [np.zeros(0, np.int64)]
    ends = [np.zeros(0, np.int64)]
    before = 0
    for part in parts:
        dense = part.compact()
        data.append(dense.data)
        starts.append(dense.starts + before)
        ends.append(dense.ends + before)
        before += len(dense.data)
    return BinaryColumn(np.concatenate(data), np.concatenate(starts), np.concatenate(ends))
