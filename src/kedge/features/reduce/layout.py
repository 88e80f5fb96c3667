"""The layout of a batch of features as rows of channels.

# Note [Positions]
A value ``[n, c, h, w]`` has ``h * w`` positions for each sample and channel. A summary that counts
each position as a sample means something else than one that pools a sample's positions first. So
nothing is guessed: the caller must choose, and a reducer without that choice refuses values with
several positions.

A mean over positions is added up in float64 along a fixed tree of halves. Each addition is then one
of two given numbers, and a sample's mean has the same bits in any batch and on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kedge.errors import ReducerError
from kedge.torch_internals.accelerators import with_doubles

Positions = Literal["samples", "mean", "max", "elements"]

PIECE = 1 << 20
"""The number of elements processed at once on a CPU: 8 MiB in float64, which nearly fits into its cache."""
FARTHER = 16
"""The factor for other devices, where launching work dominates the time."""
_PLAIN = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.int64,
        torch.int32,
        torch.int16,
    }
)


@dataclass(frozen=True)
class ChannelLayout:
    """The dimension of the channels, and the treatment of positions; see Note [Positions].

    Attributes:
        positions: "samples": each position is a sample of its own; "mean" or "max": a sample's
            positions are pooled first; "elements": each element of a sample is a channel of its
            own; None: values have a single position.
        channel: The dimension of the channels in a batch: 1 for images, -1 for tokens.
    """

    positions: Positions | None
    channel: int

    def __post_init__(self) -> None:
        """Check the settings."""
        if self.positions not in (None, *get_args(Positions)):
            raise ReducerError(
                f"positions={self.positions!r}: use one of {', '.join(map(repr, get_args(Positions)))}, or None for "
                "values that have one position only"
            )
        if self.channel == 0:
            raise ReducerError(
                "channel=0 is the dimension of the samples; use 1 for images, -1 for tokens"
            )

    def pieces(self, values: Tensor) -> Iterator[Tensor]:
        """Yield the rows of a batch in pieces small enough for memory.

        Yields:
            Tensors ``[rows, channels]``.
        """
        values = numbers(values)
        whole = values.numel() // len(values)
        if whole == 0:
            raise ReducerError(
                f"values of shape {list(values.shape)} hold no elements; there is nothing to reduce"
            )
        most = PIECE if values.device.type == "cpu" else PIECE * FARTHER
        for piece in values.split(max(1, most // whole)):
            yield self.rows(piece)

    def rows(self, values: Tensor) -> Tensor:
        """Return a batch as ``[rows, channels]``, in float64 if positions were averaged."""
        if values.dim() == 1:
            return values[:, None]
        if self.positions == "elements":
            return values.flatten(1)
        if not -values.dim() < self.channel < values.dim():
            raise ReducerError(
                f"channel={self.channel}: values of shape {list(values.shape)} have no such dimension"
            )
        return self._without_positions(
            values.movedim(self.channel, 1).flatten(2) if values.dim() > 2 else values
        )

    def _without_positions(self, values: Tensor) -> Tensor:
        if values.dim() == 2:
            return values
        count = values.shape[2]
        if count == 1:
            return values[:, :, 0]
        if self.positions == "samples":
            return values.transpose(1, 2).reshape(-1, values.shape[1])
        if self.positions == "mean":
            return mean_of_positions(values)
        if self.positions == "max":
            return values.amax(2)
        raise ReducerError(
            f"values have {count} positions for each sample and channel, and positions= does not say how to reduce them; give "
            "positions='samples', 'mean', 'max' or 'elements'"
        )


def mean_of_positions(values: Tensor) -> Tensor:
    """Return the mean over the last dimension in float64, the same bits in every batch; see Note [Positions]."""
    count = values.shape[-1]
    total = values.double()
    while (width := total.shape[-1]) > 1:
        half = width // 2
        paired = total[..., :half] + total[..., half : 2 * half]
        total = torch.cat([paired, total[..., 2 * half :]], -1) if width % 2 else paired
    return total[..., 0] / count


def numbers(values: Tensor) -> Tensor:
    """Return a batch detached and dense, in a type that PyTorch can compare and add; raise ReducerError if impossible."""
    if values.is_complex() or values.is_nested or values.is_meta or values.is_quantized:
        kinds = {"complex": values.is_complex(), "nested": values.is_nested, "meta": values.is_meta}
        kind = next((name for name, holds in kinds.items() if holds), "quantized")
        raise ReducerError(
            f"a reducer needs real numbers and got a {kind} tensor; give it values that have an order"
        )
    values = values.detach()
    if values.layout is not torch.strided:
        values = values.to_dense()
    values = with_doubles(values)
    return values if values.dtype in _PLAIN else values.double()
