"""The dimensions of the tensors in a forward.

# Note [What a dimension is]
A shape does not say which dimension holds the channels: ``[8, 17, 32]`` may be 17 tokens of 32
channels, or 17 channels of 32 positions. The operations do. A convolution puts its channels into
dimension 1, a matrix product into the last one, an embedding behind the positions of its indices;
the dimensions of a call's arguments are known by their names; all other operations move, split and
join dimensions. So `Axes` follows each dimension from operation to operation. What is not known
stays unknown, and nothing is inferred from sizes.

A dimension of positions also keeps the arguments' dimensions that it corresponds to, element by
element, so that ``attention_mask`` is applied to the tokens of ``input_ids`` alone: not to those of
a decoder that happen to be as many, and not to frames that a convolution has made of them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from torch import Tensor, nn

from kedge.torch_internals.module_tables import buffers_in, parameters_in

Kind = Literal["samples", "channels", "positions", "mixed"]
Source: TypeAlias = tuple[str, int]
"""A dimension of an argument, by the argument's name."""

PARAMETER: Source = ("", 0)
"""The source of the dimensions of a parameter or of a tensor that the forward made without an argument."""


@dataclass(eq=False, slots=True)
class Axis:
    """One dimension; several tensors share it. An operation that takes such a tensor may find out what it is.

    Attributes:
        kind: What it is; "mixed" if it is several things at once, None if that is unknown.
        sources: The arguments' dimensions that it corresponds to element by element.
        within: The arguments' dimensions from which its elements were made in another number or
            order.
        factors: For a dimension that was joined by a reshape, the dimensions in it with their
            sizes.
        joined: For a dimension along which tensors were concatenated, the size of each.
    """

    kind: Kind | None = None
    sources: frozenset[Source] = frozenset()
    within: frozenset[Source] = frozenset()
    factors: tuple[tuple[Axis, int], ...] = ()
    joined: tuple[int, ...] = ()

    @property
    def origin(self) -> frozenset[Source]:
        """Every dimension of an argument from which the elements were made."""
        return self.sources | self.within

    def must_be(self, kind: Kind) -> None:
        """Note what an operation takes this dimension for, unless that is known."""
        if self.kind is None:
            self.kind = kind

    def remade(self, kind: Kind | None = None) -> Axis:
        """Return a dimension that was made of this one, in another number or order of elements."""
        return Axis(kind or self.kind, within=self.origin)


def channels() -> Axis:
    """Return a new dimension of channels."""
    return Axis("channels")


def together(axes: Sequence[Axis]) -> Axis:
    """Return the dimension of a result whose operands have these dimensions in its place."""
    known = [axis for axis in axes if axis.kind is not None]
    if not known:
        return axes[0]
    first = known[0]
    if all(axis is first for axis in known):
        return first
    kinds = {axis.kind for axis in known}
    if len(kinds) > 1:
        return Axis("mixed", within=frozenset().union(*(axis.origin for axis in known)))
    if first.kind == "mixed":
        return first
    sources = frozenset[Source]().union(*(axis.sources for axis in known))
    within = frozenset[Source]().union(*(axis.within for axis in known))
    joined = next((axis.joined for axis in known if axis.joined), ())
    return Axis(first.kind, sources, within, first.factors, joined)


