"""The layout of a tensor's elements.

Codecs encode them in the order of memory, and restore all strides.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ElementLayout(NamedTuple):
    """The layout to put flat elements back where they lay.

    Attributes:
        size: The shape.
        stride: The strides; 0 where a dimension is expanded.
        dtype: The dtype.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def stored(self) -> tuple[int, ...]:
        """The shape to store: with 1 for each expanded dimension."""
        sizes = list(self.size)
        for d, step in enumerate(self.stride):
            if step == 0:
                sizes[d] = 1
        return tuple(sizes)

    def order(self) -> tuple[list[int], list[int]]:
        """Return the dimensions of more than one stored element, and the others.

        The former go from the largest stride to the smallest.
        """
        stored = self.stored
        several = [d for d, n in enumerate(stored) if n > 1]
        others = [d for d, n in enumerate(stored) if n <= 1]
        several.sort(key=lambda d: -self.stride[d])
        return several, others


def flatten(value: Tensor) -> tuple[Tensor, ElementLayout] | None:
    """Return a tensor's elements in the order in which they lie in memory, each once.

    Nothing is copied if they lie without gaps.

    Returns:
        A 1-D tensor and its layout; None if elements share memory in a way that strides of 0 do not
        describe.
    """
    layout = ElementLayout(tuple(value.shape), value.stride(), value.dtype)
    order, rest = layout.order()
    reach = 1
    for d in reversed(order):
        if layout.stride[d] < reach:
            return None
        reach += layout.stride[d] * (layout.size[d] - 1)

    once = value.as_strided(layout.stored, layout.stride)
    return once.permute(order + rest).reshape(-1), layout


def restore(flat: Tensor, layout: ElementLayout) -> Tensor:
    """Return elements where they lay, in their dtype.

    This is an alias of `flat` if it has that dtype and there are no gaps.
    """
    stored = layout.stored
    order, rest = layout.order()
    flat = flat.to(layout.dtype)
    if _is_dense(stored, layout.stride, order):
        return flat.as_strided(layout.size, layout.stride)

    # Room for everything between the first element and the last.
    room = 1 + sum((n - 1) * step for n, step in zip(stored, layout.stride, strict=True))
    whole = flat.new_zeros(room)
    ordered = [stored[d] for d in order + rest]
    target = whole.as_strided(stored, layout.stride).permute(order + rest)
    target.copy_(flat.view(ordered))
    return whole.as_strided(layout.size, layout.stride)


def _is_dense(size: tuple[int, ...], stride: tuple[int, ...], order: list[int]) -> bool:
    """Whether elements lie without gaps; `order` goes from the largest stride to the smallest."""
    expected = 1
    for d in reversed(order):
        if stride[d] != expected:
            return False
        expected *= size[d]
    return True
