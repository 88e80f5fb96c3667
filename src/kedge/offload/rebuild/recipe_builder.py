"""From a node of the graph to an expression over what is saved.

# Note [What a recipe may hold]
A node of the graph holds what it saved, so whatever autograd saved must not hold a node: it would
never be freed. Rules read a node and keep only handles, numbers and small copies.

# Note [How deep]
What is rebuilt may itself be made from what is rebuilt: a residual stream goes through the whole
network, and its last block would be made from all the others. So the depth of what a node's output
is rebuilt from is written down at that node, as a number, and ends at `DEEPEST`; what comes next is kept.

# Note [Parameters that do not last]
Under FSDP a parameter's memory is given back after the forward of its group of modules, and filled again just before
their backward; its version does not tell. What another group saved is needed earlier than that. So there, nothing is made
from a parameter, nor from what may be one, but from copies of small ones. Who asks says so: ``handle_of.lasting`` is False.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

from torch import Tensor

from kedge.offload.held.handle import Handle
from kedge.offload.rebuild.recipe import Cost, HandleOf, Term
from kedge.torch_internals.autograd_nodes import raw
from kedge.torch_internals.tensors import changes

DEEPEST = 3
"""How often what is rebuilt may be made from what is rebuilt."""

WIDEST = 6
"""How many operations one recipe may replay."""

SMALL = 1 << 16
"""Up to how many bytes a parameter that is not saved is copied."""

_DEPTH = "kedge.depth"

Edge = tuple[Any, int]


class RebuildRule(ABC):
    """How the output of a kind of node is made again.

    Attributes:
        name: What the account calls it.
        nodes: The type names of the nodes that it knows.
        cost: What it costs to run.
        result: Under which name the node saves its own output, if it does. What is saved there is as the
            operation left it, however often it was changed in place before.
    """

    __slots__ = ()
    name: str
    nodes: tuple[str, ...]
    cost: Cost = "elementwise"
    result: str | None = None

    @abstractmethod
    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return how the node's first output is made; None if that is not known."""


class RecipeBuilder:
    """What a rule finds the parts of its term with.

    Attributes:
        whole: The tensor that is to be rebuilt, while the rule that is asked is the outermost; else None.
        inputs: The handles found so far.
        nbytes: What had to be copied so far.
        extra: What has to be stored; the term gets it as the last input.
        depth: How deep what has been found so far is.
        replayed: How many operations besides the outermost have been found so far.
    """

    __slots__ = (
        "_device",
        "_handle_of",
        "_lasting",
        "_rules",
        "depth",
        "extra",
        "inputs",
        "nbytes",
        "replayed",
        "whole",
    )

    def __init__(self, rules: Mapping[str, RebuildRule], handle_of: HandleOf, whole: Tensor) -> None:
        self._rules, self._handle_of = rules, handle_of
        self._lasting: bool = getattr(handle_of, "lasting", True)
        self._device = whole.device
        self.whole: Tensor | None = whole
        self.inputs: list[Handle] = []
        self.extra: Tensor | None = None
        self.nbytes = self.depth = self.replayed = 0

    def saved(self, node: Any, field: str, edge: int | None = None) -> Term | None:
        """Return what the node saved under a name; ``edge`` is by which of its edges it came in."""
        came = None if edge is None else node.next_functions[edge][0]
        if edge is not None and not self._lasting and _may_be_parameter(came):
            return self.copied(node, field)
        return self._leaf(self._handle_of(raw(node, field)), came)

    def behind(self, edge: Edge) -> Term | None:
        """Return what an operation got along an edge: a parameter, what its maker saved, or what can be made again."""
        node, output = edge
        if node is None or output:
            return None
        rule = self._rules.get(type(node).__name__)
        if rule is None:
            return self.parameter(edge)
        if rule.result is not None:
            return self._leaf(self._handle_of(raw(node, rule.result)), node)
        self.whole = None
        self.replayed += 1
        return rule.term(node, self) if self.replayed < WIDEST else None

    def parameter(self, edge: Edge) -> Term | None:
        """Return the parameter at the end of an edge: itself, as long as it is not changed."""
        variable = parameter(edge)
        if variable is None or variable.device != self._device or not variable.untyped_storage().nbytes():
            return None
        return Unchanged(variable) if self._lasting else self._copy(variable)

    def small(self, edge: Edge) -> Term | None:
        """Return a copy of the small parameter at the end of an edge."""
        variable = parameter(edge)
        return None if variable is None else self._copy(variable)

    def copied(self, node: Any, field: str) -> Term | None:
        """Return a copy of something small that the node saved under a name."""
        handle = self._handle_of(raw(node, field))
        return self._copy(handle.read()) if handle is not None and handle.intact() else None

    def handle(self, node: Any, field: str) -> Handle | None:
        """Return the handle of what the node saved under a name, to look at it now."""
        return self._handle_of(raw(node, field))

    def settle(self, node: Any) -> bool:
        """Write down how deep this node's output is; False if it is too deep."""
        if self.depth >= DEEPEST:
            return False
        node.metadata[_DEPTH] = self.depth + 1
        return True

    def _copy(self, tensor: Tensor) -> Term | None:
        """Return a copy of what is small; what FSDP has given back is not there."""
        if tensor.nbytes > min(SMALL, tensor.untyped_storage().nbytes()):
            return None
        self.nbytes += tensor.nbytes
        return partial(constant, tensor.detach().clone())

    def _leaf(self, handle: Handle | None, came: Any) -> Term | None:
        if handle is None or handle.device != self._device or not handle.intact():
            return None
        self.depth = max(self.depth, _depth(came))
        self.inputs.append(handle)
        return itemgetter(len(self.inputs) - 1)


