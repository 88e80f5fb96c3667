"""Copies in another number format."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import Apply, RebuildRule, RecipeBuilder


class Cast(RebuildRule):
    """A copy in another format, of a parameter (autocast makes one of each weight) or of what can be rebuilt."""

    name = "cast"
    nodes = ("ToCopyBackward0",)
    cost = "copy"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Cast what is behind; the node does not know into what, so it has to be the outermost."""
        whole = builder.whole
        source = None if whole is None else builder.behind(node.next_functions[0])
        return None if whole is None or source is None else Apply(_cast, (source,), (whole.dtype,))


def _cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    return source.to(dtype, copy=True)
