"""The dimensions of the tensors in a forward, and of its arguments and their masks.

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

# Note [Masks]
A mask is known by its name, because its numbers do not say whether True is a token or padding:
``attention_mask`` has 1 for tokens, as in transformers; ``key_padding_mask`` has True for padding,
as in `torch.nn`; ``lengths`` has the number of tokens of each sample. What precedes that in the
name says to which arguments it belongs: ``decoder_attention_mask`` to ``decoder_input_ids``,
``src_key_padding_mask`` to ``src``. Other masks are not applied, and that is said.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from kedge.sites import leaves
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


def of_parameter(value: Tensor) -> list[Axis]:
    """Return new dimensions for a tensor that comes from no argument."""
    return [Axis(sources=frozenset({PARAMETER})) for _ in range(value.dim())]


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
            self.put(tensor, of_parameter(tensor))


def _place(value: Tensor) -> _Place | None:
    try:
        address = value.data_ptr()
        shape = tuple(value.shape)
        steps = value.stride()
    except (RuntimeError, NotImplementedError):
        return None  # nested, sparse, without memory, or a library's own
    if not address:
        return None
    # The step along a dimension of size 1 says nothing.
    strides = [step * (size > 1) for size, step in zip(shape, steps, strict=True)]
    return address, shape, tuple(strides)


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


_MASK = re.compile(r"(?:(.+)_)?(attention_mask|key_padding_mask|lengths?)")
_MATRIX = 2

_SAMPLES: ContextVar[int | None] = ContextVar("samples", default=None)


@contextmanager
def batch_of(samples: int) -> Iterator[None]:
    """Context of a call with so many samples."""
    before = _SAMPLES.set(samples)
    try:
        yield
    finally:
        _SAMPLES.reset(before)


@dataclass(frozen=True)
class Mask:
    """A mask of the tokens of some arguments; see Note [Masks].

    Attributes:
        name: The argument.
        kept: Which positions are tokens, ``[samples, positions]``.
        covers: The arguments' dimensions of these positions.
    """

    name: str
    kept: Tensor
    covers: frozenset[Source]


@dataclass(frozen=True)
class Arguments:
    """The tensors among the arguments of a call.

    Attributes:
        tensors: The tensors by name.
        samples: The number of samples in the call.
        counted: Whether that number is known, from the data set or a mask; else it is the size of
            the first dimension.
    """

    tensors: Mapping[str, Tensor]
    samples: int | None
    counted: bool

    @classmethod
    def of(cls, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        """Return the arguments of a call of a model."""
        try:
            bound = inspect.signature(model.forward).bind(*args, **kwargs)
            named = {**bound.arguments}
            for parameter in bound.signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    named |= named.pop(parameter.name, {})
        except (TypeError, ValueError):
            # A forward without a signature, or a call that it will refuse.
            by_place = {str(place): value for place, value in enumerate(args)}
            named = {**by_place, **kwargs}
        tensors: dict[str, Tensor] = {}
        masks: list[Tensor] = []
        for given, each in named.items():
            for name, value in leaves.find(each, given):
                if value.is_nested:
                    continue
                tensors[name] = value
                if value.dim() == _MATRIX and _MASK.fullmatch(_word(name)):
                    masks.append(value)
        samples = _SAMPLES.get()
        counted = samples is not None or bool(masks)
        if samples is None:
            first = [value for value in (*masks, *tensors.values()) if value.dim()]
            samples = len(first[0]) if first else None
        return cls(tensors, samples, counted)

    @property
    def structure(self) -> tuple[tuple[str, int], ...]:
        """The names of the tensors with their numbers of dimensions."""
        dims = [(name, value.dim()) for name, value in self.tensors.items()]
        return tuple(sorted(dims))

    def sample_dim(self, value: Tensor) -> int | None:
        """Return the dimension of the samples in an argument; None if it has none."""
        for dim in range(min(2, value.dim())):
            if value.shape[dim] == self.samples:
                return dim
        return None

    def masks(self) -> list[Mask]:
        """Return the masks among the arguments."""
        matches = {name: _MASK.fullmatch(_word(name)) for name in self.tensors}
        prefixes = tuple(match[1] for match in matches.values() if match and match[1])
        found = []
        for name, match in matches.items():
            if match is None:
                continue
            prefix = match[1] or ("decoder", *prefixes)
            has_prefix = [name for name in self.tensors if _word(name).startswith(prefix)]
            mine = has_prefix
            if not match[1]:
                mine = [name for name in self.tensors if name not in has_prefix]
            mask = self._mask(name, match[2], mine)
            if mask is not None:
                found.append(mask)
        return found

    def unused_masks(self) -> list[str]:
        """Return the names of masks of positions whose meaning is not known."""
        known = {mask.name for mask in self.masks()}
        others = [value for name, value in self.tensors.items() if "mask" not in name]
        shapes = {tuple(value.shape[:2]) for value in others}
        unused = []
        for name, value in self.tensors.items():
            is_mask = "mask" in _word(name) and value.dim() == _MATRIX
            if is_mask and name not in known and tuple(value.shape) in shapes:
                unused.append(name)
        return unused

    def _mask(self, name: str, kind: str, covered: Sequence[str]) -> Mask | None:
        """Return a mask that may cover positions of some arguments; None if it is of another form."""
        value = self.tensors[name]
        if not value.dim() or len(value) != self.samples:
            return None
        if not kind.startswith("length"):
            if value.dim() != _MATRIX:
                return None
            if value.is_floating_point() and bool((value < 0).any()):
                kept = value == 0  # added to attention: 0 for tokens
            elif kind == "key_padding_mask":
                kept = value == 0
            else:
                kept = value != 0
            return Mask(name, kept, self._covered(covered, value.shape[1]))

        if value.dim() != 1 or value.is_floating_point() or not len(value):
            return None
        # They are lengths of the argument that the longest sample fills.
        longest = int(value.max())
        for other in sorted(covered):
            dim = self.sample_dim(self.tensors[other])
            if dim is None or self.tensors[other].dim() < _MATRIX:
                continue
            size = self.tensors[other].shape[1 - dim]
            if size >= longest:
                kept = torch.arange(size, device=value.device) < value[:, None]
                return Mask(name, kept, self._covered(covered, size))
        return None

    def _covered(self, names: Sequence[str], positions: int) -> frozenset[Source]:
        shapes = ((self.samples, positions), (positions, self.samples))
        covered = set()
        for name in names:
            shape = tuple(self.tensors[name].shape[:2])
            if shape in shapes:
                covered.add((name, 1 - shapes.index(shape)))
        return frozenset(covered)


def _word(name: str) -> str:
    return name.rpartition(".")[2]
