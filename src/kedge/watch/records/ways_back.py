"""Modules that return a value from which no gradient comes back to their input, beside a loss that has a way.

# Note [Ways back]
A quantiser chooses rows of its own table by argmin. What it returns has a graph, which ends at the
table; only if the program adds the input to it (``z + (q - z).detach()``) do gradients pass. But a
loss of its own, which it returns as well, leads back to the input: so every parameter before it
gets gradients, and none of them are of what is made of its result. Other modules without a way
back, such as tables of positions, return no such loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from kedge.actions.measure.site_table import MeasuredSite
from kedge.torch_internals.autograd_nodes import behind, is_leaf, sequence_number
from kedge.watch.records.operation_lines import nodes_of

_MOST = 8
"""Most outputs that are noted."""


def without_a_way_back(
    losses: Sequence[Tensor], seats: Iterable[MeasuredSite]
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield outputs that some losses use and that have no way back, as sites, with the losses beside them that have.

    Only values are found that are the first of their sites: those of the first step.

    See Note [Ways back].
    """
    nodes = {sequence_number(node): node for node in nodes_of(losses) if not is_leaf(node)}
    found: dict[str, tuple[list[Node], list[tuple[MeasuredSite, Node]]]] = {}
    for seat in seats:
        node = nodes.get(seat.number)
        if seat.number == 0 or node is None or node.name() != seat.node:
            continue
        given, returned = found.setdefault(seat.site.path, ([], []))
        if seat.site.kind == "in":
            given.append(node)
        elif seat.site.kind == "out":
            returned.append((seat, node))

    noted = 0
    for given, returned in found.values():
        numbers = [(seat, node) for seat, node in returned if not seat.shape]
        tensors = [(seat, node) for seat, node in returned if seat.shape]
        if not given or not numbers or not tensors:
            continue
        through = tuple(str(seat.site) for seat, node in numbers if _leads_to(given, node))
        for seat, node in tensors:
            if through and noted < _MOST and not _leads_to(given, node):
                noted += 1
                yield str(seat.site), through


def _leads_to(given: Sequence[Node], node: Node) -> bool:
    """Whether any of some nodes is behind another one."""
    wanted = set(given)
    since = min(sequence_number(each) for each in given)
    return any(each in wanted for each in behind([node], since))
