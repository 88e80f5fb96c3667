"""The operations between a score and a value in the autograd graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

REENTRANT = "CheckpointFunctionBackward"


def nodes_between(scores: Sequence[Tensor], values: Sequence[Tensor]) -> list[Node]:
    """Return the nodes that pass a gradient from the scores to the values, from the scores backwards."""
    ends = {get_gradient_edge(value).node for value in values}
    order = _postorder([score.grad_fn for score in scores if score.grad_fn is not None])
    leading: set[Node] = set(ends)
    for node in order:  # the nodes behind a node are before it
        if any(behind in leading for behind, _ in node.next_functions):
            leading.add(node)
    return [node for node in reversed(order) if node in leading and node not in ends]


def _postorder(roots: list[Node]) -> list[Node]:
    """Return every node behind some roots, each after the nodes behind it; without recursion, for deep graphs."""
    order: list[Node] = []
    seen: set[Node] = set()
    stack = [(root, False) for root in roots]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(behind, False) for behind, _ in node.next_functions if behind is not None]
    return order


def operation_of(node: Node) -> str:
    """Return PyTorch's name of a node's operation, without namespaces."""
    return node.name().rpartition("::")[2]
