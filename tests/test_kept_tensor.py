"""What `record` and `extract` keep tensors by: no copy, and no wrong value."""

from __future__ import annotations

import pytest
import torch

from kedge.kept_tensor import KeptTensor


def test_a_kept_tensor_is_the_programs_own() -> None:
    """Nothing is copied, and a graph stays."""
    x = torch.ones(3, requires_grad=True) * 2
    kept = KeptTensor(x, copied=False)

    assert kept.value is x
    assert not kept.overwritten


@pytest.mark.parametrize(
    "change", [lambda x: x.add_(1), lambda x: x[1:].zero_(), lambda x: x.detach().mul_(2)]
)
def test_a_change_in_place_is_seen(change) -> None:
    """Through the tensor, a view or its detached twin; and preserving it comes too late."""
    x = torch.ones(3)
    kept = KeptTensor(x, copied=False)
    change(x)
    kept.preserve()

    assert kept.overwritten
    assert kept.value is x


def test_a_tensor_that_is_preserved_stays_what_it_was() -> None:
    """What the program does to its memory afterwards is no matter."""
    x = torch.ones(3)
    kept = KeptTensor(x, copied=False)
    kept.preserve()
    x.zero_()

    assert not kept.overwritten
    assert kept.value.tolist() == [1, 1, 1]


def test_where_changes_are_not_counted_a_copy_is_kept() -> None:
    """Tensors of inference mode have no count of changes."""
    with torch.inference_mode():
        x = torch.ones(3)
        kept = KeptTensor(x, copied=False)
        x.zero_()

    assert not kept.overwritten
    assert kept.value.tolist() == [1, 1, 1]