class Apply:
    """A term that applies a function to terms, and then to numbers."""

    __slots__ = ("_function", "_numbers", "_terms")

    def __init__(self, function: Callable[..., Tensor], terms: Sequence[Term], numbers: Sequence[Any] = ()) -> None:
        self._function, self._terms, self._numbers = function, tuple(terms), tuple(numbers)

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """Evaluate."""
        return self._function(*[term(inputs) for term in self._terms], *self._numbers)


class Unchanged:
    """A term that is a parameter, which must not have changed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, variable: Tensor) -> None:
        self._tensor, self._version = variable.detach(), changes(variable)

    def __call__(self, _: Sequence[Tensor]) -> Tensor:
        """Evaluate.

        Raises:
            RuntimeError: It was changed in place.
        """
        if changes(self._tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self._tensor.type()} {[*self._tensor.size()]}] is at version {changes(self._tensor)}; "
                f"expected version {self._version} instead. kedge.offload rebuilds a saved tensor from it: leave that module out "
                "(where=...), or rebuild nothing: kedge.Disk(rebuild=False)"
            )
        return self._tensor


def parameter(edge: Edge) -> Tensor | None:
    """Return the leaf tensor at the end of an edge."""
    node = edge[0]
    if node is None or type(node).__name__ != "AccumulateGrad":
        return None
    variable: Tensor = node.variable
    return variable


def signed(number: Any) -> Any:
    """Return a number of a node as it was; a node shows a negative dimension as an enormous one."""
    return number - (1 << 64) if type(number) is int and number >= 1 << 63 else number


def constant(value: Any, _: Sequence[Tensor]) -> Any:
    """Evaluate to a value, whatever the inputs are: ``partial(constant, value)`` is a term."""
    return value


NOTHING: Term = partial(constant, None)
"""The term of an argument that was not given."""


def _depth(node: Any) -> int:
    """See Note [How deep]; views on the way are passed by."""
    node = _maker(node)
    return 0 if node is None else int(node.metadata.get(_DEPTH, 0))


def _may_be_parameter(node: Any) -> bool:
    """Whether what came from a node may be a parameter, trained or frozen, or a view of one."""
    node = _maker(node)
    return node is None or type(node).__name__ == "AccumulateGrad"


def _maker(node: Any) -> Any:
    while node is not None and type(node).__name__ in _ALIASING:
        node = node.next_functions[0][0]
    return node


_ALIASING = frozenset({"ViewBackward0", "TransposeBackward0", "PermuteBackward0", "UnsafeViewBackward0", "TBackward0"})
