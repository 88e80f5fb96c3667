"""Many short texts in little memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np


class PackedTexts(Sequence[str]):
    """Texts that are joined to one: each takes its characters and eight bytes, not an object.

    Args:
        texts: The texts.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._joined = "".join(texts)
        self._ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, which: int) -> str: ...

    @overload
    def __getitem__(self, which: slice) -> list[str]: ...

    def __getitem__(self, which: int | slice) -> str | list[str]:
        if isinstance(which, slice):
            return [self[number] for number in range(*which.indices(len(self)))]
        end = self._ends[which]
        number = which % len(self)
        return self._joined[self._ends[number - 1] if number else 0 : end]

    def __iter__(self) -> Iterator[str]:
        start = 0
        for end in self._ends.tolist():
            yield self._joined[start:end]
            start = end
