"""The operation from which two runs differ, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from kedge.compare.comparison import Parting
from kedge.compare.operations.departure import DepartingOperations, TwoSteps, departure
from kedge.compare.operations.gradients import parting_node
from kedge.compare.operations.seen import SeenOperation, SeenValue
from kedge.compare.wording import text_of_shape
from kedge.short_text import counted

How = Literal[
    "operation",  # it computes something else, or is in one run alone
    "argument",  # the same line computes something else as it gets another argument
    "value",  # it is given another of the values that both have
    "random",  # it draws other random numbers
    "graph",  # its result is the same, and its place in the autograd graph is not
    "outside",  # what differs was made by no operation
    "backward",  # the forward is the same
    "not-repeated",  # a second run is another run: nothing is said
    "not-seen",  # nothing can be said
]

#: The most operations of one side that are named.
NAMED = 3


@dataclass(frozen=True)
class ArgumentDifference:
    """An argument of an operation that differs, as text; None if it is not given."""

    name: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        return f"{_shown_name(self.name)} is {_given(self.a)} in A, {_given(self.b)} in B"


@dataclass(frozen=True)
class OperationFinding:
    """What second runs of the step say of a difference.

    Attributes:
        how: One word for programs.
        headline: The operation, in a few words, or why there is none.
        evidence: What was seen.
        a: The operations in A: the one that differs, and those after it that only A has.
        b: Those in B.
        arguments: The arguments that differ.
        written: Files that the second runs have written.
    """

    how: How
    headline: str
    evidence: str
    a: tuple[SeenOperation, ...] = ()
    b: tuple[SeenOperation, ...] = ()
    arguments: tuple[ArgumentDifference, ...] = ()
    written: tuple[str, ...] = ()


def finding_of(
    first: Parting, a: Sequence[SeenOperation], b: Sequence[SeenOperation]
) -> OperationFinding:
    """Return the operation that parts two runs, given all those of the step.

    Args:
        first: The first difference of the second runs: an input or output of a module, a loss or a
            gradient.
        a: The operations and boundaries in A.
        b: Those in B.
    """
    two = TwoSteps(a, b)
    same = first.same
    event = same.kind if same.kind in ("in", "out") else "backward"
    path_a, path_b = (same.a.path, same.b.path) if event != "backward" else ("", "")
    boundaries = list(two.boundaries(event, path_a, path_b))
    if not boundaries:
        return OperationFinding(
            "not-seen",
            f"{same.text} was not seen in the second runs",
            "compiled code, other threads and torch.autograd.backward show no operation",
        )
    for one, other in boundaries:
        if two.differ(one, other):
            return _at(two, one, other, same.text)
    if event != "backward":
        return OperationFinding(
            "not-seen", f"{same.text} is equal in the second runs", "they differ elsewhere"
        )
    return _in_graph(two, boundaries[-1])


def _at(two: TwoSteps, a: int, b: int, text: str) -> OperationFinding:
    """Return the operation from which the tensors at a boundary differ."""
    found = departure(two, a, b)
    if found is not None and found.is_pair:
        return _pair(two, found)
    if found is not None:
        return _alone(two, found)

    ways = (two.ways_a(a), two.ways_b(b))
    if ways[0].drawing is not None or ways[1].drawing is not None:
        return _drawing(two, ways[0].drawing, ways[1].drawing)
    shared = two.b.digests.issuperset(two.a.operations[a].taken)
    if shared and two.a.digests.issuperset(two.b.operations[b].taken):
        return _given_others(two, a, b, text)
    return _outside(two, ways[0].entering, ways[1].entering, text)


# -- one operation of both --------------------------------------------------------------------


def _pair(two: TwoSteps, found: DepartingOperations) -> OperationFinding:
    assert found.a is not None and found.b is not None  # noqa: PT018, S101 - it is a pair
    one, other = two.a.operations[found.a], two.b.operations[found.b]
    if one.given != other.given:
        return _given_others(two, found.a, found.b, told_place(one))
    if one.random != other.random:
        return _drawing(two, found.a, found.b)
    arguments = tuple(_differing(one, other))
    evidence = f"it gets equal inputs in both, and {_results(one, other)}"
    if not arguments:
        headline = f"{told_place(one)} computes something else"
        if one.text == other.text:
            headline += " in the same line"
            evidence += (
                "; no argument differs: a setting of PyTorch such as autocast, another number of "
                "threads, or a kernel that is not deterministic can be the reason"
            )
        return _finding(two, "operation", headline, evidence, found)
    headline = f"{told_place(one)} gets other arguments: {', '.join(map(str, arguments))}"
    if one.text != other.text:
        return _finding(two, "operation", headline, evidence, found, arguments)
    evidence += "; its line is the same in both: compare what computes the argument"
    return _finding(two, "argument", headline, evidence, found, arguments)


def _differing(one: SeenOperation, other: SeenOperation) -> Iterator[ArgumentDifference]:
    for name in {**one.arguments, **other.arguments}:
        mine, theirs = one.arguments.get(name), other.arguments.get(name)
        if mine != theirs:
            yield ArgumentDifference(name, mine, theirs)


def _results(one: SeenOperation, other: SeenOperation) -> str:
    """Return in what the results of two operations differ."""
    for mine, theirs in zip(one.outputs, other.outputs, strict=False):
        if mine.digest == theirs.digest:
            continue
        if mine.shape != theirs.shape:
            return (
                f"returns {text_of_shape(mine.shape)} in A and {text_of_shape(theirs.shape)} in B"
            )
        if mine.dtype != theirs.dtype:
            return f"returns {mine.dtype} in A and {theirs.dtype} in B"
    return "its result is not equal"


def _given_others(two: TwoSteps, a: int, b: int, text: str) -> OperationFinding:
    """Return that an operation, or a module, gets others of the values that both runs have."""
    one, other = two.a.operations[a], two.b.operations[b]
    pairs = zip(one.inputs, other.inputs, strict=False)
    unlike = next(((mine, theirs) for mine, theirs in pairs if mine.digest != theirs.digest), None)
    told = "another number of tensors"
    if unlike is not None:
        mine, theirs = unlike
        told = f"{_origin(two, a, mine)} in A and {_origin(two, b, theirs, of_b=True)} in B"
    return OperationFinding(
        "value",
        f"{text} is given other values: {told}",
        "both runs have both of these values",
        (one,),
        (other,),
    )


def _origin(two: TwoSteps, place: int, value: SeenValue, *, of_b: bool = False) -> str:
    step = two.b if of_b else two.a
    maker = step.maker(value.digest, place)
    if maker is None:
        return "a value that no operation made"
    return f"the result of {told_place(step.operations[maker])}"


# -- operations of one run alone -----------------------------------------------------------------


def _alone(two: TwoSteps, found: DepartingOperations) -> OperationFinding:
    """Return that an operation is in one run alone, or one in either."""
    one = None if found.a is None else two.a.operations[found.a]
    other = None if found.b is None else two.b.operations[found.b]
    only_a = one is not None and found.a not in two.pairs
    only_b = other is not None and found.b not in two.backwards
    evidence = "what it gets is in both runs, its result is not"
    if one is not None and other is not None and only_a and only_b:
        headline = f"A computes {told_place(one)} where B computes {told_place(other)}"
        evidence = "what they get is in both runs, their results are not"
    elif one is not None and only_a:
        headline = f"only A computes {told_place(one)}"
        if other is not None:
            evidence += f"; the first in B whose result A has not is {told_place(other)}"
    else:
        assert other is not None  # noqa: S101 - one of both is in one run alone
        headline = f"only B computes {told_place(other)}"
        if one is not None:
            evidence += f"; the first in A whose result B has not is {told_place(one)}"
    return _finding(two, "operation", headline, evidence, found)


def _finding(
    two: TwoSteps,
    how: How,
    headline: str,
    evidence: str,
    found: DepartingOperations,
    arguments: tuple[ArgumentDifference, ...] = (),
) -> OperationFinding:
    a: tuple[SeenOperation, ...] = ()
    b: tuple[SeenOperation, ...] = ()
    if found.a is not None:
        a = _own(two.a.operations, found.a, two.pairs)
    if found.b is not None:
        b = _own(two.b.operations, found.b, two.backwards)
    return OperationFinding(how, headline, evidence, a, b, arguments)


def _own(
    operations: Sequence[SeenOperation], place: int, paired: dict[int, int]
) -> tuple[SeenOperation, ...]:
    """Return an operation, and the next ones that only this run has if it has none in the other."""
    if place in paired:
        return (operations[place],)
    alone = takewhile(lambda each: each not in paired, range(place, len(operations)))
    own = [operations[each] for each in alone]
    return tuple(each for each in own if each.event == "operation")[:NAMED]


# -- values that no operation made -----------------------------------------------------------------


def _drawing(two: TwoSteps, a: int | None, b: int | None) -> OperationFinding:
    ones = () if a is None else (two.a.operations[a],)
    others = () if b is None else (two.b.operations[b],)
    operation = (*ones, *others)[0]
    evidence = "the random generator has another state before it"
    draws = [[each for each in step.operations if each.random] for step in (two.a, two.b)]
    last = None
    for one, other in zip(*draws, strict=False):
        if one.random != other.random:
            break
        last = one, other
    if last is None:
        evidence += ", from the beginning of the step on: use the same seed in both"
    else:
        one, other = last
        evidence += f"; the last that draws from the same is {told_place(one)} in A"
        evidence += f", {told_place(other)} in B: one run draws more, or seeds again"
    headline = f"{told_place(operation)} draws other random numbers"
    return OperationFinding("random", headline, evidence, ones, others)


def _outside(two: TwoSteps, a: int | None, b: int | None, text: str) -> OperationFinding:
    ones = () if a is None else (two.a.operations[a],)
    others = () if b is None else (two.b.operations[b],)
    headline = f"none: what differs in {text} was made by no operation"
    evidence = (
        "seen were this step and the one before: "
        "it may be data, what was made earlier, or code without PyTorch"
    )
    if ones or others:
        evidence += f"; {told_place((*ones, *others)[0])} takes it in"
    return OperationFinding("outside", headline, evidence, ones, others)


# -- the backward pass ------------------------------------------------------------------------


def _in_graph(two: TwoSteps, boundary: tuple[int, int]) -> OperationFinding:
    many = counted(sum(each.event == "operation" for each in two.a.operations), "operation")
    found = parting_node(two, *boundary)
    if found is None:
        return OperationFinding(
            "backward",
            "no operation of the forward differs",
            f"{many} of A and what they leave in the autograd graph are as in B; the backward pass "
            "itself is not looked at: compare hooks on gradients and backward functions",
        )
    nodes = f"{_node(found.node_a)} in A, {_node(found.node_b)} in B"
    ones = tuple(two.a.operations[each] for each in found.a)
    others = tuple(two.b.operations[each] for each in found.b)
    return OperationFinding(
        "graph",
        f"another path of the gradients from {told_place(found.operation)} on: {nodes}",
        "the values of the forward are equal; that the gradients differ for this reason is inferred",
        ones,
        others,
    )


def _node(name: str) -> str:
    if not name:
        return "no gradient"
    if name == "leaf":
        return "a leaf that needs one"
    return name


# -- words --------------------------------------------------------------------------------------


def told_place(operation: SeenOperation) -> str:
    """Return an operation with its line: ``gelu at model.py:41``."""
    name = operation.name or operation.module or "the model"
    if not operation.place:
        return name
    return f"{name} at {operation.place}"


def _shown_name(name: str) -> str:
    if name.isdigit():
        return f"argument {name}"
    return name


def _given(text: str | None) -> str:
    if text is None:
        return "not given"
    return text
