"""What is stored of one site or one field, for all samples, and read from shards on demand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.features.dataset.folder.formats import type_name
from kedge.features.dataset.folder.samples import RowIndex, one_shape
from kedge.features.dataset.folder.stored_shard import Numbers

_AT_ONCE = 1024  # samples that are read together when a column is iterated

Several = slice | Sequence[int] | Sequence[bool] | Tensor | NDArray[Any]
"""Several samples of a column: a slice, their numbers, or a mask with an entry for each sample."""


class FeatureColumn:
    """The values of one site or field: a sequence of tensors on the disk, one for each sample.

    `column[3]` reads one sample; `column[10:20]`, `column[[1, 5]]` and `column[mask]` read several,
    `column.tensor()` all. A column is a data set for PyTorch's loaders, also with workers.

    Attributes:
        name: The site or field.
        dtype: The type of the numbers.
    """

    def __init__(self, name: str, dtype: torch.dtype, where: RowIndex) -> None:
        self.name, self.dtype, self._where = name, dtype, where

    def __len__(self) -> int:
        return len(self._where)

    @property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes of samples; a single one unless samples differ in size."""
        return self._where.shapes(self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole column as one tensor, ``(samples, ...)``.

        Raises:
            ReadError: The samples have different shapes.
        """
        return (len(self), *one_shape(self.name, self.shapes))

    def __getitem__(self, which: int | Several) -> Tensor:
        """Return the values of one sample, or of several as one tensor."""
        if type(which) is int and 0 <= which < len(self._where.shard):
            return self._where.one(self.name, self.dtype, which)
        found = _chosen(which, len(self), self.name)
        if isinstance(found, int):
            return self._where.one(self.name, self.dtype, found)
        return self._several(found)

    def __getitems__(self, samples: Sequence[int]) -> list[Tensor]:
        """Return the values of several samples, as PyTorch's loaders ask for those of a batch."""
        if len(self.shapes) > 1:
            return [self[number] for number in samples]
        return list(self[samples].unbind(0))

    def __iter__(self) -> Iterator[Tensor]:
        if len(self.shapes) > 1:
            yield from (self[number] for number in range(len(self)))
            return
        for start in range(0, len(self), _AT_ONCE):
            yield from self[start : start + _AT_ONCE]

    def tensor(self) -> Tensor:
        """Return the whole column."""
        return self._several(np.arange(len(self)))

    def numpy(self) -> NDArray[Any]:
        """Return the whole column as an array; bfloat16, which NumPy lacks, becomes float32."""
        values = self.tensor()
        if values.dtype == torch.bfloat16:
            values = values.float()
        array: NDArray[Any] = values.numpy()
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype, copy=bool(copy))

    def _several(self, samples: Numbers) -> Tensor:
        if not len(samples):
            return torch.empty(0, *self.shape[1:], dtype=self.dtype)
        return self._where.several(self.name, self.dtype, samples)

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {len(self):,} samples, {type_name(self.dtype)})"


class StoredTexts(Sequence[str]):
    """A field of texts, such as paths: a sequence with one for each sample.

    `column[3]` is the text of one sample; `column[10:20]`, `column[[1, 5]]` and `column[mask]` are
    lists of several.

    Attributes:
        name: The field.
    """

    def __init__(self, name: str, where: RowIndex) -> None:
        self.name, self._where = name, where

    def __len__(self) -> int:
        return len(self._where)

    @overload
    def __getitem__(self, which: int) -> str: ...

    @overload
    def __getitem__(self, which: Several) -> list[str]: ...

    def __getitem__(self, which: int | Several) -> str | list[str]:
        found = _chosen(which, len(self), self.name)
        if isinstance(found, int):
            return self._where.texts(self.name, np.array([found]))[0]
        return self._where.texts(self.name, found)

    def __getitems__(self, samples: Sequence[int]) -> list[str]:
        """Return the texts of several samples, as PyTorch's loaders ask for those of a batch."""
        return self[samples]

    def __iter__(self) -> Iterator[str]:
        return iter(self[:])

    def numpy(self) -> NDArray[Any]:
        """Return all texts as an array of objects."""
        return np.array(self[:], dtype=object)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def __repr__(self) -> str:
        return f"Column({self.name!r}, {len(self):,} samples, text)"


Column = FeatureColumn | StoredTexts


def _chosen(which: Any, length: int, name: str) -> int | Numbers:
    """Return the number of one sample, or the numbers of several.

    Raises:
        IndexError: There is no such sample, or samples cannot be chosen in this way.
    """
    if isinstance(which, (bool, np.bool_)):
        raise _cannot(
            name,
            f"{which} is none of these; compare values, not a column: column[labels.numpy() == 3]",
        )
    if isinstance(which, (int, np.integer)):
        if not -length <= which < length:
            raise _no_sample(name, length, which)
        return int(which) % length
    if isinstance(which, slice):
        return np.arange(*which.indices(length))
    if isinstance(which, (tuple, str)) or which is None or which is Ellipsis:
        raise _cannot(
            name,
            f"{which!r} is none of these; index the tensor of a sample instead, as in column[3][0]",
        )
    array = which.cpu().numpy() if isinstance(which, Tensor) else np.asarray(which)
    is_whole = array.dtype.kind in "iu"
    if not array.ndim and is_whole:
        return _chosen(int(array), length, name)
    if array.dtype.kind == "b" and array.shape == (length,):
        return np.flatnonzero(array)
    if array.ndim != 1 or (array.size and not is_whole):
        shape = list(array.shape)
        raise _cannot(name, f"this is of {array.dtype} and the shape {shape}, for {length} samples")
    numbers = array.astype(np.int64)
    beyond = (numbers < -length) | (numbers >= length)
    if beyond.any():
        raise _no_sample(name, length, numbers[beyond][0])
    return np.where(numbers < 0, numbers + length, numbers)


def _no_sample(name: str, length: int, number: Any) -> IndexError:
    return IndexError(f"{name!r} has the values of {length} samples; there is no {number}")


def _cannot(name: str, found: str) -> IndexError:
    return IndexError(
        f"samples of {name!r} are chosen by a number, a slice, a list of numbers, or a "
        f"mask: {found}"
    )
