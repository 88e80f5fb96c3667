"""The saved tensors of autograd nodes, and the graphs behind them.

# Note [Reading without unpacking]
A node has two attributes for a saved tensor. ``_saved_self`` unpacks it, by the hooks under which
it was packed: under activation checkpointing that would run the block again. ``_raw_saved_self`` is
the `SavedTensor` itself, whose ``data`` is the tensor, or the result of the program's own pack
hook.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from kedge.torch_internals.corners import find, late

SavedTensor: Any = find("torch:_C._autograd.SavedTensor") or ()
_NUMBER = "torch:_C._autograd._get_sequence_nr"
_NUMBER_OF = "torch:_C._functions.AccumulateGrad._sequence_nr"


def numbers_operations() -> bool:
    """Whether this PyTorch shows autograd's numbers of operations; if not, each number is 0."""
    return find(_NUMBER) is not None and find(_NUMBER_OF) is not None


def _number(node: Any) -> int:
    return node._sequence_nr()  # type: ignore[no-any-return]


def _unnumbered(*_: Any) -> int:
    return 0


operation_number: Callable[[], int] = (
    late(_NUMBER, _unnumbered) if numbers_operations() else _unnumbered
)
"""The number that the next operation of this thread gets in the graph."""

sequence_number: Callable[[Any], int] = _number if numbers_operations() else _unnumbered
"""The number of a node in the order of execution.

One that accumulates a gradient has a number above that of every operation.
"""

RAW = "_raw_saved_"
_UNPACKED = "_saved_"
_NUMBERS = (torch.float64, torch.int64, torch.complex128, torch.bool)


@cache
def fields(kind: type[Node]) -> tuple[str, ...]:
    """Return the names of saved tensors in nodes of a kind: the ``self`` of ``_raw_saved_self``."""
    return tuple(name.removeprefix(RAW) for name in dir(kind) if name.startswith(RAW))


def raw(node: Any, name: str) -> Any:
    """Return the `SavedTensor`, or several, that a node has under a name.

    See Note [Reading without unpacking].

    Raises:
        AttributeError: If nodes of this kind save nothing under this name.
        RuntimeError: If it is freed.
    """
    return getattr(node, RAW + name)


def saved(node: Any, name: str) -> Any:
    """Return a node's saved number or tensor of a name; a tensor is unpacked.

    Raises the errors of `raw`.
    """
    return getattr(node, _UNPACKED + name)


def number_in(node: Any, name: str) -> Any:
    """Return a number that a node saved; None if it saves nothing under this name.

    A node of the same name may save a tensor in its place, which a backward pass has freed.
    """
    try:
        return getattr(node, _UNPACKED + name, None)
    except RuntimeError:
        return None


def shape_of_output(node: Node, number: int = 0) -> tuple[int, ...] | None:
    """Return the shape of a node's output of a number; None if it is not known."""
    # The shapes of the node's gradients in the backward pass.
    described = getattr(node, "_input_metadata", ())
    if number >= len(described):
        return None
    shape = getattr(described[number], "shape", None)
    if shape is None:
        return None
    return tuple(map(int, shape))


def function_of(node: Node) -> Any:
    """Return the `torch.autograd.Function` that a node belongs to; None if it is one of PyTorch's own."""
    return getattr(type(node), "_forward_cls", None)


def is_leaf(node: Any) -> bool:
    """Whether a node accumulates the gradient of a leaf; such nodes have no place in the order of execution."""
    return type(node).__name__ == "AccumulateGrad"


def in_order(nodes: Iterable[Node]) -> list[Node]:
    """Return nodes in the order of execution, leaves last.

    Each node stands behind those that it needs. Their numbers say so, except where the node of a
    view was made anew, after an operation in place on what it is a view of.
    """
    found = list(nodes)
    if numbers_operations():
        found.sort(key=sequence_number)
        if not _needs_later(found):
            return found
    wanted = set(found)
    return sorted((node for node in by_need(found) if node in wanted), key=is_leaf)


def _needs_later(nodes: Sequence[Node]) -> bool:
    """Whether one of some nodes needs one behind it that is no leaf."""
    later = {node for node in nodes if not is_leaf(node)}
    for node in nodes:
        later.discard(node)
        if any(before in later for before, _ in node.next_functions):
            return True
    return False


def by_need(roots: Iterable[Node]) -> Iterator[Node]:
    """Yield each node behind some roots after the nodes that it needs."""
    met: set[Node] = set()
    for root in roots:
        stack: list[tuple[Node, bool]] = [(root, False)]
        while stack:
            node, is_ready = stack.pop()
            if is_ready:
                yield node
            elif node not in met:
                met.add(node)
                stack.append((node, True))
                for before, _ in node.next_functions:
                    if before is not None:
                        stack.append((before, False))


