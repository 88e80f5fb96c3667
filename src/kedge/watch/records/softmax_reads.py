"""The softmaxes behind a loss, and the dimension from which something behind them takes the classes.

# Note [Following a dimension]
`nll_loss` takes the classes from dimension 1 of its input, `ctc_loss` from the last one, and
`gather` picks along one that it names. From there the graph is followed towards the softmax, and
the dimension with it: through views and permutations, through what picks some samples or stacks
them, and through a buffer that the program writes results into. Where one operation can have put a
dimension in several places, as a view that merges two, all of them count. Elementwise operations
keep dimensions. What else comes before the softmax, or has several operands with a gradient, ends
the way: nothing is known of that softmax then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, islice
from math import prod

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.sites.operation_names import plain_name
from kedge.store.events import SoftmaxRead
from kedge.torch_internals.autograd_nodes import (
    behind,
    dimension_of,
    dimensions_of,
    raw,
    shape_of_output,
)

SOFTMAXES = ("softmax", "log_softmax")
_MOST_NODES = 20_000
_MOST_READS = 16
_LONGEST = 64
"""Most operations between a softmax and what reads it."""
_KEEPS = frozenset(
    (
        *("add", "alias", "clamp", "clamp_max", "clamp_min", "clone", "div", "expand", "log"),
        *("mul", "neg", "sub", "to_copy"),
    )
)
"""Operations that keep each dimension, counted from the last one."""
_ONLY_MOVES = frozenset(("alias", "clone", "expand", "to_copy"))
"""Those of them that keep the numbers as well."""
_REGROUPS = frozenset(("view", "unsafe_view", "reshape_alias", "squeeze", "unsqueeze"))
_KEEPS_RANK = frozenset(("slice", "split", "split_with_sizes", "cat", "index_select"))


def softmaxes_read(losses: Sequence[Tensor]) -> tuple[SoftmaxRead, ...]:
    """Return what is read of each softmax behind some losses; see Note [Following a dimension]."""
    found: dict[SoftmaxRead, None] = {}
    for node in islice(behind(loss.grad_fn for loss in losses), _MOST_NODES):
        read = _read_by(node)
        if read is not None:
            found[read] = None
        if len(found) == _MOST_READS:
            break
    return tuple(found)


@dataclass(frozen=True)
class _Place:
    """A result in the graph, and the dimensions of it in which the classes may be."""

    node: Node
    number: int
    dims: frozenset[int]

    @property
    def shape(self) -> tuple[int, ...] | None:
        return shape_of_output(self.node, self.number)


def _read_by(node: Node) -> SoftmaxRead | None:
    """Return the softmax whose result an operation reads, if it reads one along a dimension."""
    reader = plain_name(node.name()).removesuffix("2d")  # of images, nll_loss2d
    if reader not in (*SOFTMAXES, "nll_loss", "ctc_loss", "gather"):
        return None
    operands = _operands(node)
    if len(operands) != 1 or not operands[0].shape:
        return None

    rank = len(operands[0].shape)
    dim: int | None
    if reader == "nll_loss":
        dim = min(1, rank - 1)
    elif reader == "ctc_loss":
        dim = rank - 1
    else:
        dim = dimension_of(node)
    if dim is None:
        return None
    start = replace(operands[0], dims=frozenset((dim % rank,)))

    for name, each in _way(start, only_moves=reader in SOFTMAXES):
        own = dimension_of(each.node)
        if name in SOFTMAXES and own is not None and each.shape:
            return SoftmaxRead(
                by=reader,
                softmax=name,
                dim=own % len(each.shape),
                classes=tuple(sorted(each.dims)),
                shape=each.shape,
            )
    return None


def _way(place: _Place | None, *, only_moves: bool) -> Iterator[tuple[str, _Place]]:
    """Yield the results from one backwards, each with its operation, as far as dimensions are known.

    Args:
        place: The first one.
        only_moves: Whether an operation that changes numbers ends the way.
    """
    for _ in range(_LONGEST):
        if place is None or not place.dims or not place.shape:
            return
        name = plain_name(place.node.name())
        yield name, place
        if only_moves and name in _KEEPS - _ONLY_MOVES:
            return
        place = _moved_back(name, place)


def _operands(node: Node) -> list[_Place]:
    """Return the operands of a node that have gradients, without dimensions."""
    edges = node.next_functions
    return [_Place(before, number, frozenset()) for before, number in edges if before is not None]


def _moved_back(name: str, place: _Place) -> _Place | None:
    """Return the operand of an operation, with the dimensions in which the classes are there."""
    if name == "copy_slices":
        return _into_a_buffer(place)
    operands = _operands(place.node)
    if name in ("stack", "cat"):
        operands = operands[:1]  # the other parts are made as the first one is
    if len(operands) != 1 or operands[0].shape is None:
        return None
    dims = _dims_before(name, place, operands[0].shape)
    if dims is None:
        return None
    return replace(operands[0], dims=frozenset(dims))


def _dims_before(name: str, place: _Place, before: tuple[int, ...]) -> set[int] | None:
    """Return the dimensions of an operand that those of a result come from; None if that is not known."""
    shape, dims = place.shape or (), place.dims
    rank = len(before)
    if name in _KEEPS:
        further = len(shape) - rank
        kept = {dim - further for dim in dims if dim >= further}
        return {dim for dim in kept if before[dim] == shape[dim + further]}
    if name in _KEEPS_RANK:
        return set(dims)
    if name in _REGROUPS:
        return _regrouped(shape, before, dims)
    if name == "t":
        return {rank - 1 - dim for dim in dims}
    if name == "transpose":
        swapped = [dimensions_of(place.node, each, rank) for each in ("dim0", "dim1")]
        if not all(swapped):
            return None
        one, other = swapped[0][0], swapped[1][0]
        return {{one: other, other: one}.get(dim, dim) for dim in dims}
    if name == "permute":
        order = dimensions_of(place.node, "dims", rank)
        return {order[dim] for dim in dims if dim < len(order)}
    if name in ("select", "unbind"):
        taken = dimensions_of(place.node, "dim", rank)
        return {dim + (dim >= at) for at in taken for dim in dims}
    if name == "stack":
        put = dimensions_of(place.node, "dim", rank + 1)
        return {dim - (dim > at) for at in put for dim in dims if dim != at}
    if name == "index":
        return _indexed(place, before)
    return None


def _regrouped(
    shape: tuple[int, ...], before: tuple[int, ...], dims: frozenset[int]
) -> set[int] | None:
    """Return the dimensions of a tensor that those of a view of it share numbers with.

    Both are cut where the products of their sizes meet. Dimensions of one element have no place.
    """
    if 0 in shape or prod(shape) != prod(before):
        return None
    now = [at for at, size in enumerate(shape) if size != 1]
    old = [at for at, size in enumerate(before) if size != 1]
    found: set[int] = set()
    while now and old:
        new, past = [now.pop()], [old.pop()]
        product, other = shape[new[0]], before[past[0]]
        while product != other:
            if product < other:
                new.append(now.pop())
                product *= shape[new[-1]]
            else:
                past.append(old.pop())
                other *= before[past[-1]]
        if dims & set(new):
            found.update(past)
    return found


def _indexed(place: _Place, before: tuple[int, ...]) -> set[int] | None:
    """Return the dimensions before tensors picked some elements, if these stood side by side."""
    try:
        kept = [getattr(each, "data", None) for each in raw(place.node, "indices")]
    except (AttributeError, RuntimeError):  # freed, or saved under another name
        return None
    at = [i for i, each in enumerate(kept) if each is not None]
    indices = [each for each in kept if isinstance(each, Tensor)]
    if not at or len(indices) != len(at) or at != list(range(at[0], at[-1] + 1)):
        return None

    # A mask takes as many dimensions as it has, and puts one in their place.
    masks = [each.dtype in (torch.bool, torch.uint8) for each in indices]
    first = at[0]
    taken = given = 0
    for each, is_mask in zip(indices, masks, strict=True):
        if is_mask:
            taken, given = taken + each.dim(), max(given, 1)
        else:
            taken, given = taken + 1, max(given, each.dim())
    found: set[int] = set()
    for dim in place.dims:
        if dim < first:
            found.add(dim)
        elif dim < first + given:
            found.update(range(first, first + taken))
        else:
            found.add(dim - given + taken)
    return found


def _into_a_buffer(place: _Place) -> _Place | None:
    """Return what was written into a part of a buffer, ``buffer[t] = result``; see Note [Following a dimension].

    The graph does not tell which part: the sizes do, as no dimension changes its place.
    """
    edges = place.node.next_functions
    if len(edges) != 2 or edges[1][0] is None:  # first the buffer, then what is written
        return None
    part = _Place(edges[1][0], edges[1][1], frozenset())
    whole, sizes = place.shape or (), part.shape
    if not sizes or len(sizes) > len(whole):
        return None
    ways = list(combinations(range(len(whole)), len(sizes)))
    fits = [way for way in ways if all(whole[at] == n for at, n in zip(way, sizes, strict=True))]
    if not fits:
        fits = [
            way for way in ways if all(whole[at] >= n for at, n in zip(way, sizes, strict=True))
        ]
    dims = {i for way in fits for i, at in enumerate(way) if at in place.dims}
    return replace(part, dims=frozenset(dims))
