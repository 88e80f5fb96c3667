"""Finds the operation that made a non-finite loss, from its graph while that exists.

# Note [Reading the graph]
When the first gradient arrives, the nodes between the loss and that parameter have run and freed
their saved tensors; the others still hold them: inputs of some operations, results of others.
Values of the program's own variables, where it called backward, are known too. A node with finite
inputs and a non-finite result made the first such value. For nodes that have run, dangerous inputs
show it: a logarithm of zero, a division by zero. If no value shows it, no operation is accused:
those that lie between finite values and the loss are listed in the order of the forward, without
such as only pass numbers on. An operation behind a value that is known to be finite, such as the
model's output, lies before the place; one that takes a value that is not finite lies behind it.

# Note [Gradients as witnesses]
If the loss is finite and gradients are not, all nodes have run and freed what they held; what is
left are the gradients. The gradient of a weight is a sum of products of the layer's input and the
gradient that arrives there, and that of a bias is a sum of the latter. So if a weight's is finite,
the layer's input was, and so were the results before it that would have shown in it. If the bias'
is finite and the weight's is not, the layer took a value that was not finite, and a mask behind it
hides that from the loss: then no slope made it, but an operation before that layer. Otherwise a
slope did, of an operation that leads to all gradients that are not finite, and to none that is
finite unless something on the way may have stopped it. Without one of which all this is so, no
operation is named, and none is called probable that only might be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node

from kedge.frames import SourceLine, is_between
from kedge.short_text import is_or_are
from kedge.sites.leaves import has_memory, own_part
from kedge.sites.operation_names import plain_name
from kedge.store.events import PossibleProducer, ProducerEvent
from kedge.torch_internals.autograd_nodes import (
    behind,
    by_need,
    in_order,
    is_leaf,
    saved_by,
)
from kedge.watch.models.backward_start import BackwardStart
from kedge.watch.records.operation_lines import ProducerLines, nodes_of
from kedge.watch.records.operation_numbers import (
    CARRIES,
    FINITE_OF_FINITE,
    LARGE,
    LAYERS,
    MOVES,
    SHOWS,
    STEEP,
    danger_in,
    is_finite,
    is_gentle,
    largest_magnitude,
    only_overflows,
    operand,
    shown_by_infinities,
)

_RESULTS = ("result", "output")
_OPERANDS = ("self", "other")
_PLACES = {"self": 0, "other": 1, "mat2": 1, "input": 0, "vec": 1}
"""The place of a saved input among the operands of its operation."""
_PLACES_OF_ADDMM = {"mat1": 1, "mat2": 2}
_MOST_AMONG = 8
"""Most operations that are listed as possible."""


def find_producer(began: BackwardStart, lines: ProducerLines) -> ProducerEvent | None:
    """Find the operation that made the first non-finite value; see Note [Reading the graph].

    Returns:
        The event, whose step and loss the caller knows; None if no operation is found.
    """
    every = nodes_of(began.tensors)
    params = [cast("Any", node).variable for node in every if is_leaf(node)]
    leaves = [own_part(param.detach()) for param in params]
    if any(has_memory(leaf) and not is_finite(leaf) for leaf in leaves):
        # The parameters are non-finite already: an earlier step made the first value.
        return None

    nodes = [node for node in every if not is_leaf(node)]
    where = dict(zip(nodes, lines.of(nodes), strict=True))
    known = _KnownValues(nodes, _values_in(began))
    computed = False
    candidates = []
    for node in nodes:
        inputs = known.inputs(node)
        spoiled = [name for name, value in inputs.items() if not is_finite(value)]
        outside = [name for name in spoiled if not computed or _has_no_maker(node, name)]
        if outside and node not in known.sound:
            return _entered(node, where[node], inputs[outside[0]])

        name = plain_name(node.name())
        computed |= name not in MOVES
        explained = node in known.sound or node in known.spoiled
        if spoiled or explained or name in FINITE_OF_FINITE:
            continue

        danger = danger_in(node, inputs)
        if danger is not None:
            return _found(node, where[node], danger, certain=True)
        if node in known.bad and known.has_all_inputs(node):
            detail = "its inputs are finite and its result is not"
            return _found(node, where[node], detail, certain=True)
        shown = shown_by_infinities(node, known.result(node))
        if shown is not None:
            return _found(node, where[node], shown, certain=True)
        candidates.append(node)

    # Sums and products make such a value only of numbers that are far too large; then the run
    # had diverged before.
    suspects = [n for n in candidates if not only_overflows(n, known.inputs(n))]
    if not suspects:
        return None
    if max(map(largest_magnitude, (*leaves, *known.values())), default=0.0) > LARGE:
        suspects = candidates
    if len(suspects) == 1:
        only = suspects[0]
        detail = (
            "of the operations between finite values and the loss it is the only one that "
            "can make it of usual numbers"
        )
        return _found(only, where[only], detail, certain=False)
    return _one_of(suspects, where, "forward", "")


def find_able(losses: Sequence[Tensor], lines: ProducerLines) -> ProducerEvent | None:
    """Return the operations behind a loss that can make a NaN or an infinity of usual numbers.

    No value is read: it would have to be waited for, as those on devices.
    """
    nodes = [node for node in nodes_of(losses) if not is_leaf(node)]
    where = dict(zip(nodes, lines.of(nodes), strict=True))
    risky = (node for node in nodes if plain_name(node.name()) not in FINITE_OF_FINITE)
    able = [node for node in risky if not only_overflows(node, {})]
    return _one_of(able, where, "unseen", "")


class _KnownValues:
    """What is known of the values in the graph of a loss.

    It comes from variables of the program, and from what nodes still hold.

    Attributes:
        bad: The nodes whose result is known and is not finite.
        sound: The nodes whose result is finite, or that lie before one: a NaN made there would show
            in it.
        spoiled: The nodes that take a result that is not finite, or one that such a node made.
    """

    def __init__(self, nodes: Sequence[Node], variables: Mapping[Node, Tensor]) -> None:
        self._results = {node: [value] for node, value in variables.items()}
        self._inputs: dict[Node, dict[str, Tensor]] = {}
        for node in nodes:
            inputs = self._inputs[node] = {}
            for name, value in _saved(node).items():
                if name in _RESULTS:
                    self._results.setdefault(node, []).append(value)
                else:
                    inputs[name] = value
                    before = _maker(node, name)
                    if before is not None:
                        self._results.setdefault(before, []).append(value)

        finite = {n for n, values in self._results.items() if all(map(is_finite, values))}
        self.bad = self._results.keys() - finite
        self.sound = set(behind(finite)) - self.bad
        self.spoiled: set[Node] = set()
        for node in nodes:
            taken = {before for before, _ in node.next_functions if before is not None}
            if taken & (self.bad | self.spoiled):
                self.spoiled.add(node)

    def result(self, node: Node) -> Tensor | None:
        """Return the result of an operation, as far as it is known."""
        if node not in self._results:
            return None
        return self._results[node][0]

    def values(self) -> Iterator[Tensor]:
        """Yield the known results."""
        for values in self._results.values():
            yield from values

    def inputs(self, node: Node) -> dict[str, Tensor]:
        """Return the known inputs of an operation by name."""
        found = dict(self._inputs[node])
        for name, (before, _) in zip(_OPERANDS, node.next_functions, strict=False):
            if before is not None and before in self._results:
                found.setdefault(name, self._results[before][0])
        return found

    def has_all_inputs(self, node: Node) -> bool:
        """Whether every differentiable input of an operation is known.

        Parameters are, as all of them are finite.
        """
        before = {made for made, _ in node.next_functions if made is not None}
        makers = {made for made in before if not is_leaf(made)}
        return bool(self._inputs[node] or makers) and makers <= self._results.keys()


def _maker(node: Node, name: str) -> Node | None:
    """Return the node that made a saved input; None if that is not known by its name."""
    places = _PLACES
    if plain_name(node.name()) == "addmm":
        places = _PLACES_OF_ADDMM
    if name not in places:
        return None
    before = operand(node, places[name])
    if before is None or is_leaf(before):
        return None
    return before


def _has_no_maker(node: Node, name: str) -> bool:
    """Whether a saved input was made by no operation of the graph.

    So it is a constant, or something of the batch.
    """
    at = _PLACES.get(name)
    if at is None:
        return name == "target"
    return at < len(node.next_functions) and node.next_functions[at][0] is None


def _place(node: Node, line: SourceLine | None) -> PossibleProducer:
    possible = PossibleProducer(operation=plain_name(node.name()), node=node.name())
    if line is None:
        return possible
    return replace(possible, file=line.file, line=line.line)


def find_behind_gradients(began: BackwardStart, lines: ProducerLines) -> ProducerEvent | None:
    """Find the operation behind bad gradients of a finite loss; see Note [Gradients as witnesses].

    A variable of the program may hold an infinity that the loss does not show, such as a logarithm
    of zero for a class other than the label's.
    """
    every = nodes_of(began.tensors)
    nodes = [node for node in every if not is_leaf(node)]
    where = dict(zip(nodes, lines.of(nodes), strict=True))
    variables = _values_in(began)
    finite = {node for node, value in variables.items() if is_finite(value)}
    bad = next((n for n in nodes if n in variables and n not in finite), None)
    gradients = _Gradients(every, finite)
    if bad is not None:
        count = int((~torch.isfinite(variables[bad])).sum())
        are = is_or_are(count)
        hidden = f"{are} not finite: the loss hides this, but its gradient does not"
        shown = shown_by_infinities(bad, variables[bad])
        if shown is not None:
            detail = f"{shown}; the loss hides this, but its gradient does not"
            return _one_of([bad], where, "hidden", detail, certain=True)
        if gradients.has_sound_inputs(bad):
            detail = f"{count} of its results {hidden}"
            return _one_of([bad], where, "hidden", detail, certain=True)
        detail = f"{count} of the results of {_named(bad, where[bad])} {hidden}"
        return _one_of(gradients.suspects_behind(bad), where, "hidden", detail)

    if gradients.hidden is not None:
        layer, taken = gradients.hidden
        detail = (
            f"{_named(layer, where[layer])} took a value that was not finite, as the "
            "gradient of its bias is finite and that of its weight is not; the loss hides it"
        )
        return _one_of(gradients.suspects_behind(taken), where, "hidden", detail)

    steep = [node for node in nodes if plain_name(node.name()) in STEEP]
    suspects = [node for node in steep if not is_gentle(node, gradients.sound)]
    exact, possible = gradients.explained_by(began.tensors, suspects)
    if len(exact) == 1:
        detail = (
            "the loss is finite, and of its gradients just those that this backward "
            "leads to are not"
        )
        return _found(exact[0], where[exact[0]], detail, "backward", certain=False)
    return _one_of(exact or possible, where, "backward", "")


def _one_of(
    suspects: Sequence[Node],
    where: Mapping[Node, SourceLine | None],
    kind: str,
    detail: str,
    *,
    certain: bool = False,
) -> ProducerEvent | None:
    """Return the finding that one of some operations made it; None without any.

    They are given in the order of the forward.
    """
    if not suspects:
        return None
    found = _found(suspects[0], where[suspects[0]], detail, kind, certain=certain)
    if kind == "hidden" and len(suspects) == 1:
        return found
    among = [_place(node, where[node]) for node in suspects]
    return replace(found, among=tuple(among[-_MOST_AMONG:]), of=len(among))


class _Gradients:
    """What the gradients of a graph's leaves show after the pass; see Note [Gradients as witnesses].

    Args:
        nodes: Every node, in the order of the forward.
        known: Those whose result is a variable of the program and is finite.

    Attributes:
        finite: Whether the gradient of each leaf is finite, where it is known.
        sound: The nodes whose result was finite.
        hidden: The first layer that took a value that was not finite while the gradient that
            arrived there was, with the node that made its input; None if there is no such layer.
    """

    def __init__(self, nodes: Sequence[Node], known: Iterable[Node]) -> None:
        self.finite: dict[Node, bool] = {}
        taken: dict[Node, int] = {}
        for node in nodes:
            for before, _ in node.next_functions:
                if before is not None:
                    taken[before] = taken.get(before, 0) + 1
            if is_leaf(node):
                grad = cast("Any", node).variable.grad
                if grad is not None and grad.layout is torch.strided:
                    own = own_part(grad)
                    if has_memory(own):
                        self.finite[node] = is_finite(own)

        self.hidden: tuple[Node, Node] | None = None
        finite_inputs = []
        for node in nodes:
            places = LAYERS.get(plain_name(node.name()))
            if places is None or max(places) >= len(node.next_functions):
                continue
            before, weight, bias = (node.next_functions[at][0] for at in places)
            weight = _moved(weight)
            if before is None or weight is None or is_leaf(before):
                continue
            if self.finite.get(weight):
                finite_inputs.append(before)
            elif weight in self.finite and taken[weight] == 1 and self._is_usual(_moved(bias)):
                self.hidden = self.hidden or (node, before)
        self.sound = set(_showing([*known, *finite_inputs]))

    def _is_usual(self, leaf: Node | None) -> bool:
        """Whether a leaf's gradient is finite, and of usual size.

        Then no product with it overflows but one of vast numbers.
        """
        if leaf is None or not self.finite.get(leaf):
            return False
        return largest_magnitude(own_part(cast("Any", leaf).variable.grad)) < LARGE**2

    def has_sound_inputs(self, node: Node) -> bool:
        """Whether all that an operation took is known to be finite; parameters are."""
        return all(
            before is None or is_leaf(before) or before in self.sound
            for before, _ in node.next_functions
        )

    def suspects_behind(self, node: Node) -> list[Node]:
        """Return the operations that can have made a result that is not finite.

        They are in the order of the forward.
        """
        found = in_order(each for each in behind([node]) if not is_leaf(each))
        of_softmax = {
            _moved(operand(each, 0))
            for each in found
            if plain_name(each.name()) in ("softmax", "log_softmax")
        }
        suspects = []
        for each in found:
            name = plain_name(each.name())
            masks_softmax = name == "masked_fill" and each in of_softmax
            if each in self.sound or name in FINITE_OF_FINITE or masks_softmax:
                continue
            if not only_overflows(each, {}):
                suspects.append(each)
        return suspects

    def explained_by(
        self, losses: Iterable[Tensor], suspects: Sequence[Node]
    ) -> tuple[list[Node], list[Node]]:
        """Return the operations that lead to just the bad gradients, and those that may have.

        A backward that leads to others, too, may have made a value that is stopped on its way to
        those. Sets of leaves are written as the bits of a number, since every node has one.
        """
        known = bad = leaves = 0
        reached: dict[Node | None, int] = {}
        surely: dict[Node | None, int] = {}
        roots = [loss.grad_fn for loss in losses if loss.grad_fn is not None]
        for node in by_need(roots):
            if is_leaf(node):
                leaf = 1 << leaves
                leaves += 1
                reached[node] = surely[node] = leaf
                if node in self.finite:
                    known |= leaf
                    if not self.finite[node]:
                        bad |= leaf
            else:
                reached[node] = surely[node] = 0
                carries = plain_name(node.name()) in CARRIES
                for before, _ in node.next_functions:
                    reached[node] |= reached.get(before, 0)
                    if carries:
                        surely[node] |= surely.get(before, 0)

        exact = [node for node in suspects if reached[node] & known == bad]
        possible = []
        for node in suspects:
            finite = known & ~bad & surely.get(operand(node, 0), 0)
            if reached[node] & bad == bad and not finite:
                possible.append(node)
        return exact, possible


def _moved(node: Node | None) -> Node | None:
    """Return the node whose result an operand is, without operations that only move numbers."""
    while node is not None and not is_leaf(node) and plain_name(node.name()) in MOVES:
        node = node.next_functions[0][0]
    return node


def _showing(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yield some nodes, and those behind them whose results would show there if not finite."""
    stack = list(nodes)
    met = set(stack)
    while stack:
        node = stack.pop()
        yield node
        name = plain_name(node.name())
        if name not in SHOWS:
            continue
        taken = node.next_functions
        if name == "div":
            taken = taken[:1]
        new = {before for before, _ in taken if before is not None} - met
        met |= new
        stack += new


