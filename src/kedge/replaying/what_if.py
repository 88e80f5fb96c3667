"""What is different when a kept step runs again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from kedge.short_text import counted, listed

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
"""The types of autocast, by the names that are typed."""


@dataclass(frozen=True)
class WhatIf:
    """What is different; nothing by default.

    Attributes:
        rate: The learning rate of all groups.
        clip: The norm to which the gradients are clipped before the optimizer steps.
        without_rows: Rows of the batch that are left out, from 0.
        double: Whether the step is computed in float64.
        autocast: The name of the type for autocast, one of `DTYPES`.
        seed: The seed of PyTorch's random numbers, in place of their state then.
    """

    rate: float | None = None
    clip: float | None = None
    without_rows: Sequence[int] = ()
    double: bool = False
    autocast: str | None = None
    seed: int | None = None

    def __str__(self) -> str:
        """Return it in words; empty if nothing is different."""
        return ", ".join(self._words())

    def _words(self) -> Iterator[str]:
        if self.rate is not None:
            yield f"rate {self.rate:g}"
        if self.clip is not None:
            yield f"gradients clipped to {self.clip:g}"
        if self.without_rows:
            rows = listed([str(row) for row in self.without_rows], 4)
            yield f"without {counted(len(self.without_rows), 'row')} ({rows})"
        if self.double:
            yield "in float64"
        if self.autocast is not None:
            yield f"autocast to {self.autocast}"
        if self.seed is not None:
            yield f"seed {self.seed}"

    def precision(self, device: str) -> AbstractContextManager[object]:
        """Return the context in which the step is computed."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(device, dtype=DTYPES[self.autocast])
