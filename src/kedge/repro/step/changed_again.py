"""What runs again on other values than the program's: tensors that it changes in place a second time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kedge.sites import leaves


class ChangedAgain:
    """Follows which memory has other values than when the program ran.

    Memory that was there before the program's lines ran again has their changes already; what
    changes it once more, and all that is computed of it, has other values.
    """

    def __init__(self) -> None:
        self._own: set[int] = set()
        self._other: set[int] = set()

    def before(self, changed: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that a call will change and that were there before, each with a copy."""
        return [
            (tensor, tensor.detach().clone())
            for tensor in changed
            if leaves.has_memory(tensor) and leaves.storage_of(tensor) not in self._own
        ]

    def follow(
        self,
        given: Sequence[Tensor],
        made: Sequence[Tensor],
        before: Sequence[tuple[Tensor, Tensor]],
    ) -> bool:
        """Follow a call; returns whether its results have the values that they had in the program.

        Args:
            given: What it took.
            made: What it returned or changed.
            before: What `before` returned of it.
        """
        taken = {leaves.storage_of(tensor) for tensor in given if leaves.has_memory(tensor)}
        is_other = not taken.isdisjoint(self._other)
        results = {leaves.storage_of(tensor) for tensor in made if leaves.has_memory(tensor)}
        self._own |= results - taken
        if is_other:
            self._other |= results
        else:
            self._other -= results - taken
        for tensor, earlier in before:
            if not _are_equal(tensor, earlier):
                self._other.add(leaves.storage_of(tensor))
        return results.isdisjoint(self._other)


def _are_equal(tensor: Tensor, earlier: Tensor) -> bool:
    now = tensor.detach()
    if now.shape != earlier.shape:
        return False
    both_nan = torch.zeros_like(now, dtype=torch.bool)
    if now.is_floating_point() or now.is_complex():
        both_nan = torch.isnan(now) & torch.isnan(earlier)
    return bool(((now == earlier) | both_nan).all())
