"""The line of the program at which each operation of a loss's graph was made.

# Note [The line of an operation]
Autograd can record the Python stack at which each node is made, as its anomaly mode does, which is
slow. So it is switched on for one step near the beginning, and the line of each place in the graph
is kept. A later graph of the same shape has the same lines. It is switched off again as soon as a
shape comes back in that step, as with an optimizer that calls its closure many times, or if a graph
is large. A model of thousands of modules goes without: its stacks alone would take seconds.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.frames import SourceLine, is_between, is_installed
from kedge.hooks.placing.own_warnings import ANOMALY_WARNINGS, ignore_warnings, show_warnings
from kedge.torch_internals.autograd_nodes import behind, in_order, is_leaf
from kedge.torch_internals.source_lines import place_of

_MOST_NODES = 20_000
_MANY_NODES = 2_000
"""Nodes behind a loss after which the rest of the step goes without stacks."""
_MOST_MODULES = 2_000
"""Most modules of a model whose operations get lines: the stack of an operation takes some 50 µs."""
_TRIES = 3
_FRAME = re.compile(
    r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>[^\n]*)\n\s*(?P<text>[^\n]*)'
)


class ProducerLines:
    """The program's line of each operation behind a loss; see Note [The line of an operation].

    Attributes:
        wanted: Whether they are to be recorded in the next measured step.
        seconds: About how many seconds autograd took to record the stacks, which no block of ours
            can time.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], list[SourceLine | None]] = {}
        self._asked = False
        self._tries = 0
        self.wanted = True
        self.seconds = 0.0

    def begin(self, modules: int) -> None:
        """Make autograd record the stack of each operation, until `end` is called.

        Models of too many modules go without.
        """
        if self.wanted and modules <= _MOST_MODULES and not torch.is_anomaly_enabled():
            # It is slow, and some programs never show a loss.
            self._tries += 1
            self.wanted = self._tries < _TRIES
            torch.set_anomaly_enabled(True, check_nan=False)
            ignore_warnings(ANOMALY_WARNINGS)
            self._asked = True

    def end(self) -> None:
        """Make autograd stop recording stacks."""
        if self._asked:
            torch.set_anomaly_enabled(False)
            show_warnings(ANOMALY_WARNINGS)
            self._asked = False

    def learn(self, losses: Sequence[Tensor]) -> bool:
        """Keep the line of each node behind some losses, if autograd has recorded them.

        Returns:
            Whether it has.
        """
        if not self._asked:
            return False
        self.wanted = False
        nodes = nodes_of(losses)
        own = [node for node in nodes if not is_leaf(node)]
        self.seconds += len(own) * _seconds_of_a_stack()

        shape = shape_of(nodes)
        if shape in self._known or len(own) > _MANY_NODES:
            # The step goes on with the same operations, or it would take too long.
            self.end()

        noted: Any = [node.metadata for node in own]
        lines = [line_in(metadata.get("traceback_")) for metadata in noted]
        if any(lines):
            self._known[shape] = lines
        return any(lines)

    def of(self, nodes: Sequence[Node]) -> list[SourceLine | None]:
        """Return the line of each node; None if it is unknown."""
        return self._known.get(shape_of(nodes)) or [None] * len(nodes)


def _seconds_of_a_stack() -> float:
    """Return the time that it takes to format a stack here, as autograd does for each operation."""
    rounds = []
    for _ in range(5):  # the first one may read the files of the lines
        start = perf_counter()
        traceback.format_list(traceback.extract_stack())
        rounds.append(perf_counter() - start)
    return min(rounds)


def nodes_of(losses: Iterable[Tensor]) -> list[Node]:
    """Return every node behind some tensors, in the order of the forward."""
    found = list(behind(t.grad_fn for t in losses))[:_MOST_NODES]
    return in_order(found)


def shape_of(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the names of the operations: two graphs of the same operations have the same."""
    return tuple(node.name() for node in nodes if not is_leaf(node))


def line_in(stack: Sequence[str] | None) -> SourceLine | None:
    """Return the program's own innermost line in a stack that autograd recorded.

    Without one it is the innermost line of an installed library.
    """
    for installed in (False, True):
        for entry in reversed(stack or ()):
            match = _FRAME.match(entry)
            if match is None or is_between(match["file"]):
                continue
            if installed or not is_installed(match["file"]):
                place = place_of(match["file"])
                text = match["text"].strip() or None
                return SourceLine(place, int(match["line"]), match["name"], text)
    return None
