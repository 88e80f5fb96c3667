"""Which operation made a loss that is not finite, read from its autograd graph while that is still there.

# Note [Reading the graph]
When backward begins, every node behind the loss still holds what it saved: inputs of some operations, results of
others. A node that saved finite inputs, and whose result is not finite - because it saved that itself, or because a node
that uses it saved it as an input -, made the first value that is not finite. Nothing is computed again but the
operation's own danger: a logarithm of zero, a division by zero, the root of a negative number.

# Note [The line of an operation]
Autograd can note the Python stack at which each node is made, as its anomaly mode does; that is dear. So it is switched on for
the length of one step near the beginning, and the line of each place in the graph is kept. A later graph of the same shape
has the same lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.hooks.nodes import behind, saved_by
from kedge.hooks.source import is_between
from kedge.watch.backwards import plain_name

_MOST_NODES = 20_000
_INSTALLED = ("site-packages", "dist-packages")
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>[^\n]*)\n\s*(?P<text>[^\n]*)')
_RESULTS = ("result", "output")
_LEAF = "torch::autograd::AccumulateGrad"


class Lines:
    """The program's line of each operation behind a loss; see Note [The line of an operation]."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], list[dict[str, Any] | None]] = {}
        self._asked = False
        self.wanted = True

    def begin(self) -> None:
        """Have autograd note the stack of each operation, until `learn` is called."""
        if self.wanted and not torch.is_anomaly_enabled():
            torch.set_anomaly_enabled(True, check_nan=False)
            self._asked = True

    def end(self) -> None:
        """Have autograd note no more."""
        if self._asked:
            torch.set_anomaly_enabled(False)
            self._asked = False

    def learn(self, losses: Sequence[Tensor]) -> None:
        """Keep the line of each node behind some losses, if autograd has noted them."""
        if not self._asked:
            return
        self.wanted = False
        nodes = nodes_of(losses)
        own = [node for node in nodes if node.name() != _LEAF]
        noted: Any = [node.metadata for node in own]
        lines = [line_in(metadata.get("traceback_")) for metadata in noted]
        if any(lines):
            self._known[shape_of(nodes)] = lines

    def of(self, nodes: Sequence[Node]) -> list[dict[str, Any] | None]:
        """Return the line of each node, None where it is not known."""
        return self._known.get(shape_of(nodes)) or [None] * len(nodes)


def nodes_of(losses: Iterable[Tensor]) -> list[Node]:
    """Return every node behind some tensors, in the order in which a forward makes them."""
    found = list(behind(t.grad_fn for t in losses))[:_MOST_NODES]
    return sorted(found, key=lambda node: node._sequence_nr())


def shape_of(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return what two graphs of the same operations have in common."""
    return tuple(node.name() for node in nodes if node.name() != _LEAF)


def line_in(stack: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the program's own innermost line in a stack as autograd notes it."""
    for installed in (False, True):
        for entry in reversed(stack or ()):
            match = _FRAME.match(entry)
            if match is None or is_between(match["file"]):
                continue
            if installed or not any(folder in match["file"] for folder in _INSTALLED):
                return {"file": match["file"], "line": int(match["line"]), "text": match["text"].strip() or None}
    return None


def find_producer(losses: Sequence[Tensor], lines: Lines) -> dict[str, Any] | None:
    """Find the operation that made the first value that is not finite; see Note [Reading the graph].

    Returns:
        Its ``operation``, ``node``, ``file``, ``line``, ``text``, ``detail``, and whether it is ``certain``.
    """
    nodes = nodes_of(losses)
    leaves: list[Any] = [node for node in nodes if node.name() == _LEAF]
    if any(not _is_finite(leaf.variable.detach()) for leaf in leaves):
        return None  # the parameters are not finite already: it was made in an earlier step
    values = {node: _saved(node) for node in nodes}
    where = lines.of([n for n in nodes if n.name() != _LEAF])
    line_of = dict(zip((n for n in nodes if n.name() != _LEAF), where, strict=False))
    given = _not_finite_inputs(nodes, values)
    for node in nodes:
        if node.name() == _LEAF:
            continue
        inputs = {name: t for name, t in values[node].items() if name not in _RESULTS}
        result = [t for name, t in values[node].items() if name in _RESULTS]
        if any(not _is_finite(t) for t in inputs.values()):
            continue
        danger = _danger(node, inputs)
        bad_result = any(not _is_finite(t) for t in result) or node in given
        if danger is not None or bad_result:
            line = line_of.get(node) or {"file": None, "line": None, "text": None}
            return {
                "operation": plain_name(node.name()), "node": node.name(), **line, "module": None, "where": "forward",
                "certain": danger is not None, "detail": danger or "its inputs are finite and its result is not",
            }  # fmt: skip
    return None


def _saved(node: Node) -> dict[str, Tensor]:
    """The tensors that a node saved; what somebody's hooks packed is left alone."""
    found = {}
    for name, saved in saved_by(node):
        value = getattr(saved, "data", None)
        if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided:
            found[name] = value.detach()
    return found


def _not_finite_inputs(nodes: Sequence[Node], values: dict[Node, dict[str, Tensor]]) -> set[Node]:
    """The nodes that made what a node behind them saved as its only input, where that is not finite."""
    made = set()
    for node in nodes:
        inputs = {name: t for name, t in values[node].items() if name not in _RESULTS}
        before = [n for n, _ in node.next_functions if n is not None]
        if len(before) == 1 and any(not _is_finite(t) for name, t in inputs.items() if name in ("self", "input")):
            made.add(before[0])
    return made


def _is_finite(value: Tensor) -> bool:
    return not value.numel() or bool(torch.isfinite(value).all())


def _danger(node: Node, inputs: dict[str, Tensor]) -> str | None:
    """Say what is wrong with the inputs of an operation that makes something not finite of finite numbers."""
    name = plain_name(node.name())
    own = inputs.get("self")
    if name in ("log", "log2", "log10", "log1p", "rsqrt", "reciprocal") and own is not None:
        at = -1 if name == "log1p" else 0
        zeros, below = int((own == at).sum()), int((own < at).sum())
        if zeros or (below and name != "reciprocal"):
            return f"its input holds {zeros} {'zeros' if at == 0 else 'times -1'} and {below} numbers below"
    if name == "div" and "other" in inputs and bool((inputs["other"] == 0).any()):
        return f"it divides by zero, {int((inputs['other'] == 0).sum())} times"
    if name in ("acos", "asin", "atanh") and own is not None and bool((own.abs() > 1).any()):
        return f"its input holds {int((own.abs() > 1).sum())} numbers beyond 1"
    if name == "pow" and own is not None and bool((own <= 0).any()):
        exponent = getattr(node, "_saved_exponent", None)
        if isinstance(exponent, (int, float)) and (exponent < 0 or exponent != int(exponent)):
            return f"its base holds {int((own <= 0).sum())} numbers that are zero or negative"
    return None
