"""Samples of a data set that are read twice: the same inputs have to have the same labels."""

from __future__ import annotations

from typing import Any

from torch.utils.data import IterableDataset

from kedge.examination.differences import same_values
from kedge.torch_internals.random_numbers import RandomNumbers

MOST = 8
"""Samples that are read twice; labels that are drawn by chance agree in half of two classes."""


def labels_differ(data: Any) -> list[int]:
    """Return the numbers of samples whose inputs are the same when read again, and whose labels are not.

    Args:
        data: A data set whose samples are tuples that end in a label.
    """
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        return []
    numbers = RandomNumbers()
    found = []
    try:
        for i in range(min(MOST, len(data))):
            first, second = data[i], data[i]
            if not isinstance(first, tuple | list) or len(first) < 2 or len(first) != len(second):
                return []
            *inputs, label = first
            *inputs_again, label_again = second
            if same_values(inputs, inputs_again) and not same_values(label, label_again):
                found.append(i)
    finally:
        numbers.restore()
    return found
