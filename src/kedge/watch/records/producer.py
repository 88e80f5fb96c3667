"""Finds the operation that made a non-finite loss, from its autograd graph while that still exists.

# Note [Reading the graph]
When the first gradient arrives, the nodes between the loss and that parameter have run and freed their saved tensors;
the others still hold them: inputs of some operations, results of others. Values of the program's own variables, where
it called backward, are known too. A node with finite inputs and a non-finite result made the first such value. For
nodes that have run, dangerous inputs show it: a logarithm of zero, a division by zero. If no value shows it, the first
operation behind the loss that can make such a value is named, without certainty; not one behind a variable of the
program that is finite, such as the model's output: it lies before the place.

# Note [The line of an operation]
Autograd can record the Python stack at which each node is made, as its anomaly mode does, which is slow. So it is
switched on for one step near the beginning, and the line of each place in the graph is kept. A later graph of the same
shape has the same lines. A model of thousands of modules goes without: its stacks alone would take seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.frames import is_between, is_installed
from kedge.hooks.placing.own_warnings import ANOMALY_WARNINGS, ignore_warnings, show_warnings
from kedge.numbers import counted
from kedge.sites.leaves import has_memory, own_part
from kedge.torch_internals.autograd_nodes import behind, by_need, in_order, is_leaf, number_in, saved_by
from kedge.torch_internals.source_lines import place_of
from kedge.watch.models.backward_start import BackwardStart, plain_name

_MOST_NODES = 20_000
_MOST_MODULES = 2_000
"""Most modules of a model whose operations get lines: the stack of an operation takes some 50 µs."""
_TRIES = 3
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<name>[^\n]*)\n\s*(?P<text>[^\n]*)')
_RESULTS = ("result", "output")
_OPERANDS = ("self", "other")
_STEEP = (
    "sqrt",
    "norm",
    "linalg_vector_norm",
    "pow",
    "acos",
    "asin",
    "atanh",
    "log",
    "div",
    "reciprocal",
    "rsqrt",
    "std",
    "cdist",
)
_DANGEROUS = (
    "log",
    "log2",
    "log10",
    "log1p",
    "rsqrt",
    "reciprocal",
    "div",
    "acos",
    "asin",
    "atanh",
    "pow",
    "exp",
    "sqrt",
)
MOVES = (
    "t",
    "transpose",
    "permute",
    "view",
    "unsafe_view",
    "reshape_alias",
    "expand",
    "squeeze",
    "unsqueeze",
    "to_copy",
)


class ProducerLines:
    """The program's line of each operation behind a loss; see Note [The line of an operation]."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], list[dict[str, Any] | None]] = {}
        self._asked, self._tries = False, 0
        self.wanted = True

    def begin(self, modules: int) -> None:
        """Make autograd record the stack of each operation, until `end` is called; not for models of too many modules."""
        if self.wanted and modules <= _MOST_MODULES and not torch.is_anomaly_enabled():
            self._tries += 1
            self.wanted = self._tries < _TRIES  # it is slow, and some programs never show a loss
            torch.set_anomaly_enabled(True, check_nan=False)
            ignore_warnings(ANOMALY_WARNINGS)
            self._asked = True

    def end(self) -> None:
        """Make autograd stop recording stacks."""
        if self._asked:
            torch.set_anomaly_enabled(False)
            show_warnings(ANOMALY_WARNINGS)
            self._asked = False

    def learn(self, losses: Sequence[Tensor]) -> None:
        """Keep the line of each node behind some losses, if autograd has recorded them."""
        if not self._asked:
            return
        self.wanted = False
        nodes = nodes_of(losses)
        own = [node for node in nodes if not is_leaf(node)]
        noted: Any = [node.metadata for node in own]
        lines = [line_in(metadata.get("traceback_")) for metadata in noted]
        if any(lines):
            self._known[shape_of(nodes)] = lines

    def of(self, nodes: Sequence[Node]) -> list[dict[str, Any] | None]:
        """Return the line of each node; None if it is unknown."""
        return self._known.get(shape_of(nodes)) or [None] * len(nodes)


def nodes_of(losses: Iterable[Tensor]) -> list[Node]:
    """Return every node behind some tensors, in the order of the forward."""
    found = list(behind(t.grad_fn for t in losses))[:_MOST_NODES]
    return in_order(found)


def shape_of(nodes: Sequence[Node]) -> tuple[str, ...]:
    """Return the names of the operations: two graphs of the same operations have the same."""
    return tuple(node.name() for node in nodes if not is_leaf(node))


