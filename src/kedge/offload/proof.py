"""Whether a rule tells the truth: what it rebuilds is compared with what it stands for, to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor

from kedge.offload.memory import words
from kedge.offload.rebuild.recipe import Recipe

_NEAR = 0.25


def disproof(recipe: Recipe, value: Tensor) -> str | None:
    """Return what is wrong with what a recipe makes of its inputs now; None if nothing is."""
    try:
        with torch.no_grad():
            made = recipe.run(*(handle.read() for handle in recipe.inputs))
    except Exception as failure:  # noqa: BLE001 - a rule that fails is not used; the program goes on without it
        first = str(failure).partition("\n")[0]
        return f"it raised {type(failure).__name__}: {first}"
    if made.dtype != value.dtype or made.shape != value.shape:
        return f"it made {made.dtype} {list(made.shape)} of what is {value.dtype} {list(value.shape)}"
    if made.stride() != value.stride() or made.storage_offset() != value.storage_offset():
        return f"it made strides {made.stride()} of what are {value.stride()}"
    if not all(handle.exact for handle in recipe.inputs):
        return None if _is_near(made, value.detach()) else "it made values far from those it stands for"
    # As bytes a NaN is equal to itself, and -0.0 is not 0.0.
    return None if torch.equal(words(made), words(value)) else "it made other values"


def _is_near(made: Tensor, value: Tensor) -> bool:
    """Tell whether what was made of inputs that a codec has rounded is what a rule is to make, but for that."""
    if not value.is_floating_point():
        return True
    apart = torch.linalg.vector_norm((made - value).float())
    return bool(apart <= _NEAR * torch.linalg.vector_norm(value.float()))