def _named(node: Node, line: SourceLine | None) -> str:
    """Return the name of an operation, with its line if that is known."""
    name = plain_name(node.name())
    if line is None:
        return name
    return f"{name} at {line}"


def _entered(node: Node, line: SourceLine | None, value: Tensor) -> ProducerEvent:
    """Return the finding that a value was non-finite already when the first operation took it."""
    bad = int((~torch.isfinite(value)).sum())
    name = plain_name(node.name())
    detail = f"{bad} of {value.numel()} elements were not finite when {name} received them"
    return _found(node, line, detail, "input", certain=True)


def _found(
    node: Node,
    line: SourceLine | None,
    detail: str,
    where: str = "forward",
    *,
    certain: bool,
) -> ProducerEvent:
    found = ProducerEvent(
        step=0,
        operation=plain_name(node.name()),
        node=node.name(),
        where=where,
        detail=detail,
        certain=certain,
    )
    if line is None:
        return found
    return replace(found, file=line.file, line=line.line, text=line.text)


def _values_in(began: BackwardStart) -> dict[Node, Tensor]:
    """Return the values of the program's variables where it called backward, by their nodes."""
    found: dict[Node, Tensor] = {}
    for value in _variables_of(began.frame):
        is_plain = type(value) is Tensor and value.layout is torch.strided
        if not is_plain or not value.is_floating_point():
            continue
        if value.grad_fn is not None and has_memory(value):
            found[value.grad_fn] = value.detach()
    return found


def _variables_of(frame: FrameType | None) -> Iterator[Any]:
    """Yield the values of the program's variables in a frame and in its callers.

    Of a tuple or a list, the elements are yielded.
    """
    while frame is not None:
        if not is_between(frame.f_code.co_filename):
            for value in list(frame.f_locals.values()):
                if isinstance(value, (tuple, list)):
                    yield from value
                else:
                    yield value
        frame = frame.f_back


def _saved(node: Node) -> dict[str, Tensor]:
    """Return the tensors that a node saved; those packed by the program's own hooks are skipped."""
    found = {}
    for name, saved in saved_by(node):
        value = getattr(saved, "data", None)
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            continue
        if not value.is_floating_point():
            continue
        own = own_part(value.detach())
        if has_memory(own):
            found[name] = own
    return found