def line_in(stack: Sequence[str] | None) -> dict[str, Any] | None:
    """Return the program's own innermost line in a stack that autograd recorded, else an installed library's."""
    for installed in (False, True):
        for entry in reversed(stack or ()):
            match = _FRAME.match(entry)
            if match is None or is_between(match["file"]):
                continue
            if installed or not is_installed(match["file"]):
                return {
                    "file": place_of(match["file"]),
                    "line": int(match["line"]),
                    "text": match["text"].strip() or None,
                }
    return None


def find_producer(began: BackwardStart, lines: ProducerLines) -> dict[str, Any] | None:
    """Find the operation that made the first non-finite value; see Note [Reading the graph].

    Returns:
        Its ``operation``, ``node``, ``module``, ``where``, ``file``, ``line``, ``text``, ``detail``, and whether it is
        ``certain``; None if none is found.
    """
    nodes = nodes_of(began.tensors)
    leaves = [own_part(cast("Any", node).variable.detach()) for node in nodes if is_leaf(node)]
    if any(has_memory(leaf) and not _is_finite(leaf) for leaf in leaves):
        return None  # the parameters are non-finite already: an earlier step made the first value
    nodes = [node for node in nodes if not is_leaf(node)]
    where = dict(zip(nodes, lines.of(nodes), strict=True))
    variables = _values_in(began)
    suspects = []
    computed = False
    for node in nodes:
        inputs, results = _values_of(node, variables)
        spoiled = [name for name, t in inputs.items() if not _is_finite(t)]
        if spoiled and not computed:
            return _entered(node, where[node], inputs[spoiled[0]])
        computed |= plain_name(node.name()) not in MOVES
        if spoiled:
            continue
        danger = _danger(node, inputs)
        bad = any(not _is_finite(t) for t in results)
        if danger is not None or (bad and inputs):
            return _found(node, where[node], danger or "its inputs are finite and its result is not", certain=True)
        if bad and not _is_dangerous(node):
            break  # it only passes on its input
        if bad or (not results and _is_dangerous(node)):
            suspects.append(node)
        if bad:
            break
    sound = set(behind(node for node, value in variables.items() if _is_finite(value)))
    suspects = [node for node in suspects if node not in sound]
    if not suspects:
        return None
    others = dict.fromkeys(_named(node, where[node]) for node in suspects[1:])
    others.pop(_named(suspects[0], where[suspects[0]]), None)
    detail = "the loss is not finite, and this operation before it can produce non-finite values" + (
        f"; so can {', '.join(others)}" if others else ""
    )
    return _found(suspects[0], where[suspects[0]], detail, certain=False)


def find_behind_gradients(began: BackwardStart, lines: ProducerLines) -> dict[str, Any] | None:
    """Find the operation behind non-finite gradients of a finite loss: by then every node has run.

    A variable of the program may hold an infinity that the loss does not show, such as a logarithm of zero for a class
    other than the label's. Otherwise the suspects are the operations whose gradient can be infinite while their result
    is finite.
    """
    nodes = [node for node in nodes_of(began.tensors) if not is_leaf(node)]
    where = dict(zip(nodes, lines.of(nodes), strict=True))
    variables = _values_in(began)
    for node in nodes:
        if node in variables and not _is_finite(variables[node]):
            count = int((~torch.isfinite(variables[node])).sum())
            are = "is" if count == 1 else "are"
            detail = f"{count} of its results {are} not finite: the loss hides this, but its gradient does not"
            return _found(node, where[node], detail, certain=plain_name(node.name()) in _DANGEROUS) | {
                "where": "backward"
            }
    steep = [node for node in nodes if plain_name(node.name()) in _STEEP]
    if not steep:
        return None
    explaining = _explaining(began.tensors, steep)
    suspects = explaining or steep
    others = dict.fromkeys(_named(node, where[node]) for node in suspects[:-1])
    others.pop(_named(suspects[-1], where[suspects[-1]]), None)
    detail = (
        "the loss is finite, and of its gradients just those that this backward leads to are not"
        if explaining
        else "the loss is finite and its gradients are not, and this operation before it can produce non-finite gradients"
    ) + (f"; so can {', '.join(others)}" if others else "")
    return _found(suspects[-1], where[suspects[-1]], detail, certain=False) | {"where": "backward"}


def _explaining(losses: Iterable[Tensor], suspects: Sequence[Node]) -> list[Node]:
    """Return those of some operations from which the backward pass goes on to just those gradients that are not finite."""
    known = bad = leaves = 0
    reached: dict[Node, int] = {}
    for node in by_need(loss.grad_fn for loss in losses if loss.grad_fn is not None):
        if is_leaf(node):
            reached[node] = 1 << leaves
            leaves += 1
            grad = cast("Any", node).variable.grad
            if grad is not None and grad.layout is torch.strided and has_memory(own_part(grad)):
                known |= reached[node]
                bad |= 0 if _is_finite(own_part(grad)) else reached[node]
        else:
            reached[node] = 0
            for before, _ in node.next_functions:
                reached[node] |= reached.get(before, 0) if before is not None else 0
    return [node for node in suspects if reached[node] & known == bad]