def reshaped(axes: Sequence[Axis], sizes: Sequence[int], shape: Sequence[int]) -> list[Axis]:
    """Return the dimensions after a reshape: the elements keep their order, so each new one is made of whole factors."""
    parts: list[tuple[Axis, int]] = []
    for axis, size in zip(axes, sizes, strict=True):
        parts += axis.factors or ((axis, size),)
    unknown = [Axis() for _ in shape]
    found: list[Axis] = []
    for size in shape:
        mine: list[tuple[Axis, int]] = []
        held = 1
        if size == 1 and parts and parts[0][1] == 1:
            mine.append(parts.pop(0))
        while held < size:
            axis, part = parts.pop(0)
            missing = size // held
            if part > missing:
                if part % missing:  # the border between two new dimensions lies inside an old one
                    return unknown
                parts.insert(0, (axis.remade(), part // missing))
                axis, part = axis.remade(), missing
            if part > 1 or axis.kind is not None:
                mine.append((axis, part))
            held *= part
        if held != size:
            return unknown
        found.append(_merged(mine))
    return found


def _merged(parts: Sequence[tuple[Axis, int]]) -> Axis:
    if not parts:
        return Axis()
    first = parts[0][0]
    if len(parts) == 1:
        return first
    is_one_kind = all(axis.kind == first.kind for axis, _ in parts)
    kind: Kind | None = first.kind if is_one_kind else "mixed"
    within = frozenset[Source]().union(*(axis.origin for axis, _ in parts))
    return Axis(kind, within=within, factors=tuple(parts))


_Place: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]


@dataclass
class Axes:
    """The dimensions of the tensors of one forward, by the memory in which a tensor lies.

    Every operation that returns a tensor calls `put` for it, so an entry is that of the newest
    tensor in its place.
    """

    known: dict[_Place, list[Axis]] = field(default_factory=dict)

    def of(self, value: Tensor) -> list[Axis]:
        """Return the dimensions of a tensor; unknown ones if nothing is known."""
        place = _place(value)
        if place is None:
            return [Axis() for _ in range(value.dim())]
        found = self.known.get(place)
        if found is None:
            found = self.known[place] = [Axis() for _ in place[1]]
        return found

    def put(self, value: Tensor, axes: Sequence[Axis]) -> None:
        """Note the dimensions of a tensor."""
        place = _place(value)
        if place is None or len(place[1]) != len(axes):
            return
        # An alias keeps the list, which a module may yet correct.
        before = self.known.get(place)
        if before is None or any(map(operator.is_not, before, axes)):
            self.known[place] = list(axes)

    def forget(self, value: Tensor) -> None:
        """Note that nothing is known about a tensor."""
        place = _place(value)
        if place is not None:
            self.known.pop(place, None)

    def put_parameters(self, model: nn.Module) -> None:
        """Note that a model's parameters and buffers come from no argument."""
        for tensor in (*parameters_in(model).values(), *buffers_in(model).values()):
            self.put(tensor, [Axis(sources=frozenset({PARAMETER})) for _ in range(tensor.dim())])


def _place(value: Tensor) -> _Place | None:
    try:
        address, shape, steps = value.data_ptr(), tuple(value.shape), value.stride()
    except (RuntimeError, NotImplementedError):
        return None  # nested, sparse, without memory, or a library's own
    if not address:
        return None
    return address, shape, tuple(step * (size > 1) for size, step in zip(shape, steps, strict=True))


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
        dims = range(len(axes))
        samples = [dim for dim in dims if axes[dim].kind == "samples"]
        if channel is not None:
            lead = samples[0] if len(samples) == 1 else 0
            aside = (lead, channel % len(axes))
            return cls._made(axes, lead, [dim for dim in dims if dim not in aside])
        if len(samples) != 1:
            return None
        rest = [dim for dim in dims if dim not in samples]
        holds_channels = [dim for dim in rest if axes[dim].kind == "channels"]
        positions = [dim for dim in rest if axes[dim].kind == "positions"]
        if len(holds_channels) == 1:
            # What mixes tokens takes them for channels, and adds its result to theirs.
            mixed = [dim for dim in rest if axes[dim].kind == "mixed"]
            positions += [dim for dim in mixed if not axes[dim].factors]
        others = [dim for dim in rest if dim not in holds_channels and dim not in positions]
        if others:
            # If the channels are known, an argument's other dimensions are what the model goes
            # along.
            if len(holds_channels) != 1:
                return None
            for dim in others:
                if axes[dim].kind is not None or not axes[dim].sources - {PARAMETER}:
                    return None
        elif not positions and len(rest) > 1:
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
