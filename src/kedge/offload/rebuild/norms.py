"""The rules for batch and group normalisation: from the input and the statistics that the node saves.

# Note [The transformation alone]
In training, batch normalisation first computes a mean and an inverse deviation of each channel,
which it saves, and then transforms an input x into x * a + (bias - mean * a), where a is deviation
* weight. With given statistics it does only the latter, but takes a variance, which does not always
  yield the same deviation. So the rule passes a variance of 1, and a as
the weight: the same kernel then computes the same result.

# Note [Groups without an epsilon]
Since 2.14 the node of group normalisation keeps only the means and deviations, not its epsilon. On
a CPU its kernel is that transformation, with one mean and one deviation for each group of channels
of each sample: so every channel of every sample becomes a channel of one sample, and Note [The
transformation alone] holds. Other layouts and narrow dtypes have other kernels, which round
otherwise: for them the tensor is kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kedge.offload.held.handle import Handle
from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import NOTHING, Apply, RebuildRule, RecipeBuilder
from kedge.torch_internals.autograd_nodes import number_in, raw, saved


class BatchNorm(RebuildRule):
    """The rule of batch normalisation, and of instance normalisation."""

    name = "batch_norm"
    nodes = ("NativeBatchNormBackward0",)
    cost = "norm"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that normalises the input by the same statistics."""
        training = saved(node, "training")
        if training:
            statistics = [builder.saved(node, field) for field in ("result1", "result2")]
        else:  # the next forward in training changes them without increasing their versions
            statistics = [builder.copied(node, field) for field in ("running_mean", "running_var")]
        terms = [builder.saved(node, "input", 0), *statistics]
        affine = _affine(node, builder)
        if affine is None or None in terms:
            return None
        return Apply(
            _by_batch if training else _by_running,
            (*terms, *affine),  # type: ignore[arg-type]
            (saved(node, "eps"),),
        )


class GroupNorm(RebuildRule):
    """The rule of group normalisation."""

    name = "group_norm"
    nodes = ("NativeGroupNormBackward0",)
    cost = "norm"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that normalises the input again."""
        source, affine = builder.saved(node, "input", 0), _affine(node, builder)
        if source is None or affine is None:
            return None
        if (eps := number_in(node, "eps")) is not None:
            sizes = (saved(node, name) for name in ("N", "C", "HxW", "group"))
            return Apply(_by_group, (source, *affine), (*sizes, eps))
        if not _is_as_one_row(builder.handle(node, "input")):
            return None
        statistics = [builder.saved(node, field) for field in ("result1", "result2")]
        return (
            None
            if None in statistics
            else Apply(_by_group_statistics, (source, *statistics, *affine))  # type: ignore[arg-type]
        )


NORMS = (BatchNorm(), GroupNorm())


def _affine(node: Any, builder: RecipeBuilder) -> tuple[Term, Term] | None:
    """Return the terms of weight and bias; a trained bias is not saved, but found at the end of an edge."""
    bias = node.next_functions[2]
    if raw(node, "weight").data is None:
        return (NOTHING, NOTHING) if bias[0] is None else None
    weight, shift = builder.saved(node, "weight", 1), builder.small(bias)
    return None if weight is None or shift is None else (weight, shift)


def _is_as_one_row(source: Handle | None) -> bool:
    """Whether an input is contiguous float32 or float64 on a CPU, as Note [Groups without an epsilon] needs."""
    if (
        source is None
        or source.device.type != "cpu"
        or source.dtype not in {torch.float32, torch.float64}
    ):
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
    if source.device.type != "cpu" or spread.dtype not in {torch.float32, torch.float64}:
        return torch.native_batch_norm(source, weight, bias, None, None, True, 0.0, eps)[0]
    factor = spread if weight is None else spread * weight
    return torch.native_batch_norm(
        source, factor, bias, mean, torch.ones_like(spread), False, 0.0, 0.0
    )[0]


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
    source: Tensor, mean: Tensor, spread: Tensor, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Return the result by group statistics; see Note [Groups without an epsilon]."""
    samples, channels = source.shape[:2]
    each = channels // mean.shape[1]
    mean, spread = mean.repeat_interleave(each, 1), spread.repeat_interleave(each, 1)
    rows = source.reshape(1, samples * channels, -1)
    if weight is None:
        made = (rows - mean.view(1, -1, 1)) * spread.view(1, -1, 1)
    else:
        factor, shift = (spread * weight).view(-1), None if bias is None else bias.repeat(samples)
        made = torch.native_batch_norm(
            rows, factor, shift, mean.view(-1), torch.ones_like(factor), False, 0.0, 0.0
        )[0]
    return made.view(source.shape)