def _named(node: Node, line: Mapping[str, Any] | None) -> str:
    """Return the name of an operation, with its line if that is known."""
    name = plain_name(node.name())
    return f"{name} at {line['file']}:{line['line']}" if line else name


def _is_dangerous(node: Node) -> bool:
    """Whether an operation can make non-finite values of numbers of usual size."""
    exponent = number_in(node, "exponent")
    whole = isinstance(exponent, (int, float)) and exponent >= 0 and exponent == int(exponent)
    return plain_name(node.name()) in _DANGEROUS and not whole


def _entered(node: Node, line: Mapping[str, Any] | None, value: Tensor) -> dict[str, Any]:
    """Return the finding that a value was non-finite already when the first operation took it."""
    bad = int((~torch.isfinite(value)).sum())
    detail = f"{bad} of {value.numel()} elements were not finite when {plain_name(node.name())} received them"
    return {**_found(node, line, detail, certain=True), "where": "input"}


def _found(node: Node, line: Mapping[str, Any] | None, detail: str, *, certain: bool) -> dict[str, Any]:
    return {
        "operation": plain_name(node.name()), "node": node.name(), "module": None, "where": "forward",
        **(line or {"file": None, "line": None, "text": None}), "detail": detail, "certain": certain,
    }  # fmt: skip


def _values_in(began: BackwardStart) -> dict[Node, Tensor]:
    """Return the values of the program's variables where it called backward, by the nodes that made them."""
    found: dict[Node, Tensor] = {}
    frame = began.frame
    while frame is not None:
        if not is_between(frame.f_code.co_filename):
            for value in list(frame.f_locals.values()):
                for each in value if isinstance(value, (tuple, list)) else (value,):
                    plain = type(each) is Tensor and each.layout is torch.strided and each.is_floating_point()
                    if plain and each.grad_fn is not None and has_memory(each):
                        found[each.grad_fn] = each.detach()
        frame = frame.f_back
    return found


def _values_of(node: Node, variables: Mapping[Node, Tensor]) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the known inputs and results of an operation."""
    saved = _saved(node)
    inputs = {name: t for name, t in saved.items() if name not in _RESULTS}
    results = [t for name, t in saved.items() if name in _RESULTS]
    if node in variables:
        results.append(variables[node])
    for name, (before, _) in zip(_OPERANDS, node.next_functions, strict=False):
        if before is not None and before in variables:
            inputs.setdefault(name, variables[before])
    return inputs, results


def _saved(node: Node) -> dict[str, Tensor]:
    """Return the tensors that a node saved; those packed by the program's own hooks are skipped."""
    found = {}
    for name, saved in saved_by(node):
        value = getattr(saved, "data", None)
        if isinstance(value, Tensor) and value.is_floating_point() and value.layout is torch.strided:
            own = own_part(value.detach())
            if has_memory(own):
                found[name] = own
    return found


def _is_finite(value: Tensor) -> bool:
    return not value.numel() or bool(torch.isfinite(value).all())


def _danger(node: Node, inputs: dict[str, Tensor]) -> str | None:
    """Describe the inputs of an operation that make its result non-finite though they are finite; None if none do."""
    name = plain_name(node.name())
    own = inputs.get("self")
    if name in ("log", "log2", "log10", "log1p", "rsqrt", "reciprocal") and own is not None:
        at = -1 if name == "log1p" else 0
        zeros, below = int((own == at).sum()), int((own < at).sum())
        if zeros or (below and name != "reciprocal"):
            at_the_edge = counted(zeros, "zero") if at == 0 else f"{counted(zeros, 'element')} equal to {at}"
            beyond = counted(below, "negative element" if at == 0 else "smaller element")
            return f"its input has {' and '.join([at_the_edge] * bool(zeros) + [beyond] * bool(below))}"
    if name == "div" and "other" in inputs and bool((inputs["other"] == 0).any()):
        return f"its divisor has {counted(int((inputs['other'] == 0).sum()), 'zero')}"
    if name == "sqrt" and own is not None and bool((own < 0).any()):
        return f"its input has {counted(int((own < 0).sum()), 'negative element')}"
    if name in ("acos", "asin", "atanh") and own is not None and bool((own.abs() > 1).any()):
        return f"its input has {counted(int((own.abs() > 1).sum()), 'element')} outside [-1, 1]"
    if name == "pow" and own is not None and bool((own <= 0).any()):
        exponent = number_in(node, "exponent")
        if isinstance(exponent, (int, float)) and (exponent < 0 or exponent != int(exponent)):
            return f"its base has {counted(int((own <= 0).sum()), 'element')} at or below zero"
    return None
