"""Each call's own share in the gradients of its inputs: the place in autograd's graph where it can be seen.

# Note [Shares of a gradient]
The gradient of a tensor is the sum of the shares of all its uses, and a hook on the tensor sees the
sum. If a module and an operation beside it use the same tensor, the sum does not show which of the
two made it non-finite. But each share passes along an edge of its own, from the node of an
operation that took the tensor. When a call has ended, a search from its outputs backwards finds
those nodes; it steps over the calls inside, which have searched for theirs. A node made before the
call began does not belong to the call.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from kedge.torch_internals.autograd_nodes import edge_of, operation_number, sequence_number

Edge = tuple[Node | None, int]


class CallEdges:
    """The place of an active call in autograd's graph.

    Attributes:
        began: The number of the next operation when the call began.
        entries: The edges of its inputs.
        inner: For each node that made an output of a call inside, the edges of that call's inputs.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        self.began: int = operation_number()
        self.entries = {_edge(tensor) for tensor in given if tensor.requires_grad}
        self.inner: dict[Node, set[Edge]] = {}

    def takers(self, returned: Iterable[Tensor]) -> Iterator[tuple[Node, int]]:
        """Yield the call's own nodes that took its inputs, each with the position of the input among the node's inputs.

        Args:
            returned: The outputs of the call.
        """
        waiting = [
            t.grad_fn for t in returned if t.grad_fn is not None and _edge(t) not in self.entries
        ]
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
        """Take the edges of a call inside that has ended."""
        for tensor in returned:
            if tensor.grad_fn is not None and _edge(tensor) not in call.entries:
                self.inner[tensor.grad_fn] = call.entries

    def _own(self, node: Any) -> bool:
        return bool(sequence_number(node) >= self.began)


def _edge(tensor: Tensor) -> Edge:
    edge = edge_of(tensor)
    return (None, 0) if edge is None else (edge.node, edge.output_nr)
