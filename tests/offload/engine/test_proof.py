"""A recipe's first result is compared with the original in every respect."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kedge.offload.engine.proof import mismatch

TABLE = torch.arange(6.0).view(2, 3)
ROWS, COLUMNS = TABLE.clone(), TABLE.t().contiguous().t()
LONGER = torch.arange(7.0)


def making(made):
    """A recipe without inputs."""
    return SimpleNamespace(inputs=(), run=lambda: made)


@pytest.mark.parametrize(
    ("made", "value", "why"),
    [
        (ROWS, COLUMNS, "it made strides (3, 1) instead of (1, 2)"),
        (COLUMNS, ROWS, "it made strides (1, 2) instead of (3, 1)"),
        (LONGER[1:], LONGER[1:].clone(), "it made strides (1,) instead of (1,)"),
        (LONGER[1:].clone(), LONGER[1:], "it made strides (1,) instead of (1,)"),
        (ROWS.double(), ROWS, "it made torch.float64 [2, 3] instead of torch.float32 [2, 3]"),
        (ROWS[:1], ROWS, "it made torch.float32 [1, 3] instead of torch.float32 [2, 3]"),
        (ROWS + 1, ROWS, "it made other values"),
        (torch.tensor([-0.0]), torch.tensor([0.0]), "it made other values"),
    ],
    ids=["rows", "columns", "later", "earlier", "dtype", "shape", "values", "sign of zero"],
)
def test_what_is_not_the_original_is_told_apart(made, value, why):
    """By strides in either direction, the place in the storage, dtype, shape and bits."""
    found = mismatch(making(made), value)

    assert found is not None
    assert (found.why, found.false) == (why, True)


def test_the_same_bits_are_the_original():
    """A NaN is equal to itself."""
    value = torch.tensor([float("nan"), -0.0, 1.0])

    assert mismatch(making(value.clone()), value) is None
