"""Features as a table with one row per sample, ready for a linear probe."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.errors import TableError
from kedge.features.dataset.compute import BatchComputer, TakesFeatures, bad_sample
from kedge.features.dataset.folder.reading import FeatureColumn, FeatureSet, open_features
from kedge.features.dataset.keys_and_fields import LABELS
from kedge.features.dataset.loading import BatchSource, sample_by_sample
from kedge.features.reduce.reducer import ChannelLayout, Positions, numbers

Array = NDArray[Any]

_ROWS = 4096  # read from a folder at once


class FeatureTable(NamedTuple):
    """A table of features with one row for each sample.

    Attributes:
        X: The features, ``[samples, columns]``.
        y: The labels, one for each row; None if there are none.
        keys: The key of each row's sample.
        columns: The name of each column: the site with the channel, such as "layer4[17]", or with
            each index of an element.
    """

    X: Array
    y: Array | None
    keys: list[str]
    columns: list[str]


def second_entry(batch: Any) -> Any:
    """Return the second entry of a batch ``(x, y)``, its labels; None for any other batch."""
    return batch[1] if isinstance(batch, (tuple, list)) and len(batch) > 1 else None


def feature_table(
    features: TakesFeatures,
    loader: Any,
    *,
    labels: Callable[[Any], Any] = second_entry,
    batch: Callable[[Any], Any] | None = None,
    positions: Positions | None = None,
    channel: int = 1,
    dtype: torch.dtype = torch.float32,
) -> FeatureTable:
    """Compute the features of every sample of a loader into one table in memory, ready for scikit-learn.

    Args:
        features: A function that takes a model's arguments and returns features by name, such as
            the result of `kedge.extract`.
        loader: A `DataLoader`, in its own order, or any iterable of batches.
        labels: A function from a batch of the loader to its labels, one for each sample, or to
            None.
        batch: A function from a batch to the model's arguments; by default the first entry of ``(x,
            y)`` is the argument, and a dict holds keyword arguments.
        positions: What to do with features of several positions: "mean", "max", or "elements", a
            column for each.
        channel: The dimension of the channels: 1 for images, -1 for tokens.
        dtype: The type of the table, a floating-point one.

    Returns:
        The table.

    Raises:
        TableError: If features or labels do not have one row for each sample.
        BadSample: If a sample cannot be loaded, or the model cannot take it.

    Examples:
        >>> features = kedge.extract(model, "relu")
        >>> recipes.feature_table(features, [(images, labels)], positions="mean").X.shape
        (8, 4)
    """
    columns = _Columns(positions, channel, dtype)
    marks: list[Array] = []
    keys: list[str] = []
    work = BatchComputer(features, batch=batch)
    for loaded in BatchSource(sample_by_sample(loader)):
        found = work(loaded)
        if found.bad:
            raise bad_sample(found.bad)
        found.wait()
        columns.add(found.values)
        keys += found.keys
        given = labels(loaded.data)
        if given is not None:
            marks.append(_marks(given, len(found.keys)))
    y = np.concatenate(marks) if marks else None
    return columns.table(y, keys)


def stored_table(
    stored: FeatureSet | str | os.PathLike[str],
    *,
    labels: Mapping[str, Any] | Callable[[str], Any] | None = None,
    positions: Positions | None = None,
    channel: int = 1,
    dtype: torch.dtype = torch.float32,
) -> FeatureTable:
    """Read stored features from a folder into one table in memory; samples are in the data set's order.

    Args:
        stored: The folder, or the result of `open_features`.
        labels: The label of each key, as a dict or a function; None for the labels in the folder,
            if it has any.
        positions: As for `feature_table`.
        channel: As for `feature_table`.
        dtype: As for `feature_table`.

    Returns:
        The table.

    Raises:
        TableError: If features or labels do not have one row for each sample.
        NotFeatures: If the folder holds no features.
    """
    if not isinstance(stored, FeatureSet):
        stored = open_features(stored)
    columns = _Columns(positions, channel, dtype)
    for site, column in stored.items():
        for values in _parts(column):
            columns.add({site: values})
    keys = list(stored.samples)
    y = None
    if labels is not None:
        y = _labels(labels, keys)
    elif LABELS in stored.fields:
        y = stored.labels.numpy()
    return columns.table(y, keys)


def _parts(column: FeatureColumn) -> Iterator[Tensor]:
    """Yield blocks of a column's rows; single rows if their shapes differ."""
    if len(column.shapes) > 1:
        for value in column:
            yield value[None]
    else:
        for start in range(0, len(column), _ROWS):
            yield column[start : start + _ROWS]


