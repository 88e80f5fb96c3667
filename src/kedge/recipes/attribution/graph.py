"""The operations between a score and a value in the autograd graph."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from kedge.torch_internals.autograd_nodes import by_need

REENTRANT = "CheckpointFunctionBackward"


def nodes_between(scores: Sequence[Tensor], values: Sequence[Tensor]) -> list[Node]:
    """Return the nodes that pass a gradient from the scores to the values, from the scores backwards."""
    ends = {get_gradient_edge(value).node for value in values}
    order = list(by_need(score.grad_fn for score in reversed(scores) if score.grad_fn is not None))
    leading: set[Node] = set(ends)
    for node in order:  # the nodes behind a node are before it
        if any(behind in leading for behind, _ in node.next_functions):
            leading.add(node)
    return [node for node in reversed(order) if node in leading and node not in ends]


def operation_of(node: Node) -> str:
    """Return PyTorch's name of a node's operation, without namespaces."""
    return node.name().rpartition("::")[2]
