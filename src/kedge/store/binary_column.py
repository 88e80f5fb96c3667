"""Rows of a binary column: pieces of one run of bytes, worked on together rather than one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Held:
    """Some rows of a binary column: where each starts and ends in the bytes that hold them all."""

    data: Bytes
    starts: Places
    ends: Places

    @classmethod
    def of(cls, rows: Sequence[bytes]) -> Held:
        """Put the bytes of rows together."""
        ends = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)))
        return cls(np.frombuffer(b"".join(rows), np.uint8), np.concatenate([[0], ends[:-1]])[: len(rows)], ends)

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def lengths(self) -> Places:
        """How many bytes each row has."""
        return self.ends - self.starts

    def chosen(self, which: NDArray[np.integer] | NDArray[np.bool_]) -> Held:
        """Give some of the rows."""
        return Held(self.data, self.starts[which], self.ends[which])

    def each(self) -> list[bytes]:
        """Give the bytes of each row."""
        if np.array_equal(self.starts, self.ends):
            return [b""] * len(self)
        data = self.data
        return [data[a:b].tobytes() for a, b in zip(self.starts.tolist(), self.ends.tolist(), strict=True)]

    def matrix(self, width: int) -> Bytes:
        """Give rows that have this many bytes each, as a line each."""
        return np.take(self.data, self.starts[:, None] + np.arange(width))


def joined(parts: Sequence[Held]) -> Held:
    """Put rows together that are held apart."""
    return parts[0] if len(parts) == 1 else Held.of([row for part in parts for row in part.each()])
