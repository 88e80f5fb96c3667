"""The names of operations, from the names of their autograd nodes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kedge.sites.operation_names import plain_name

X = torch.rand(2, 3, 8, 8, requires_grad=True)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (torch.log1p(X), "log1p"),
        (torch.log2(X), "log2"),
        (functional.max_pool2d(X, 2), "max_pool2d_with_indices"),
        (functional.smooth_l1_loss(X, torch.zeros_like(X)), "smooth_l1_loss"),
        (functional.nll_loss(X, torch.zeros(2, 8, 8, dtype=torch.long)), "nll_loss2d"),
        (functional.fold(torch.ones(1, 4, 64).requires_grad_(), 9, 2), "col2im"),
        (torch.fft.fft(X), "fft_r2c"),
    ],
)
def test_an_operation_has_the_name_that_its_callers_know(made: torch.Tensor, name: str) -> None:
    """Digits in it belong to the words that they stand in."""
    assert made.grad_fn is not None
    assert plain_name(made.grad_fn.name()) == name


def test_a_custom_function_has_the_name_of_its_class() -> None:
    """Without the ending that marks it as a backward."""
    assert plain_name("RoundedBackward") == "rounded"