def _labels(labels: Mapping[str, Any] | Callable[[str], Any], keys: Sequence[str]) -> Array:
    if callable(labels):
        return np.asarray([labels(key) for key in keys])
    missing = [key for key in keys if key not in labels]
    if missing:
        raise TableError(
            f"{len(missing)} of {len(keys)} samples have no label, the first is "
            f"{missing[0]!r}; give each key a label"
        )
    return np.asarray([labels[key] for key in keys])


class _Columns:
    """The columns of a table: for each site blocks of rows, and the names of its columns."""

    def __init__(self, positions: Positions | None, channel: int, dtype: torch.dtype) -> None:
        if positions == "samples":
            raise TableError(
                "positions='samples': a table has one row for each sample; use 'mean', "
                "'max' or 'elements'"
            )
        self.layout = ChannelLayout(positions, channel)
        self.dtype = dtype
        self.blocks: dict[str, list[Array]] = {}
        self.names: dict[str, list[str]] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the features of a batch."""
        for site, value in values.items():
            rows = self.layout.rows(numbers(value)).to(self.dtype)
            names = _names(site, value.shape[1:], rows.shape[1:].numel())
            known = self.names.setdefault(site, names)
            if known != names:
                raise TableError(
                    f"{site!r} has {len(known)} columns for some samples and "
                    f"{len(names)} for others; pool values of different sizes with "
                    "positions='mean' or 'max'"
                )
            self.blocks.setdefault(site, []).append(rows.cpu().numpy())

    def table(self, y: Array | None, keys: list[str]) -> FeatureTable:
        """Return the table with the sites side by side."""
        if not self.blocks:
            raise TableError("a table needs at least one sample and got none")
        sides = [np.concatenate(self.blocks.pop(site)) for site in list(self.blocks)]
        counts = [len(side) for side in sides]
        if len(set(counts)) > 1:
            sites = zip(self.names, counts, strict=True)
            rows = ", ".join(f"{site!r} {count}" for site, count in sites)
            raise TableError(
                f"the sites have rows for different numbers of samples: {rows}; leave "
                "out the samples that not every site has"
            )
        x = sides[0] if len(sides) == 1 else np.concatenate(sides, axis=1)
        if len(x) != len(keys) or (y is not None and len(y) != len(keys)):
            count = "none" if y is None else len(y)
            raise TableError(
                f"{len(keys)} samples have {len(x)} rows of features and {count} "
                "labels; each needs one"
            )
        columns: list[str] = []
        for names in self.names.values():
            columns += names
        return FeatureTable(x, y, keys, columns)


def _names(site: str, shape: Sequence[int], width: int) -> list[str]:
    if not shape:
        return [site]
    several = [size for size in shape if size > 1] or [1]
    if math.prod(shape) != width:  # pooled
        several = [width]
    return [f"{site}[{','.join(map(str, index))}]" for index in np.ndindex(*several)]


def _marks(given: Any, size: int) -> Array:
    """Return the labels of a batch as an array."""
    marks = given.detach().cpu().numpy() if isinstance(given, Tensor) else np.asarray(given)
    if not marks.ndim or len(marks) != size:
        raise TableError(
            f"{size} samples came with labels of shape {list(marks.shape)}; each needs "
            "one. Name their place in a batch with labels=, or give labels=lambda "
            "batch: None"
        )
    return marks
