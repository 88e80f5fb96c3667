"""Results that a loss spreads over a square: each prediction against each target.

# Note [A square by mistake]
Of predictions in a column and targets in a row, or the reverse, PyTorch's broadcasting makes every
pair: N predictions of shape (N, 1) and N targets of shape (N,) become N by N differences, and their
mean is a loss that falls, towards the mean of the targets. The same goes for logarithms of
probabilities that are weighed by rewards. The graph shows it: an operation near the loss has the
shape (N, N), and its only operand with a gradient N elements, as a layer or an activation left
them. Where pairs are meant, the program has given the operand another dimension itself, or both
operands have gradients. And the outputs for one sample, a row, are no column of predictions: what a
view made of them was meant. A second difference has targets of its own, for each pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.autograd.graph import Node

from kedge.sites.operation_names import plain_name
from kedge.store.events import Broadcast
from kedge.torch_internals.autograd_nodes import shape_of_output

_NEAR = 8
"""Most operations between a loss and the one that spreads its operand."""
_MOST_TERMS = 24
"""Most operations of the sum that a loss may be."""
_SUMS = frozenset(("add", "div", "mul", "neg", "rsub", "sub"))
"""Operations on numbers of which a loss of several terms is made."""
_PAIRS = frozenset(("sub", "rsub", "expand"))
"""Operations in which a difference spreads its operands; PyTorch's losses expand them first."""
_PRODUCTS = frozenset(("mul", "div"))
"""Operations that weigh each sample, such as a logarithm of a probability by a reward."""
_PER_SAMPLE = frozenset(("clamp", "exp", "gather", "log", "minimum", "neg", "sum"))
"""Operations that leave one number a sample, which is weighed then."""
_DIFFERENCES = frozenset(
    (
        *("abs", "add", "clamp", "clamp_min", "cosh", "div", "huber_loss", "log", "mean"),
        *("mse_loss", "mul", "neg", "pow", "rsub", "smooth_l1_loss", "sqrt", "sub", "sum"),
    )
)
"""What a loss makes of differences."""
_COLUMNS = frozenset(
    (
        *("add", "addmm", "addmv", "convolution", "div", "elu", "exp", "gather", "gelu"),
        *("hardtanh", "index", "leaky_relu", "linear", "mm", "mul", "mv", "native_dropout"),
        *("relu", "reshape_alias", "select", "sigmoid", "silu", "slice", "softplus", "squeeze"),
        *("sum", "tanh", "unsafe_view", "view"),
    )
)
"""Operations that leave predictions: layers, activations, their scale and shift, a choice or a product of outputs."""

_VIEWS = frozenset(("reshape_alias", "squeeze", "unsafe_view", "view"))
"""Those of them that may have made a column of what was none."""

_MAKERS = {
    **dict.fromkeys(_PAIRS, _COLUMNS),
    **dict.fromkeys(_PRODUCTS, _PER_SAMPLE),
}
"""What may have made the operand that an operation spreads."""


def broadcast_in(losses: Sequence[Tensor]) -> Broadcast | None:
    """Return the operation by which a loss pairs each prediction with each target; None without one.

    See Note [A square by mistake].
    """
    for loss in losses:
        for term in _terms(loss.grad_fn):
            node: Node | None = term
            for _ in range(_NEAR):
                if node is None:
                    break
                found = _spread(node)
                if found is not None:
                    return found
                node = _behind(node)
    return None


def _terms(loss: Node | None) -> Iterator[Node]:
    """Yield the terms that a loss is the weighted sum of; itself, if it is none."""
    waiting = [loss]
    for _ in range(_MOST_TERMS):
        node = next(iter(waiting), None)
        if node is None:
            return
        operands = [before for before, _ in node.next_functions if before is not None]
        del waiting[0]
        if plain_name(node.name()) in _SUMS and shape_of_output(node) == ():
            waiting += operands
        else:
            yield node


def _behind(node: Node) -> Node | None:
    """Return the only operand with a gradient of an operation on differences."""
    operation = plain_name(node.name())
    if operation not in _DIFFERENCES:
        return None
    operands = [before for before, _ in node.next_functions if before is not None]
    if len(operands) != 1:
        return None
    (operand,) = operands
    if operation == "sub" and plain_name(operand.name()) != "expand":
        return None  # the difference of one has been taken already
    return operand


def _spread(node: Node) -> Broadcast | None:
    operation = plain_name(node.name())
    shape = shape_of_output(node)
    makers = _MAKERS.get(operation)
    if makers is None or shape is None or len(shape) != 2:
        return None
    size = shape[0]
    if size < 2 or shape[1] != size:
        return None
    operands = [edge for edge in node.next_functions if edge[0] is not None]
    if len(operands) != 1:
        return None

    maker, number = operands[0]
    assert maker is not None  # noqa: S101 - as asked above
    given = shape_of_output(maker, number)
    if given not in ((size, 1), (size,)) or plain_name(maker.name()) not in makers:
        return None
    if _is_made_on_purpose(maker, given):
        return None
    return Broadcast(by=operation, shape=given, to=shape)


def _is_made_on_purpose(maker: Node, given: tuple[int, ...]) -> bool:
    """Whether the program has added a dimension, or made a column of a row, or a row of the outputs for one sample."""
    before, number = next(iter(maker.next_functions), (None, 0))
    if before is not None and plain_name(before.name()) == "unsqueeze":
        return True
    if before is None or plain_name(maker.name()) not in _VIEWS:
        return False
    shape = shape_of_output(before, number)
    if shape is None:
        return False
    is_of_one = len(shape) > 1 and shape[0] == 1
    return is_of_one or (shape == given[:1] and len(given) > 1)
