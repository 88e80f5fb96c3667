"""Whether a rule tells the truth: what it rebuilds is compared with what it stands for, to the last bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kedge.offload.held.raw_bytes import words
from kedge.offload.rebuild.recipe import Recipe

_NEAR = 0.25


_FULL = "can't allocate memory"
"""What PyTorch's allocator of host memory says, in a plain RuntimeError."""


class Disproof(NamedTuple):
    """What is wrong with a recipe.

    Attributes:
        why: In words.
        false: Whether its rule makes other values, and so is not to be believed anywhere; otherwise it could not be tried here.
        passing: Whether it may well be tried again: there was no memory for it.
    """

    why: str
    false: bool = True
    passing: bool = False


def disproof(recipe: Recipe, value: Tensor) -> Disproof | None:
    """Return what is wrong with what a recipe makes of its inputs now; None if nothing is."""
    try:
        with torch.no_grad():
            made = recipe.run(*(handle.read() for handle in recipe.inputs))
    except Exception as failure:  # noqa: BLE001 - a rule that fails is not used; the program goes on without it
        first = str(failure).partition("\n")[0]
        full = isinstance(failure, MemoryError | torch.OutOfMemoryError) or _FULL in str(failure)
        return Disproof(f"it raised {type(failure).__name__}: {first}", false=False, passing=full)
    if made.dtype != value.dtype or made.shape != value.shape:
        return Disproof(f"it made {made.dtype} {list(made.shape)} of what is {value.dtype} {list(value.shape)}")
    if made.stride() != value.stride() or made.storage_offset() != value.storage_offset():
        return Disproof(f"it made strides {made.stride()} of what are {value.stride()}")
    if not all(handle.exact for handle in recipe.inputs):
        return None if _is_near(made, value.detach()) else Disproof("it made values far from those it stands for")
    # As bytes a NaN is equal to itself, and -0.0 is not 0.0.
    return None if torch.equal(words(made), words(value)) else Disproof("it made other values")


def _is_near(made: Tensor, value: Tensor) -> bool:
    """Tell whether what was made of inputs that a codec has rounded is what a rule is to make, but for that."""
    if not value.is_floating_point():
        return True
    apart = torch.linalg.vector_norm((made - value).float())
    return bool(apart <= _NEAR * torch.linalg.vector_norm(value.float()))
