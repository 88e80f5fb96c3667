"""The rules for normalisations: from the input and the statistics that the node saves.

# Note [The transformation alone]
In training, batch normalisation first computes a mean and an inverse deviation of each channel,
which it saves, and then transforms an input x into x * a + (bias - mean * a), where a is deviation
* weight. With given statistics it does only the latter, but takes a variance, which does not always
yield the same deviation. So the rule passes a variance of 1, and a as the weight: the same kernel
then computes the same result.

# Note [Groups without an epsilon]
Since 2.14 the node of group normalisation keeps only the means and deviations, not its epsilon. On
a CPU its kernel is that transformation, with one mean and one deviation for each group of channels
of each sample: so every channel of every sample becomes a channel of one sample, and Note [The
transformation alone] holds. Other layouts and narrow dtypes have other kernels, which round
otherwise: for them the tensor is kept.

# Note [The epsilon]
The epsilon follows from the saved statistics, as inverse deviation = 1 / sqrt(variance + epsilon):
the rule tries the usual ones on the row that varies least, and the one found must reproduce all the
statistics bit by bit. The rule remembers it with the weight, and each rebuild compares the
statistics again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from kedge.offload.held.handle import Handle
from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import NOTHING, Apply, RebuildRule, RecipeBuilder
from kedge.torch_internals.autograd_nodes import number_in, raw, saved
from kedge.torch_internals.tensors import have_same_bits

_USUAL = (1e-5, 1e-6, 1e-12, 1e-8, 1e-7, 1e-4, 1e-3, 0.0)
_EXACT = frozenset({torch.float32, torch.float64})
_known: WeakKeyDictionary[torch.UntypedStorage, float] = WeakKeyDictionary()


class BatchNorm(RebuildRule):
    """The rule of batch normalisation, and of instance normalisation."""

    name = "batch_norm"
    nodes = ("NativeBatchNormBackward0",)
    cost = "norm"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that normalises the input by the same statistics."""
        function: Callable[..., Tensor]
        if saved(node, "training"):
            function = _by_batch
            mean = builder.saved(node, "result1")
            spread = builder.saved(node, "result2")
        else:  # the next forward in training changes them without increasing their versions
            function = _by_running
            mean = builder.copied(node, "running_mean")
            spread = builder.copied(node, "running_var")

        source = builder.saved(node, "input", 0)
        affine = _affine(node, builder)
        if source is None or mean is None or spread is None or affine is None:
            return None
        return Apply(function, (source, mean, spread, *affine), (saved(node, "eps"),))


class GroupNorm(RebuildRule):
    """The rule of group normalisation."""

    name = "group_norm"
    nodes = ("NativeGroupNormBackward0",)
    cost = "norm"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that normalises the input again."""
        source = builder.saved(node, "input", 0)
        affine = _affine(node, builder)
        if source is None or affine is None:
            return None

        eps = number_in(node, "eps")
        if eps is not None:
            sizes = (saved(node, name) for name in ("N", "C", "HxW", "group"))
            return Apply(_by_group, (source, *affine), (*sizes, eps))

        if not _is_as_one_row(builder.handle(node, "input")):
            return None
        mean = builder.saved(node, "result1")
        spread = builder.saved(node, "result2")
        if mean is None or spread is None:
            return None
        return Apply(_by_group_statistics, (source, mean, spread, *affine))


def _affine(node: Any, builder: RecipeBuilder) -> tuple[Term, Term] | None:
    """Return the terms of weight and bias.

    A trained bias is not saved, but found at the end of an edge.
    """
    bias = node.next_functions[2]
    if raw(node, "weight").data is None:
        if bias[0] is not None:
            return None
        return NOTHING, NOTHING

    weight = builder.saved(node, "weight", 1)
    shift = builder.small(bias)
    if weight is None or shift is None:
        return None
    return weight, shift


def _is_as_one_row(source: Handle | None) -> bool:
    """Whether an input is contiguous and exact on a CPU; see Note [Groups without an epsilon]."""
    if source is None or source.device.type != "cpu" or source.dtype not in _EXACT:
        return False
    steps = [math.prod(source.size[dim + 1 :]) for dim in range(len(source.size))]
    return steps == list(source.stride)


def _by_batch(
    source: Tensor,
    mean: Tensor,
    spread: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """Return the result by batch statistics; see Note [The transformation alone]."""
    if source.device.type != "cpu" or spread.dtype not in _EXACT:
        return torch.native_batch_norm(source, weight, bias, None, None, True, 0.0, eps)[0]
    factor = spread if weight is None else spread * weight
    ones = torch.ones_like(spread)
    return torch.native_batch_norm(source, factor, bias, mean, ones, False, 0.0, 0.0)[0]


def _by_running(
    source: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    return torch.native_batch_norm(source, weight, bias, mean, variance, False, 0.0, eps)[0]


def _by_group(source: Tensor, weight: Tensor | None, bias: Tensor | None, *sizes: Any) -> Tensor:
    return torch.native_group_norm(source, weight, bias, *sizes)[0]


def _by_group_statistics(
    source: Tensor,
    mean: Tensor,
    spread: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return the result by group statistics; see Note [Groups without an epsilon]."""
    samples, channels = source.shape[:2]
    each = channels // mean.shape[1]
    mean = mean.repeat_interleave(each, 1)
    spread = spread.repeat_interleave(each, 1)
    rows = source.reshape(1, samples * channels, -1)
    if weight is None:
        made = (rows - mean.view(1, -1, 1)) * spread.view(1, -1, 1)
        return made.view(source.shape)

    factor = (spread * weight).view(-1)
    ones = torch.ones_like(factor)
    shift = None if bias is None else bias.repeat(samples)
    made, _, _ = torch.native_batch_norm(rows, factor, shift, mean.view(-1), ones, False, 0.0, 0.0)
    return made.view(source.shape)


