"""Products, quotients and sums of what is saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import Apply, RebuildRule, RecipeBuilder, constant
from kedge.torch_internals.autograd_nodes import raw, saved


@dataclass(frozen=True, slots=True)
class OfTwo(RebuildRule):
    """A product or a quotient; its node saves a side if the other one needs a gradient.

    Attributes:
        name: Its name in the account.
        nodes: The type name of its node.
        function: The operation.
    """

    name: str
    nodes: tuple[str, ...]
    function: Callable[..., Tensor]

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Combine both sides."""
        left = _side(node, builder, "self", 0)
        right = None if left is None else _side(node, builder, "other", 1)
        return None if left is None or right is None else Apply(self.function, (left, right))


class SumOfTwo(RebuildRule):
    """A sum, whose node saves nothing: of what made both sides, as where a residual branch comes back."""

    name = "sum"
    nodes = ("AddBackward0",)

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Add both sides."""
        left = builder.behind(node.next_functions[0])
        right = None if left is None else builder.behind(node.next_functions[1])
        return (
            None
            if left is None or right is None
            else Apply(_add_inside if isinstance(left, Apply) else _add, (left, right), (saved(node, "alpha"),))
        )


ARITHMETIC = (
    OfTwo("product", ("MulBackward0",), torch.mul),
    OfTwo("quotient", ("DivBackward0",), torch.div),
    SumOfTwo(),
)


def _side(node: Any, builder: RecipeBuilder, field: str, edge: int) -> Term | None:
    """Return one side: as it was saved, a number, or what made it."""
    held = raw(node, field).data
    if held is None:
        return builder.behind(node.next_functions[edge])
    if isinstance(held, Tensor):
        return _number(held)
    return builder.saved(node, field, edge)


def _number(held: Tensor) -> Term | None:
    """Return a Python number, which PyTorch wraps into a tensor in CPU memory that no hook sees."""
    if held.dim() or held.device.type != "cpu" or held.dtype not in {torch.float64, torch.int64, torch.bool}:
        return None
    return partial(constant, held.item())


def _add(left: Tensor, right: Tensor, alpha: Any) -> Tensor:
    return torch.add(left, right, alpha=alpha)


def _add_inside(left: Tensor, right: Tensor, alpha: Any) -> Tensor:
    """Add in place to what was made for this alone."""
    fits = left.shape == right.shape and torch.result_type(left, right) == left.dtype
    return left.add_(right, alpha=alpha) if fits else torch.add(left, right, alpha=alpha)
