"""The operators that compiled code calls."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kedge.torch_internals import operators


def define(interrupted: bool) -> torch.library.Library:
    """Define an operator, as a module does that is imported."""
    library = torch.library.Library("kedge_interrupted", "DEF")
    with operators.all_or_none(library):
        library.impl(
            library.define("twice(Tensor x) -> Tensor"),
            lambda x: x * 2,
            "CompositeExplicitAutograd",
        )
        if interrupted:
            raise KeyboardInterrupt
    return library


def test_an_interrupted_definition_can_be_repeated() -> None:
    """As when the first cell with a hook is interrupted while Kedge is imported, and runs again."""
    with pytest.raises(KeyboardInterrupt) as told:
        define(interrupted=True)
    library = define(interrupted=False)

    twice: Tensor = torch.ops.kedge_interrupted.twice(torch.ones(2))
    assert torch.equal(twice, torch.full((2,), 2.0))
    assert (
        told.value.__traceback__ is not None
    )  # which keeps the first library alive, as a notebook does
    del library
