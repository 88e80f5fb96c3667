"""The dropouts behind a loss, also of functions that a forward calls.

# Note [A dropout in the graph]
On a device, dropout is an operation of its own, whose node saves the share that it drops. Elsewhere
it is a product with random numbers that are 0 or 1 / kept, which the node of the product saves. So
do masks of the program, but they need not have a mean of about 1; one that is divided by its own
mean has exactly 1, as a dropout has only by chance. What is dropped goes into another layer, where
a mask of the loss does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from torch import Tensor
from torch.autograd.graph import Node

from kedge.sites.operation_names import plain_name
from kedge.store.events import DropoutCalled
from kedge.torch_internals.autograd_nodes import behind, is_leaf, number_in, saved_by
from kedge.watch.records.operation_lines import ProducerLines, nodes_of
from kedge.watch.records.operation_numbers import LAYERS

_MOST_NODES = 20_000
_MOST = 50
"""Most dropouts that are noted."""
_LAYERS = frozenset((*LAYERS, "mm", "bmm", "baddbmm", "addbmm", "mv", "addmv"))
_SAMPLE = 65_536
"""Most elements of a mask that are looked at."""
_FEWEST = 20
"""Fewest elements that a mask has to keep."""
_DEVIATIONS = 5.0
"""By how many standard deviations the number of kept elements may differ from what is usual."""


def dropouts_called(losses: Sequence[Tensor], lines: ProducerLines) -> tuple[DropoutCalled, ...]:
    """Return the dropouts that some losses depend on through a layer; see Note [A dropout in the graph].

    What has run in this backward pass already has freed its mask.
    """
    nodes = [node for node in nodes_of(losses) if not is_leaf(node)]
    layers = [node for node in nodes if plain_name(node.name()) in _LAYERS]
    before = set(islice(behind(layers), _MOST_NODES))
    found: dict[DropoutCalled, None] = {}
    for node, line in zip(nodes, lines.of(nodes), strict=True):
        if node not in before or len(found) == _MOST:
            continue
        kept = _kept_by(node)
        if kept is not None:
            found[DropoutCalled(kept=round(kept, 4), source=line)] = None
    return tuple(found)


def _kept_by(node: Node) -> float | None:
    """Return the share of elements that a node keeps if it is one of dropout."""
    name = plain_name(node.name())
    if name == "native_dropout":
        dropped = number_in(node, "p")
        if isinstance(dropped, float):
            return 1 - dropped
        return None
    operands = [before for before, _ in node.next_functions if before is not None]
    if name != "mul" or len(operands) != 1:
        return None
    for _, saved in saved_by(node):
        mask = getattr(saved, "data", None)
        if isinstance(mask, Tensor) and mask.is_cpu and mask.is_floating_point():
            return _kept_in(mask.detach())
    return None


def _kept_in(mask: Tensor) -> float | None:
    """Return the share of elements that a mask keeps, if it is of 0 and the inverse of that share alone."""
    if not mask.is_contiguous():
        return None
    sample = mask.view(-1)[:_SAMPLE]
    scale = float(sample.max()) if len(sample) else 0.0
    if not 1.0 < scale < math.inf:
        return None
    kept = int((sample == scale).sum())
    if kept + int((sample == 0).sum()) != len(sample):
        return None

    usual = len(sample) / scale
    spread = math.sqrt(usual * (1 - 1 / scale))
    is_usual = abs(kept - usual) <= _DEVIATIONS * spread
    is_exact = abs(kept - usual) < 1e-3
    if usual < _FEWEST or not is_usual or is_exact:
        return None
    return 1 / scale
