"""Pooling transforms for a site's values, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def mean(values: Tensor) -> Tensor:
    """Return the mean over the positions of an image or a volume: all dimensions after the channels."""
    return values if values.ndim < 3 else values.flatten(2).mean(2)


def greatest(values: Tensor) -> Tensor:
    """Return the maximum over the positions of an image or a volume."""
    return values if values.ndim < 3 else values.flatten(2).amax(2)


def tokens(values: Tensor) -> Tensor:
    """Return the mean over tokens, the dimension after the samples."""
    return values.mean(1)


def first(values: Tensor) -> Tensor:
    """Return the first token, such as a class token."""
    return values[:, 0]


def last(values: Tensor) -> Tensor:
    """Return the last token."""
    return values[:, -1]


def flatten(values: Tensor) -> Tensor:
    """Return one row of numbers for each sample."""
    return values.flatten(1)


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": mean,
    "max": greatest,
    "tokens": tokens,
    "first": first,
    "last": last,
    "flatten": flatten,
}
