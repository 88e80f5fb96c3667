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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kedge.features.dimensions import Source
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
        except (TypeError, ValueError):
            # A forward without a signature, or a call that it will refuse.
            named = {**{str(place): value for place, value in enumerate(args)}, **kwargs}
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
        return tuple(sorted((name, value.dim()) for name, value in self.tensors.items()))

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
            if match[1]:
                mine = [other for other in self.tensors if _word(other).startswith(match[1])]
            else:
                foreign = ("decoder", *prefixes)
                mine = [other for other in self.tensors if not _word(other).startswith(foreign)]
            mask = self._mask(name, match[2], mine)
            if mask is not None:
                found.append(mask)
        return found

    def unused_masks(self) -> list[str]:
        """Return the names of masks of positions whose meaning is not known."""
        known = {mask.name for mask in self.masks()}
        shapes = {
            tuple(value.shape[:2]) for name, value in self.tensors.items() if "mask" not in name
        }
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
