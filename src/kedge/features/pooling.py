"""Pooling of a site's values over their positions, as the model's own operations show them.

See Note [What a dimension is] for positions and channels, and Note [Masks] for padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from kedge.errors import ExtractError
from kedge.features.dimensions import FLAT, Arguments, Layout, Mask
from kedge.short_text import counted

How = Literal["mean", "max", "tokens", "first", "last", "flatten"]
_OF_SEQUENCES = ("tokens", "first", "last")


@dataclass(frozen=True)
class Pool:
    """A transform for `kedge.extract` that pools values over their positions, without padding.

    It knows positions from the operations of the first forward, and padding from
    ``attention_mask``, ``key_padding_mask`` and ``lengths`` among the arguments.

    Args:
        how: "mean" or "max" over all positions; "tokens", the mean over the one dimension of a
            sequence; "first" or "last" of a sequence; "flatten": all in a row.
        channels: The dimension of the channels, where the model does not show it: 1 for images, -1
            for tokens.
        padding: "keep" counts padding as if it were data.

    Raises:
        ExtractError: If an argument is none of these.

    Examples:
        >>> features = kedge.extract(model, {"stem": kedge.features.pooling.Pool("mean")})
    """

    how: How
    channels: int | None = None
    padding: Literal["leave out", "keep"] = "leave out"

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.how not in get_args(How):
            raise ExtractError(f"{self.how!r}: pool with one of {', '.join(get_args(How))}")
        if not (self.channels is None or (isinstance(self.channels, int) and self.channels != 0)):
            raise ExtractError(
                f"channels={self.channels!r}: give the dimension of the channels, 1 "
                "for images or -1 for tokens; 0 is that of the samples"
            )
        if self.padding not in ("leave out", "keep"):
            raise ExtractError(f"padding={self.padding!r}: give padding='keep', or leave it out")

    @property
    def __name__(self) -> str:
        """The name in messages and in the description of a folder."""
        given = []
        if self.channels is not None:
            given.append(f"channels={self.channels}")
        if self.padding != "leave out":
            given.append(f"padding={self.padding}")
        name = f"{self.how} over positions"
        return f"{name} ({', '.join(given)})" if given else name

    def __call__(self, value: Tensor) -> Tensor:
        """Pool a value of which nothing but its shape is known.

        Raises:
            ExtractError: If the dimension of its channels is not given, and it has several
                positions.
        """
        if self.how == "flatten":
            return value.flatten(1)
        if value.dim() > FLAT and self.channels is None:
            raise ExtractError(_UNSEEN.format(how=self.how))
        return self._pooled(value, self._flat_layout(value), None)

    def layout(self, value: Tensor, found: Layout | None, name: str) -> Layout:
        """Return the layout to use for a value.

        Raises:
            ExtractError: If there is none.
        """
        if self.how == "flatten" or (found is None and value.dim() <= FLAT):
            return found or self._flat_layout(value)
        if found is None:
            raise ExtractError(
                f'"{name}": the values have shape {list(value.shape)}, and the '
                "model's operations do "
                "not show which dimensions are positions; name the dimension of the "
                f"channels, such as {self.how}(channels=-1) for tokens and "
                f"{self.how}(channels=1) for images, or give a function of your own"
            )
        if self.how in _OF_SEQUENCES and len(found.positions) > 1:
            raise ExtractError(
                f'"{name}": {self.how} is of a sequence, and the values have shape '
                f"{list(value.shape)} with positions in dimensions "
                f"{' and '.join(map(str, found.positions))}; use mean or max"
            )
        return found

    def pool(self, value: Tensor, layout: Layout, given: Arguments, name: str) -> Tensor:
        """Pool a value over its positions.

        Raises:
            ExtractError: If it has padding that cannot be left out, or a sample has no token.
        """
        if self.how == "flatten":
            return value.movedim(layout.samples, 0).flatten(1)
        return self._pooled(value, layout, self._kept(value, layout, given, name))

    def described(self, shape: Sequence[int], layout: Layout, given: Arguments) -> str:
        """Return what was done with values of a shape, for the user."""
        if not layout.positions:
            return "as it is: it has no positions"
        sizes = [shape[dim] for dim in layout.positions]
        aside = (layout.samples, *layout.positions)
        rest = [size for dim, size in enumerate(shape) if dim not in aside]
        count = f"{_times(sizes)} positions"
        if len(sizes) == 1:
            count = counted(sizes[0], "position")
        mask = self._mask(layout, given.masks())
        if self.how == "flatten":
            said = f"all {count} in a row"
        elif mask is None:
            said = f"{_VERBS[self.how]} {count}"
        else:
            verb = "counts" if "length" in mask.name else "leaves"
            tokens = f"the tokens that {mask.name} {verb}"
            said = f"{_VERBS[self.how]} {tokens} of {count} (in the first batch)"
        if rest:
            said += f" of {_times(rest)} channels"
        for joined in layout.joined:
            few, many = min(joined, default=0), max(joined, default=0)
            if self.how not in ("first", "last") and len(joined) == 2 and few < many:
                said += f" ({few} of them joined to {many}, as class tokens are)"
        unused = given.unused_masks()
        if unused and any(layout.sources) and mask is None:
            said += f"; {' and '.join(unused)} is not applied, as its meaning is not known"
        return said

    def _flat_layout(self, value: Tensor) -> Layout:
        positions: list[int] = []
        if self.channels is not None and value.dim() > FLAT:
            channels = self.channels % value.dim()
            positions = [dim for dim in range(1, value.dim()) if dim != channels]
        count = len(positions)
        nothing = (frozenset[tuple[str, int]](),) * count
        return Layout(
            dims=value.dim(),
            samples=0,
            positions=tuple(positions),
            sources=nothing,
            within=nothing,
            joined=((),) * count,
            known=(False,) * count,
        )

    def _mask(self, layout: Layout, masks: Sequence[Mask]) -> Mask | None:
        if self.padding == "keep":
            return None
        sources = frozenset[tuple[str, int]]().union(*layout.sources)
        return next((mask for mask in masks if mask.covers & sources), None)

    def _kept(self, value: Tensor, layout: Layout, given: Arguments, name: str) -> Tensor | None:
        """Return which elements of a value are no padding, in a shape that broadcasts; None if all are."""
        masks = given.masks()
        if self.padding == "keep" or not layout.positions:
            return None
        mask = self._mask(layout, masks)
        if mask is None:
            self._refuse_hidden_padding(value, layout, masks, name)
            return None
        has_token = mask.kept.any(1)
        if not bool(has_token.all()):
            row = int((~has_token).nonzero()[0])
            raise ExtractError(
                f'"{name}": {mask.name} leaves sample {row} of a batch no token, so '
                "there is nothing "
                f"to take the {self.how} of; leave such samples out, or count padding "
                f"with {self.how}(padding=keep)"
            )
        covered = [bool(sources & mask.covers) for sources in layout.sources]
        dim = layout.positions[covered.index(True)]
        shape = [1] * value.dim()
        shape[layout.samples], shape[dim] = mask.kept.shape
        kept = mask.kept if layout.samples < dim else mask.kept.T
        return kept.reshape(shape).to(value.device)

    def _refuse_hidden_padding(
        self, value: Tensor, layout: Layout, masks: Sequence[Mask], name: str
    ) -> None:
        """Raise ExtractError if the batch has padding, and it is not known which positions of the value are made of it."""
        for mask in masks:
            is_hidden = [
                bool(within & mask.covers) or not known
                for within, known in zip(layout.within, layout.known, strict=True)
            ]
            if any(is_hidden) and not bool(mask.kept.all()):
                size = value.shape[layout.positions[is_hidden.index(True)]]
                raise ExtractError(
                    f'"{name}": the batch has padding ({mask.name}, '
                    f"{mask.kept.shape[1]} "
                    f"positions), and the {size} positions of these values are not "
                    "those of the mask, so padding cannot be left out; count it with "
                    f"{self.how}(padding=keep), or use batches of one sample"
                )

    def _pooled(self, value: Tensor, layout: Layout, kept: Tensor | None) -> Tensor:
        positions = layout.positions
        if not positions:
            return value
        if self.how in ("first", "last"):
            return self._one(value, layout, kept)
        if self.how == "max":
            masked = value if kept is None else torch.where(kept, value, _least(value))
            pooled = masked.amax(positions)
        elif kept is None:
            pooled = value.mean(positions)
        else:
            shape = list(kept.shape)
            for dim in positions:
                shape[dim] = value.shape[dim]
            count = kept.expand(shape)
            pooled = torch.where(kept, value, 0).sum(positions) / count.sum(positions)
        gone = sum(dim < layout.samples for dim in positions)
        return pooled.movedim(layout.samples - gone, 0)

    def _one(self, value: Tensor, layout: Layout, kept: Tensor | None) -> Tensor:
        lead = (layout.samples, layout.positions[0])
        values = value.movedim(lead, (0, 1))
        if kept is None:
            return values[:, 0 if self.how == "first" else -1]
        tokens = kept.movedim(lead, (0, 1)).flatten(1).to(torch.uint8)
        places = tokens.argmax(1)
        if self.how == "last":
            places = tokens.shape[1] - 1 - tokens.flip(1).argmax(1)
        return values[torch.arange(len(values), device=values.device), places]


_UNSEEN = (
    "{how}: the dimensions of values are known only from a call of the features with "
    "the model's arguments, in one thread and without compiled code; name that of the "
    "channels, such as {how}(channels=-1) for tokens"
)


def _least(value: Tensor) -> float | int:
    return -torch.inf if value.is_floating_point() else torch.iinfo(value.dtype).min


def _times(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))


_VERBS = {
    "mean": "mean over",
    "tokens": "mean over",
    "max": "maximum over",
    "first": "first of",
    "last": "last of",
}


#: The poolings by name, for the command line.
POOLINGS: tuple[str, ...] = get_args(How)
