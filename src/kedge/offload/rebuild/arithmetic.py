"""The rules for products, quotients and sums of saved tensors."""

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
    """The rule of a product or a quotient; its node saves a side if the other one needs a gradient.

    Attributes:
        name: Its name in the account.
        nodes: The type name of its node.
        function: The operation.
    """

    name: str
    nodes: tuple[str, ...]
    function: Callable[..., Tensor]

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that combines both sides."""
        left = _side(node, builder, "self", 0)
        right = None if left is None else _side(node, builder, "other", 1)
        return None if left is None or right is None else Apply(self.function, (left, right))


class SumOfTwo(RebuildRule):
    """The rule of a sum, whose node saves nothing, from the origins of both sides, as at the end of a residual branch."""

    name = "sum"
    nodes = ("AddBackward0",)

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that adds both sides."""
        left = builder.behind(node.next_functions[0])
        right = None if left is None else builder.behind(node.next_functions[1])
        return (
            None
            if left is None or right is None
            else Apply(
                _add_inside if isinstance(left, Apply) else _add,
                (left, right),
                (saved(node, "alpha"),),
            )
        )


ARITHMETIC = (
    OfTwo("product", ("MulBackward0",), torch.mul),
    OfTwo("quotient", ("DivBackward0",), torch.div),
    SumOfTwo(),
)


def _side(node: Any, builder: RecipeBuilder, field: str, edge: int) -> Term | None:
    """Return the term of one side: saved, a number, or rebuilt."""
    held = raw(node, field).data
    if held is None:
        return builder.behind(node.next_functions[edge])
    if isinstance(held, Tensor):
        return _number(held)
    return builder.saved(node, field, edge)


def _number(held: Tensor) -> Term | None:
    """Return the term of a Python number, which PyTorch wraps into a CPU tensor that no hook sees; None if it is not one."""
    if (
        held.dim()
        or held.device.type != "cpu"
        or held.dtype not in {torch.float64, torch.int64, torch.bool}
    ):
        return None
    return partial(constant, held.item())


def _add(left: Tensor, right: Tensor, alpha: Any) -> Tensor:
    return torch.add(left, right, alpha=alpha)


def _add_inside(left: Tensor, right: Tensor, alpha: Any) -> Tensor:
    """Return the sum, in place in the left side if it fits: that was computed for this sum alone."""
    fits = left.shape == right.shape and torch.result_type(left, right) == left.dtype
    return left.add_(right, alpha=alpha) if fits else torch.add(left, right, alpha=alpha)
