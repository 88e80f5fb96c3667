"""Products, quotients and sums of what is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Cost, Term
from kedge.offload.rebuild.recipe_builder import Apply, OfOneNode, RecipeBuilder
from kedge.torch_internals.autograd_nodes import raw, saved


@dataclass(frozen=True, slots=True)
class OfTwo(OfOneNode):
    """A product or a quotient; its node saves a side if the other one needs a gradient.

    Attributes:
        name: What the account calls it.
        node: The type name of its node.
        function: The operation.
    """

    name: str
    node: str
    function: Callable[..., Tensor]

    cost: ClassVar[Cost] = "elementwise"
    result: ClassVar[str | None] = None

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Combine both sides."""
        left = _side(node, builder, "self", 0)
        right = None if left is None else _side(node, builder, "other", 1)
        return None if left is None or right is None else Apply(self.function, (left, right))


@dataclass(frozen=True, slots=True)
class SumOfTwo:
    """A sum, whose node saves nothing: of what made both sides, as where a residual branch comes back."""

    name: ClassVar[str] = "sum"
    nodes: ClassVar[tuple[str, ...]] = ("AddBackward0",)
    cost: ClassVar[Cost] = "elementwise"
    result: ClassVar[str | None] = None

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Add both sides."""
        left = builder.behind(node.next_functions[0])
        right = None if left is None else builder.behind(node.next_functions[1])
        return (
            None
            if left is None or right is None
            else Apply(_add_inside if isinstance(left, Apply) else _add, (left, right), (saved(node, "alpha"),))
        )


ARITHMETIC = (OfTwo("product", "MulBackward0", torch.mul), OfTwo("quotient", "DivBackward0", torch.div), SumOfTwo())


def _side(node: Any, builder: RecipeBuilder, field: str, edge: int) -> Term | None:
    """Give one side: as it was saved, a number, or what made it."""
    held = raw(node, field).data
    if held is None:
        return builder.behind(node.next_functions[edge])
    if isinstance(held, Tensor):
        return _number(held)
    return builder.saved(node, field, edge)


def _number(held: Tensor) -> Term | None:
    """Give a Python number, which PyTorch wraps into a tensor in CPU memory that no hook sees."""
    if held.dim() or held.device.type != "cpu" or held.dtype not in {torch.float64, torch.int64, torch.bool}:
        return None
    return partial(_constant, held.item())


def _constant(number: Any, _: Sequence[Tensor]) -> Any:
    return number


def _add(left: Tensor, right: Tensor, alpha: Any) -> Tensor:
    return torch.add(left, right, alpha=alpha)


def _add_inside(left: Tensor, right: Tensor, alpha: Any) -> Tensor:
    """Add to what was made for nobody else."""
    fits = left.shape == right.shape and torch.result_type(left, right) == left.dtype
    return left.add_(right, alpha=alpha) if fits else torch.add(left, right, alpha=alpha)
