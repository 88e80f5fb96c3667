"""The rules for copies: in another order, expanded, or in another dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.offload.rebuild.recipe import Term
from kedge.offload.rebuild.recipe_builder import Apply, RebuildRule, RecipeBuilder, signed
from kedge.torch_internals.autograd_nodes import saved

Step = Callable[[Tensor], Tensor]
Sizes = tuple[int, ...]


class Copy(RebuildRule):
    """The rule of a copy of a transposed, reshaped or expanded tensor, as `contiguous` and `reshape` make."""

    name = "copy"
    nodes = ("CloneBackward0", "UnsafeViewBackward0")
    cost = "copy"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that repeats the steps from the copied tensor.

        Only their last shape is known, so the rule has to be the outermost.
        """
        whole = builder.whole
        if whole is None:
            return None
        edge, steps = _steps(node, tuple(whole.size()))
        if edge is None:
            return None
        source = builder.behind(edge)
        if source is not None:
            return Apply(partial(_replay, tuple(steps)), (source,))
        return _once(whole, node, builder)


def _steps(node: Any, size: Sizes) -> tuple[Any, list[Step]]:
    """Return the edge behind a copy and its views, and the steps from there in forward order."""
    steps: list[Step] = []
    if type(node).__name__ == "UnsafeViewBackward0":
        steps.append(partial(_reshape, size))
        size = _size_before(node)
        node = node.next_functions[0][0]
        if type(node).__name__ != "CloneBackward0":
            return None, []

    edge = node.next_functions[0]
    while (back := _BACK.get(type(edge[0]).__name__)) is not None:
        step, size = back(edge[0], size)
        steps.append(step)
        edge = edge[0].next_functions[0]
    return edge, steps[::-1]


def _size_before(node: Any) -> Sizes:
    return tuple(saved(node, "self_sym_sizes"))


def _replay(steps: Sequence[Step], source: Tensor) -> Tensor:
    """Return a copy of the source after the steps; it shares no memory with the source."""
    for step in steps:
        source = step(source)
    return source.clone(memory_format=torch.contiguous_format)


def _reshape(size: Sizes, source: Tensor) -> Tensor:
    return source.reshape(size)


def _swap(first: int, second: int, source: Tensor) -> Tensor:
    return source.transpose(first, second)


def _permute(dims: Sizes, source: Tensor) -> Tensor:
    return source.permute(dims)


def _expand(size: Sizes, source: Tensor) -> Tensor:
    return source.expand(size)


def _reshaped(node: Any, size: Sizes) -> tuple[Step, Sizes]:
    return partial(_reshape, size), _size_before(node)


def _expanded(node: Any, size: Sizes) -> tuple[Step, Sizes]:
    return partial(_expand, size), _size_before(node)


def _swapped(node: Any, size: Sizes) -> tuple[Step, Sizes]:
    first = signed(saved(node, "dim0")) % len(size)
    second = signed(saved(node, "dim1")) % len(size)
    before = list(size)
    before[first], before[second] = before[second], before[first]
    return partial(_swap, first, second), tuple(before)


def _flipped(_: Any, size: Sizes) -> tuple[Step, Sizes]:
    return Tensor.t, size[::-1]


def _permuted(node: Any, size: Sizes) -> tuple[Step, Sizes]:
    dims = tuple(signed(dim) % len(size) for dim in saved(node, "dims"))
    before = [0] * len(size)
    for place, dim in enumerate(dims):
        before[dim] = size[place]
    return partial(_permute, dims), tuple(before)


_BACK: dict[str, Callable[[Any, Sizes], tuple[Step, Sizes]]] = {
    "ViewBackward0": _reshaped,
    "UnsafeViewBackward0": _reshaped,
    "ExpandBackward0": _expanded,
    "TransposeBackward0": _swapped,
    "PermuteBackward0": _permuted,
    "TBackward0": _flipped,
}


def _once(whole: Tensor, node: Any, builder: RecipeBuilder) -> Term | None:
    """Return the term of an expanded and then copied tensor, stored once.

    Such are keys that several attention heads share.
    """
    size = tuple(whole.size())
    if type(node).__name__ == "UnsafeViewBackward0":
        size = _size_before(node)
        node = node.next_functions[0][0]
    expand = node.next_functions[0][0]
    if type(expand).__name__ != "ExpandBackward0":
        return None

    before = _size_before(expand)
    part = whole.detach().reshape(size)
    lead = len(size) - len(before)
    for dim, once in enumerate(before):
        part = part.narrow(lead + dim, 0, once)
    builder.extra = part[(0,) * lead].clone(memory_format=torch.contiguous_format)

    steps = (partial(_expand, size), partial(_reshape, tuple(whole.size())))
    return Apply(partial(_replay, steps), (_last,))


def _last(inputs: Sequence[Tensor]) -> Tensor:
    return inputs[-1]


class Cast(RebuildRule):
    """The rule of a copy in another dtype.

    Its source is a parameter (autocast copies each weight) or a tensor that can be rebuilt.
    """

    name = "cast"
    nodes = ("ToCopyBackward0",)
    cost = "copy"

    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that casts the source.

        The node does not know the dtype, so the rule has to be the outermost.
        """
        whole = builder.whole
        if whole is None:
            return None
        source = builder.behind(node.next_functions[0])
        if source is None:
            return None
        return Apply(_cast, (source,), (whole.dtype,))


def _cast(source: Tensor, dtype: torch.dtype) -> Tensor:
    return source.to(dtype, copy=True)


COPIES = (Cast(), Copy())
