"""Rules and their builder: from a node of the graph to an expression over saved tensors.

# Note [Contents of a recipe]
A node of the graph holds its saved tensors, so nothing that replaces a saved tensor may hold a
node: the cycle would never be freed. Rules read a node and keep only handles, numbers and small
copies.

# Note [How deep]
A tensor may be rebuilt from rebuilt tensors: a residual stream goes through the whole network, and
its last block would be rebuilt from all the others. So each node stores the depth of its output's
recipe as a number, which ends at `DEEPEST`; the next tensor is kept.

# Note [Parameters that do not last]
Under FSDP a parameter's memory is freed after the forward of its group of modules, and filled again
just before their backward; its version does not show that. Backward needs the saved tensors of
other groups earlier. So under FSDP nothing is rebuilt from a parameter, nor from a tensor that may
be one, except from copies of small ones. The caller passes ``handle_of.lasting = False``.
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
from kedge.torch_internals.autograd_nodes import is_leaf, raw
from kedge.torch_internals.tensors import changes

DEEPEST = 3
"""The greatest depth of tensors rebuilt from rebuilt tensors."""

WIDEST = 6
"""The number of operations that one recipe may replay."""

SMALL = 1 << 16
"""The largest parameter, in bytes, that is copied if it is not saved."""

_DEPTH = "kedge.depth"

Edge = tuple[Any, int]


class RebuildRule(ABC):
    """A rule that rebuilds the output of a kind of node.

    Attributes:
        name: Its name in the account.
        nodes: The type names of the nodes that it applies to.
        cost: The cost of a run.
        result: The name under which the node saves its own output; None if it does not. The output
            saved there is as the operation left it, however often it was changed in place before.
    """

    __slots__ = ()
    name: str
    nodes: tuple[str, ...]
    cost: Cost = "elementwise"
    result: str | None = None

    @abstractmethod
    def term(self, node: Any, builder: RecipeBuilder) -> Term | None:
        """Return the term that makes the node's first output; None if the rule does not apply."""


class RecipeBuilder:
    """The access of a rule to the parts of its term.

    Attributes:
        whole: The tensor to rebuild, as long as the outermost rule is called; afterwards None.
        inputs: The handles found so far.
        nbytes: The bytes copied so far.
        extra: A tensor that has to be stored; the term receives it as the last input.
        depth: The depth of the parts found so far; see Note [How deep].
        replayed: The number of operations found so far besides the outermost.
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

    def __init__(
        self, rules: Mapping[str, RebuildRule], handle_of: HandleOf, whole: Tensor
    ) -> None:
        self._rules = rules
        self._handle_of = handle_of
        self._lasting: bool = getattr(handle_of, "lasting", True)
        self._device = whole.device
        self.whole: Tensor | None = whole
        self.inputs: list[Handle] = []
        self.extra: Tensor | None = None
        self.nbytes = 0
        self.depth = 0
        self.replayed = 0

    def saved(self, node: Any, field: str, edge: int | None = None) -> Term | None:
        """Return the tensor that the node saved under a name.

        Args:
            node: The node.
            field: The name.
            edge: The index of the edge by which the tensor came in.
        """
        came = None
        if edge is not None:
            came = node.next_functions[edge][0]
            if not self._lasting and _may_be_parameter(came):
                return self.copied(node, field)
        return self._leaf(self._handle_of(raw(node, field)), came)

    def behind(self, edge: Edge) -> Term | None:
        """Return the tensor that came in by an edge.

        It is a parameter, an output that its node saved, or one that can be rebuilt.
        """
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
        if self.replayed >= WIDEST:
            return None
        return rule.term(node, self)

    def parameter(self, edge: Edge) -> Term | None:
        """Return the parameter at the end of an edge, by reference.

        Reading it fails once it is changed.
        """
        variable = parameter(edge)
        if variable is None or variable.device != self._device:
            return None
        if not variable.untyped_storage().nbytes():
            return None
        if not self._lasting:
            return self._copy(variable)
        return Unchanged(variable)

    def small(self, edge: Edge) -> Term | None:
        """Return a copy of the small parameter at the end of an edge."""
        variable = parameter(edge)
        if variable is None:
            return None
        return self._copy(variable)

    def copied(self, node: Any, field: str) -> Term | None:
        """Return a copy of a small tensor that the node saved under a name."""
        handle = self._handle_of(raw(node, field))
        if handle is None or not handle.intact():
            return None
        return self._copy(handle.read())

    def handle(self, node: Any, field: str) -> Handle | None:
        """Return the handle of the tensor that the node saved under a name, for reading now."""
        return self._handle_of(raw(node, field))

    def settle(self, node: Any) -> bool:
        """Whether this node's output is not too deep; if so, stores its depth at the node."""
        if self.depth >= DEEPEST:
            return False
        node.metadata[_DEPTH] = self.depth + 1
        return True

    def _copy(self, tensor: Tensor) -> Term | None:
        """Return a copy of a small tensor; None if it is large, or if FSDP has freed its memory."""
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
    """A term that applies a function to the values of terms, followed by numbers."""

    __slots__ = ("_function", "_numbers", "_terms")

    def __init__(
        self,
        function: Callable[..., Tensor],
        terms: Sequence[Term],
        numbers: Sequence[Any] = (),
    ) -> None:
        self._function = function
        self._terms = tuple(terms)
        self._numbers = tuple(numbers)

    def __call__(self, inputs: Sequence[Tensor]) -> Tensor:
        """Return the value of the term."""
        values = [term(inputs) for term in self._terms]
        return self._function(*values, *self._numbers)