class LayerNorm(RebuildRule):
    """The rule of layer normalisation."""

    name = "layer_norm"
    nodes = ("NativeLayerNormBackward0",)
    cost = "norm"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that normalises the input again."""
        source = builder.saved(node, "input", 0)
        spread = builder.saved(node, "result2")
        weight = _optional(node, builder, "weight", 1)
        bias = _optional(node, builder, "bias", 2)
        if source is None or spread is None or weight is None or bias is None:
            return None
        shape = list(saved(node, "normalized_shape"))
        epsilon = _epsilon(node, builder, shape)
        if epsilon is None:
            return None
        return Apply(_by_layer, (source, spread, weight, bias), (shape, epsilon))


def _optional(node: Any, builder: RecipeBuilder, field: str, edge: int) -> Term | None:
    if raw(node, field).data is None:
        return NOTHING
    return builder.saved(node, field, edge)


def _epsilon(node: Any, builder: RecipeBuilder, shape: list[int]) -> float | None:
    """Return the epsilon; None if it cannot be found; see Note [The epsilon]."""
    key = None
    weight = builder.handle(node, "weight")
    if weight is not None:
        key = _alone(weight.read())
    if key is not None and key in _known:
        return _known[key]

    source = builder.handle(node, "input")
    spread = builder.handle(node, "result2")
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
    if storage.nbytes() != weight.nbytes:
        return None
    return storage


def _solve(source: Tensor, spread: Tensor, shape: list[int]) -> float | None:
    if spread.dtype not in _EXACT:
        return None
    place = torch.unravel_index(spread.argmax(), spread.shape)[: source.dim() - len(shape)]
    row = source[place]
    wanted = spread[place]
    for epsilon in _candidates(row, wanted):
        _, _, found = torch.native_layer_norm(row, shape, None, None, epsilon)
        if not have_same_bits(found, wanted):
            continue
        _, _, found = torch.native_layer_norm(source, shape, None, None, epsilon)
        if have_same_bits(found, spread):
            return epsilon
    return None


def _candidates(row: Tensor, wanted: Tensor) -> Iterator[float]:
    yield from _USUAL
    left = (wanted.double() ** -2 - row.double().var(correction=0)).mean().item()
    if 0 < left < 1:
        rounded = [float(f"{left:.{digits}e}") for digits in range(3)]
        yield from dict.fromkeys(rounded)


def _by_layer(
    source: Tensor,
    spread: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    shape: list[int],
    epsilon: float,
) -> Tensor:
    made, _, found = torch.native_layer_norm(source, shape, weight, bias, epsilon)
    if source.device.type != "cpu" or have_same_bits(found, spread):
        return made
    other = _solve(source, spread, shape)  # the same weight was used with two epsilons
    if other is None:
        raise RuntimeError(
            "a normalised tensor cannot be rebuilt: "
            "its input's statistics differ from the saved ones"
        )
    return torch.native_layer_norm(source, shape, weight, bias, other)[0]


NORMS = (BatchNorm(), GroupNorm(), LayerNorm())
