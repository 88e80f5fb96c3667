"""The rule for copies in another dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import Apply, RebuildRule, RecipeBuilder


class Cast(RebuildRule):
    """The rule of a copy in another dtype, of a parameter (autocast copies each weight) or of a tensor that can be rebuilt."""

    name = "cast"
    nodes = ("ToCopyBackward0",)
    cost = "copy"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that casts the source; the node does not know the dtype, so the rule has to be the outermost."""
        whole = builder.whole
        source = None if whole is None else builder.behind(node.next_functions[0])
        return None if whole is None or source is None else Apply(_cast, (source,), (whole.dtype,))


def _cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    return source.to(dtype, copy=True)