class Unchanged:
    """A term whose value is a parameter, which must not have changed."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, variable: Tensor) -> None:
        self._tensor = variable.detach()
        self._version = changes(variable)

    def __call__(self, _: Sequence[Tensor]) -> Tensor:
        """Return the value of the term.

        Raises:
            RuntimeError: The parameter was changed in place.
        """
        tensor = self._tensor
        version = changes(tensor)
        if version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified "
                f"by an inplace operation: [{tensor.type()} {[*tensor.size()]}] "
                f"is at version {version}; expected version {self._version} instead. "
                "kedge.offload rebuilds a saved tensor from it: leave that module out "
                "(where=...), or rebuild nothing: kedge.Disk(rebuild=False)"
            )
        return tensor


def parameter(edge: Edge) -> Tensor | None:
    """Return the leaf tensor at the end of an edge."""
    node = edge[0]
    if node is None or not is_leaf(node):
        return None
    variable: Tensor = node.variable
    return variable


def signed(number: Any) -> Any:
    """Return a node's number with its sign.

    A node shows a negative dimension as a number of 2**63 or more.
    """
    if type(number) is int and number >= 1 << 63:
        return number - (1 << 64)
    return number


def constant(value: Any, _: Sequence[Tensor]) -> Any:
    """Return a value, regardless of the inputs: ``partial(constant, value)`` is a term."""
    return value


NOTHING: Term = partial(constant, None)
"""The term of an argument that was omitted."""


def _depth(node: Any) -> int:
    """Return the depth stored at a node, or at the node behind its views; see Note [How deep]."""
    node = _maker(node)
    if node is None:
        return 0
    return int(node.metadata.get(_DEPTH, 0))


def _may_be_parameter(node: Any) -> bool:
    """Whether the output of a node may be a parameter, trained or frozen, or a view of one."""
    node = _maker(node)
    return node is None or is_leaf(node)


def _maker(node: Any) -> Any:
    while node is not None and type(node).__name__ in _ALIASING:
        node = node.next_functions[0][0]
    return node


_ALIASING = frozenset(
    {"ViewBackward0", "TransposeBackward0", "PermuteBackward0", "UnsafeViewBackward0", "TBackward0"}
)
