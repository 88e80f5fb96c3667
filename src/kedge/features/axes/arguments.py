"""The arguments of a call by name, and the masks among them that tell tokens from padding.

# Note [Masks]
A mask is known by its name, because its numbers do not say whether True is a token or padding:
``attention_mask`` has 1 for tokens, as in transformers; ``key_padding_mask`` has True for padding,
as in `torch.nn`; ``lengths`` has the number of tokens of each sample. What precedes that in the
name says to which arguments it belongs: ``decoder_attention_mask`` to ``decoder_input_ids``,
``src_key_padding_mask`` to ``src``. Other masks are not applied, and that is said.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.features.axes.axis import Source
from kedge.sites import leaves

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
        except (
            TypeError,
            ValueError,
        ):  # a forward without a signature, or a call that it will refuse
            named = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
        found = {
            name: value for given, each in named.items() for name, value in leaves.find(each, given)
        }
        plain = {name: value for name, value in found.items() if not value.is_nested}
        samples = _SAMPLES.get()
        masks = [
            value
            for name, value in plain.items()
            if value.dim() == _MATRIX and _MASK.fullmatch(_word(name))
        ]
        counted = samples is not None or bool(masks)
        if samples is None:
            first = next((value for value in (*masks, *plain.values()) if value.dim()), None)
            samples = None if first is None else len(first)
        return cls(plain, samples, counted)

    @property
    def structure(self) -> tuple[tuple[str, int], ...]:
        """The names of the tensors with their numbers of dimensions."""
        return tuple(sorted((name, value.dim()) for name, value in self.tensors.items()))

    def sample_dim(self, value: Tensor) -> int | None:
        """Return the dimension of the samples in an argument; None if it has none."""
        return next(
            (dim for dim in range(min(2, value.dim())) if value.shape[dim] == self.samples), None
        )

    def masks(self) -> list[Mask]:
        """Return the masks among the arguments."""
        found = {name: match for name in self.tensors if (match := _MASK.fullmatch(_word(name)))}
        prefixes = tuple(match[1] for match in found.values() if match[1])
        return [
            mask
            for name, match in found.items()
            if (mask := self._mask(name, match, prefixes)) is not None
        ]

    def unused_masks(self) -> list[str]:
        """Return the names of masks of positions whose meaning is not known."""
        known = {mask.name for mask in self.masks()}
        shapes = {
            tuple(value.shape[:2]) for name, value in self.tensors.items() if "mask" not in name
        }
        return [
            name
            for name, value in self.tensors.items()
            if "mask" in _word(name)
            and name not in known
            and value.dim() == _MATRIX
            and tuple(value.shape) in shapes
        ]

    def _mask(self, name: str, match: re.Match[str], prefixes: tuple[str, ...]) -> Mask | None:
        value, prefix = self.tensors[name], match[1]
        if prefix is None:
            foreign = ("decoder", *prefixes)
            mine = {other for other in self.tensors if not _word(other).startswith(foreign)}
        else:
            mine = {other for other in self.tensors if _word(other).startswith(prefix)}
        if match[2].startswith("length"):
            return self._of_lengths(name, value, mine)
        if value.dim() != _MATRIX or len(value) != self.samples:
            return None
        return Mask(
            name,
            _tokens(value, is_padding=match[2] == "key_padding_mask"),
            self._covered(mine, value.shape[1]),
        )

    def _of_lengths(self, name: str, value: Tensor, mine: set[str]) -> Mask | None:
        """Return the mask of lengths, of the argument of which they are lengths: the longest sample fills it."""
        if (
            value.dim() != 1
            or len(value) != self.samples
            or value.is_floating_point()
            or not len(value)
        ):
            return None
        longest = int(value.max())
        sizes = {name: self._other_size(self.tensors[name]) for name in sorted(mine)}
        size = next((size for size in sizes.values() if size is not None and size >= longest), None)
        if size is None:
            return None
        return Mask(
            name,
            torch.arange(size, device=value.device) < value[:, None],
            self._covered(mine, size),
        )

    def _other_size(self, value: Tensor) -> int | None:
        """Return the size of the sequence in an argument, beside that of the samples."""
        dim = self.sample_dim(value)
        return None if dim is None or value.dim() < _MATRIX else value.shape[1 - dim]

    def _covered(self, names: set[str], positions: int) -> frozenset[Source]:
        shapes = ((self.samples, positions), (positions, self.samples))
        places = ((name, tuple(self.tensors[name].shape[:2])) for name in names)
        return frozenset(
            (name, 1 - shapes.index(shape)) for name, shape in places if shape in shapes
        )


def _tokens(mask: Tensor, *, is_padding: bool) -> Tensor:
    if mask.is_floating_point() and bool((mask < 0).any()):  # added to attention: 0 for tokens
        return mask == 0
    return (mask == 0) if is_padding else (mask != 0)


def _word(name: str) -> str:
    return name.rpartition(".")[2]
