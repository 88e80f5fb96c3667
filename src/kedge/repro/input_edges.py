"""What each call adds to the gradient of what it was given: where in autograd's graph that can be seen.

# Note [Shares of a gradient]
The gradient of a tensor is the sum of what all that used it send back, and a hook on the tensor sees the
sum. Where a module and an operation beside it use the same tensor, the sum does not tell which of the two
spoiled it. But each share passes along an edge of its own, from the node of an operation that took the
tensor in. When a call has ended, those nodes are found by going back from what it returned; the calls
inside are stepped over, as they have looked for theirs. A node made before the call began is not its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from kedge.torch_internals.autograd_nodes import operation_number, sequence_number

Edge = tuple[Node | None, int]


class CallEdges:
    """Where a call under way lies in autograd's graph.

    Attributes:
        entries: The edges of what it was given.
        inner: For each node that made what a call inside returned, the edges of what that call was given.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.began: int = operation_number()
        self.entries = {_edge(tensor) for tensor in given if tensor.requires_grad}
        self.inner: dict[Node, set[Edge]] = {}

    def takers(self, returned: Iterable[Tensor]) -> Iterator[tuple[Node, int]]:
        """Give the call's own nodes that took in what it was given, each with the place of that among its inputs.

        Args:
            returned: What the call returned.
        """
        waiting = [t.grad_fn for t in returned if t.grad_fn is not None and _edge(t) not in self.entries]
        known = set(waiting)
        while waiting:
            node = waiting.pop()
            inside = node in self.inner
            for place, edge in enumerate(self.inner[node] if inside else node.next_functions):
                before = edge[0]
                if edge in self.entries:
                    if not inside:
                        yield node, place
                elif before is not None and before not in known and self._own(before):
                    known.add(before)
                    waiting.append(before)

    def step_over(self, call: CallEdges, returned: Iterable[Tensor]) -> None:
        """Take note of a call inside that has ended."""
        for tensor in returned:
            if tensor.grad_fn is not None and _edge(tensor) not in call.entries:
                self.inner[tensor.grad_fn] = call.entries

    def _own(self, node: Any) -> bool:
        return bool(sequence_number(node) >= self.began)


def _edge(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr
