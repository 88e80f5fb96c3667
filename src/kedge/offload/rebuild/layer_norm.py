"""The rule for layer normalisation: from the saved input, with an epsilon that the node does not show.

# Note [The epsilon]
The epsilon follows from the saved statistics, as inverse deviation = 1 / sqrt(variance + epsilon):
the rule tries the usual ones on the row that varies least, and the one found must reproduce all the
statistics bit by bit. The rule remembers it with the weight, and each rebuild compares the
statistics again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import NOTHING, Apply, RebuildRule, RecipeBuilder
from kedge.torch_internals.autograd_nodes import raw, saved

_USUAL = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-4, 1e-3, 0.0)
_EXACT = frozenset({torch.float32, torch.float64})
_known: WeakKeyDictionary[torch.UntypedStorage, float] = WeakKeyDictionary()


class LayerNorm(RebuildRule):
    """The rule of layer normalisation."""

    name = "layer_norm"
    nodes = ("NativeLayerNormBackward0",)
    cost = "norm"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that normalises the input again."""
        source, spread = builder.saved(node, "input", 0), builder.saved(node, "result2")
        weight, bias = _optional(node, builder, "weight", 1), _optional(node, builder, "bias", 2)
        if source is None or spread is None or weight is None or bias is None:
            return None
        shape = list(saved(node, "normalized_shape"))
        epsilon = _epsilon(node, builder, shape)
        return (
            None
            if epsilon is None
            else Apply(_by_layer, (source, spread, weight, bias), (shape, epsilon))
        )


def _optional(node: Any, builder: RecipeBuilder, field: str, edge: int) -> Term | None:
    return NOTHING if raw(node, field).data is None else builder.saved(node, field, edge)


def _epsilon(node: Any, builder: RecipeBuilder, shape: list[int]) -> float | None:
    """Return the epsilon; None if it cannot be found; see Note [The epsilon]."""
    weight = builder.handle(node, "weight")
    key = None if weight is None else _alone(weight.read())
    if key is not None and key in _known:
        return _known[key]
    source, spread = builder.handle(node, "input"), builder.handle(node, "result2")
    assert source is not None  # noqa: S101 - `term` has looked
    assert spread is not None  # noqa: S101 - `term` has looked
    with torch.no_grad(), torch.autocast(source.device.type, enabled=False):
        found = _solve(source.read(), spread.read(), shape)
    if key is not None and found is not None:
        _known[key] = found
    return found


def _alone(weight: Tensor) -> torch.UntypedStorage | None:
    """Return a weight's storage; None if other tensors share it."""
    storage = weight.untyped_storage()
    return storage if storage.nbytes() == weight.nbytes else None


def _solve(source: Tensor, spread: Tensor, shape: list[int]) -> float | None:
    if spread.dtype not in _EXACT:
        return None
    place = torch.unravel_index(spread.argmax(), spread.shape)[: source.dim() - len(shape)]
    row, wanted = source[place], spread[place]
    for epsilon in _candidates(row, wanted):
        if _same_bits(torch.native_layer_norm(row, shape, None, None, epsilon)[2], wanted):
            made = torch.native_layer_norm(source, shape, None, None, epsilon)[2]
            if _same_bits(made, spread):
                return epsilon
    return None


def _candidates(row: Tensor, wanted: Tensor) -> Iterator[float]:
    yield from _USUAL
    left = (wanted.double() ** -2 - row.double().var(correction=0)).mean().item()
    if 0 < left < 1:
        yield from dict.fromkeys((float(f"{left:.0e}"), float(f"{left:.1e}"), float(f"{left:.2e}")))


def _same_bits(left: Tensor, right: Tensor) -> bool:
    integer = torch.int32 if left.dtype == torch.float32 else torch.int64
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(integer), right.contiguous().view(integer)
    )


def _by_layer(
    source: Tensor,
    spread: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: list[int],
    epsilon: float,
) -> Tensor:
    made, _, found = torch.native_layer_norm(source, shape, weight, bias, epsilon)
    if source.device.type != "cpu" or _same_bits(found, spread):
        return made
    other = _solve(source, spread, shape)  # the same weight was used with two epsilons
    if other is None:
        raise RuntimeError(
            "a normalised tensor cannot be rebuilt: its input's statistics differ from the saved ones"
        )
    return torch.native_layer_norm(source, shape, weight, bias, other)[0]
