"""What a site's values can go through before they are kept, by name."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


def mean(values: Tensor) -> Tensor:
    """Average over the positions of an image or a volume: all dimensions after the channels'."""
    return values if values.ndim < 3 else values.flatten(2).mean(2)


def greatest(values: Tensor) -> Tensor:
    """Take the greatest of all positions of an image or a volume."""
    return values if values.ndim < 3 else values.flatten(2).amax(2)


def tokens(values: Tensor) -> Tensor:
    """Average over tokens, which are the dimension after the samples'."""
    return values.mean(1)


def first(values: Tensor) -> Tensor:
    """Take the first token, such as a class token."""
    return values[:, 0]


def last(values: Tensor) -> Tensor:
    """Take the last token."""
    return values[:, -1]


def flatten(values: Tensor) -> Tensor:
    """Make one row of numbers of each sample."""
    return values.flatten(1)


POOLINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": mean,
    "max": greatest,
    "tokens": tokens,
    "first": first,
    "last": last,
    "flatten": flatten,
}