def saved_by(node: Node) -> Iterator[tuple[str, Any]]:
    """Yield the names and the `SavedTensor` objects of a node, unless they are freed."""
    for name in fields(type(node)):
        try:
            kept = raw(node, name)
        except RuntimeError:  # its backward has run, and has freed its saved tensors
            continue
        if not isinstance(kept, tuple):
            kept = (kept,)
        for each in kept:
            if isinstance(each, SavedTensor):
                yield name, each


def is_freed(node: Node) -> bool:
    """Whether a backward pass has freed what a node had saved; unpacks nothing."""
    for name in fields(type(node)):
        try:
            kept = raw(node, name)
            is_empty = isinstance(kept, SavedTensor) and kept.data is None
            if is_empty and getattr(kept, "unpack_hook", None) is None:
                saved(node, name)  # None if it saved nothing there; there is nothing to unpack
        except RuntimeError:
            return True
    return False


def is_number(tensor: Tensor) -> bool:
    """Whether PyTorch made a tensor from a Python number, such as the 2 in ``x * 2``."""
    return tensor.dim() == 0 and tensor.device.type == "cpu" and tensor.dtype in _NUMBERS


def behind(roots: Iterable[Node | None], since: int = 0) -> Iterator[Node]:
    """Yield each node of a graph once, from the nodes that made its results.

    Args:
        roots: Those nodes; None is skipped.
        since: The first number, in the order of execution, that is yielded; earlier nodes do not
            depend on later ones.
    """
    stack = [node for node in roots if node is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        if since and sequence_number(node) < since:
            continue
        yield node
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                stack.append(before)


def between(node: Node | None, before: Iterable[Node | None]) -> Iterator[Node]:
    """Yield the nodes that an operation made: from that of its result, first, to those of its arguments."""
    known = {None, *before}
    waiting = [node]
    while waiting:
        each = waiting.pop()
        if each is not None and each not in known:
            known.add(each)
            yield each
            waiting += [earlier for earlier, _ in each.next_functions]


def leaves_behind(results: Iterable[Tensor], ends: Iterable[Node | None]) -> list[Tensor]:
    """Return the leaves behind some results, without those behind certain nodes."""
    ends = set(ends)
    met = {tensor.grad_fn for tensor in results if tensor.grad_fn is not None}
    stack = list(met)
    found = []
    while stack:
        node = stack.pop()
        if is_leaf(node):
            found.append(node.variable)  # type: ignore[attr-defined]
        if node not in ends:
            new = {before for before, _ in node.next_functions if before is not None} - met
            met |= new
            stack += new
    return found


def operation_of(node: Node | None) -> str:
    """Return the operation that a node belongs to, as the program would call it: ``log_softmax``.

    It is "leaf" without a node.
    """
    if node is None:
        return "leaf"
    own = function_of(node)
    if own is not None:
        return str(own.__name__)
    name = re.sub(r"Backward\d*$", "", node.name().rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def name_in_messages(node: Node) -> str:
    """Return the name of a node in autograd's messages: ``Relu``.

    It is ``ReluBackward0`` up to PyTorch 2.12.
    """
    if torch.__version__ < "2.13":
        return node.name()
    return re.sub(r"Backward\d*$", "", node.name())


def dimension_of(node: Node) -> int | None:
    """Return the dimension that a node's operation, such as a softmax, ran over.

    It is None if the operation has none, or does not show it.
    """
    dim = getattr(node, "_saved_dim", None)
    if not isinstance(dim, int):
        return None
    return signed(dim)


def dimensions_of(node: Node, name: str, rank: int) -> list[int]:
    """Return the dimensions that a node saved under a name, counted from the first of a tensor's.

    There is none if it saves nothing of that name.

    Args:
        node: The node.
        name: That of one dimension, or of several.
        rank: The number of the tensor's dimensions.
    """
    found = number_in(node, name)
    if isinstance(found, int):
        found = (found,)
    if not isinstance(found, tuple):
        return []
    return [signed(dim) % rank for dim in found if rank > 0]


def signed(dim: int) -> int:
    """Return a dimension as the program has written it: PyTorch shows -1 as an unsigned number."""
    if dim >= 2**63:
        return dim - 2**64
    return dim


def edge_of(tensor: Tensor) -> GradientEdge | None:
    """Return the edge that leads to a tensor's gradient; None if the tensor requires none.

    PyTorch looks for the edge of a leaf by making a view of it, which inference mode, and leaves
    without views, do not allow.
    """
    if not tensor.requires_grad:
        return None
    if tensor.grad_fn is not None:
        return get_gradient_edge(tensor)
    with torch.inference_mode(mode=False), torch.enable_grad():
        if tensor.layout is torch.strided and not tensor.is_nested:
            return get_gradient_edge(tensor)
        made: Any = tensor * 1
    return GradientEdge(made.grad_fn.next_functions[0][0], 0)
