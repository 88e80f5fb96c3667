"""Which dimensions of a value hold its samples, positions and channels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kedge.features.axes.axis import PARAMETER, Axis, Source

#: Values of so many dimensions have no positions: [samples, channels].
FLAT = 2


@dataclass(frozen=True)
class Layout:
    """The dimensions of the values at a site.

    Attributes:
        dims: The number of dimensions.
        samples: The dimension of the samples.
        positions: Those of the positions, without the channels'.
        sources: The arguments' dimensions to which each dimension of positions corresponds.
        within: Those of which the elements of each were made in another way.
        joined: The sizes that were concatenated along each.
        known: Whether the origin of each is known.
    """

    dims: int
    samples: int
    positions: tuple[int, ...]
    sources: tuple[frozenset[Source], ...]
    within: tuple[frozenset[Source], ...]
    joined: tuple[tuple[int, ...], ...]
    known: tuple[bool, ...]

    @classmethod
    def of(cls, axes: Sequence[Axis], channel: int | None = None) -> Layout | None:
        """Return the layout of a value; None if its dimensions do not show it.

        Args:
            axes: The value's dimensions.
            channel: The dimension of the channels, if the user has named it.
        """
        samples = [dim for dim, axis in enumerate(axes) if axis.kind == "samples"]
        if channel is not None:
            lead = samples[0] if len(samples) == 1 else 0
            return cls._made(
                axes,
                lead,
                [dim for dim in range(len(axes)) if dim not in (lead, channel % len(axes))],
            )
        if len(samples) != 1:
            return None
        rest = [dim for dim in range(len(axes)) if dim not in samples]
        holds_channels = [dim for dim in rest if axes[dim].kind == "channels"]
        positions = [dim for dim in rest if axes[dim].kind == "positions"]
        if (
            len(holds_channels) == 1
        ):  # what mixes tokens takes them for channels, and adds its result to theirs
            positions += [
                dim for dim in rest if axes[dim].kind == "mixed" and not axes[dim].factors
            ]
        others = [dim for dim in rest if dim not in holds_channels and dim not in positions]
        # The channels are known, so an argument's other dimensions are what the model goes along.
        if others and not (
            len(holds_channels) == 1 and all(_is_of_argument(axes[dim]) for dim in others)
        ):
            return None
        if not positions and not others and len(rest) > 1:
            return None
        return cls._made(axes, samples[0], sorted(positions + others))

    @classmethod
    def _made(cls, axes: Sequence[Axis], samples: int, positions: Sequence[int]) -> Layout:
        found = [axes[dim] for dim in positions]
        return cls(
            len(axes),
            samples,
            tuple(positions),
            tuple(axis.sources - {PARAMETER} for axis in found),
            tuple(axis.within - {PARAMETER} for axis in found),
            tuple(axis.joined for axis in found),
            tuple(bool(axis.origin) for axis in found),
        )


def _is_of_argument(axis: Axis) -> bool:
    return axis.kind is None and bool(axis.sources - {PARAMETER})
