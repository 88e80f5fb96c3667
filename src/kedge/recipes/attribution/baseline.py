"""The baseline of an attribution: what a value is compared with."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from kedge.errors import AttributionError


class Baseline:
    """A baseline, and how far the values of a call are from it.

    Args:
        baseline: A number, or a tensor that fits the values.
    """

    def __init__(self, baseline: float | Tensor) -> None:
        self.baseline = baseline
        self.differences: dict[str, Tensor] = {}

    def begin(self, values: Mapping[str, Tensor]) -> None:
        """Note how far the values are from the baseline."""
        self.differences = {name: value - self.of(value) for name, value in values.items()}

    def of(self, value: Tensor) -> Tensor:
        """Return the baseline of a value.

        Raises:
            AttributionError: It does not fit.
        """
        baseline = torch.as_tensor(self.baseline, dtype=value.dtype, device=value.device).detach()
        try:
            return baseline.expand_as(value)
        except RuntimeError as error:
            raise AttributionError(
                f"baseline has the shape {list(baseline.shape)}, which does not fit a value of "
                f"{list(value.shape)}; give a number, one sample, or a baseline for each sample"
            ) from error

    def ended(self, name: str, summed: Tensor) -> Tensor:
        """Return the attribution: what a change is worth, times the whole change."""
        return summed * self.differences[name]
