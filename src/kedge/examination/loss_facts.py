"""What the graph of a loss shows: its targets, and the parameters that it reaches.

It is read before the backward pass, which frees what the nodes of the graph have saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.autograd.graph import Node

from kedge.examination.loss_calls import LossCall, loss_calls
from kedge.examination.tape import Tape
from kedge.store.events import Broadcast
from kedge.torch_internals import autograd_nodes
from kedge.torch_internals.autograd_nodes import behind, function_of, is_leaf, operation_of
from kedge.watch.records.broadcasts import broadcast_in

CLASSES = ("nll_loss", "nll_loss2_d")
"""Losses whose targets are numbers of classes."""
_CHANCES = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
_VALUES = ("mse_loss", "smooth_l1_loss", "huber_loss")
_VIEWS = frozenset(
    (
        *("as_strided", "expand", "permute", "reshape_alias", "select", "slice", "squeeze", "t"),
        *("transpose", "unsafe_view", "unsqueeze", "view", "clone", "contiguous"),
    )
)
_LOSSES = (*CLASSES, *_CHANCES, *_VALUES)


@dataclass(frozen=True)
class Target:
    """The targets of one of PyTorch's losses, with what they were compared with.

    Attributes:
        loss: The name of the loss: ``nll_loss``, ``mse_loss``.
        target: The targets.
        predicted: What the loss compared with them: logarithms of probabilities for ``nll_loss``.
        ignored: The class that counts as no target; None without one.
        is_weighted: Whether classes or elements have weights.
        logits_from: The operation that made the logits, of a loss that applies a softmax or sigmoid
            itself; None of others.
        values_from: The operation that made predictions of numbers; None of others.
    """

    loss: str
    target: Tensor
    predicted: Tensor
    ignored: int | None
    is_weighted: bool
    logits_from: str | None
    values_from: str | None

    @property
    def has_classes(self) -> bool:
        """Whether the targets are numbers of classes."""
        return self.loss in CLASSES

    @property
    def has_chances(self) -> bool:
        """Whether the targets are probabilities of two classes."""
        return self.loss in _CHANCES

    @property
    def classes(self) -> int:
        """The number of classes."""
        if self.predicted.dim() == 1:
            return self.predicted.shape[0]
        return self.predicted.shape[1]

    def counted(self) -> Tensor:
        """Return the targets that count, as one row."""
        every = self.target.reshape(-1)
        if self.ignored is None:
            return every
        return every[every != self.ignored]


@dataclass(frozen=True)
class LossFacts:
    """What was seen of one loss as its backward pass began.

    Attributes:
        value: Its value.
        where: The line that called backward, ``train.py:41``; "" if none is known.
        targets: The targets of PyTorch's losses in its graph.
        reached: The leaves that it depends on, by their ids.
        broadcast: The operation by which it pairs each prediction with each target; None without.
        functions: The program's own `torch.autograd.Function` classes in its graph.
        has_softmax_of_one: Whether the logarithm of a softmax over one value is in its graph.
        calls: The calls of losses that compare probabilities.
    """

    value: float
    where: str
    targets: tuple[Target, ...]
    reached: Mapping[int, Tensor]
    broadcast: Broadcast | None
    functions: tuple[type, ...]
    has_softmax_of_one: bool = False
    calls: tuple[LossCall, ...] = ()


def facts_of(losses: Iterable[Tensor], where: str, tape: Tape | None) -> LossFacts:
    """Return what the graphs of losses show; together they are differentiated in one pass.

    Args:
        losses: The losses.
        where: The line that called backward; "" if none is known.
        tape: The calls between the model and the loss; None if they are not known.
    """
    losses = list(losses)
    targets: list[Target] = []
    reached: dict[int, Tensor] = {}
    functions: dict[type, None] = {}
    has_softmax_of_one = False
    for node in behind(loss.grad_fn for loss in losses):
        if is_leaf(node):
            leaf: Tensor = node.variable  # type: ignore[attr-defined]
            reached[id(leaf)] = leaf
        elif operation_of(node) in _LOSSES:
            found = _target_of(node)
            if found is not None:
                targets.append(found)
        elif operation_of(node) == "log_softmax":
            has_softmax_of_one = has_softmax_of_one or _is_of_one(node)
        function = function_of(node)
        if function is not None:
            functions[function] = None
    value = sum(float(loss.detach().sum()) for loss in losses)
    broadcast = broadcast_in(losses)
    calls: tuple[LossCall, ...] = ()
    if tape is not None:
        calls = tuple(loss_calls(tape))
    return LossFacts(
        value,
        where,
        tuple(targets),
        reached,
        broadcast,
        tuple(functions),
        has_softmax_of_one,
        calls,
    )


def _is_of_one(node: Node) -> bool:
    """Whether a softmax is over a dimension of one value."""
    dim = autograd_nodes.number_in(node, "dim")
    try:
        result: Tensor = autograd_nodes.saved(node, "result")
    except (AttributeError, RuntimeError):  # not saved in this PyTorch, or freed already
        return False
    return dim is not None and result.dim() > 0 and result.shape[autograd_nodes.signed(dim)] == 1


def _target_of(node: Node) -> Target | None:
    try:
        predicted = autograd_nodes.saved(node, "self")
        target = autograd_nodes.saved(node, "target")
    except (AttributeError, RuntimeError):  # not saved in this PyTorch, or freed already
        return None
    weights = [getattr(node, f"_saved_{name}", None) for name in ("weight", "pos_weight")]
    ignored = autograd_nodes.number_in(node, "ignore_index")
    if ignored is not None:
        ignored = autograd_nodes.signed(ignored)
    return Target(
        loss=operation_of(node),
        target=target.detach().clone(),
        predicted=predicted.detach().clone(),
        ignored=ignored,
        is_weighted=any(weight is not None for weight in weights),
        logits_from=_maker_of_logits(node),
        values_from=_maker_of_values(node),
    )


def _maker_of_values(node: Node) -> str | None:
    """Return the operation that made the predictions of numbers, through views."""
    maker = _before(node)
    if operation_of(node) not in _VALUES or maker is None:
        return None
    return operation_of(maker)


def _maker_of_logits(node: Node) -> str | None:
    """Return the operation that made the logits of a loss, through views; None if it takes none."""
    wanted: Node | None = node
    if operation_of(node) in CLASSES:
        wanted = _before(node)
        if wanted is None or operation_of(wanted) != "log_softmax":
            return None
    elif operation_of(node) != "binary_cross_entropy_with_logits":
        return None
    maker = _before(wanted)
    return None if maker is None else operation_of(maker)


def _before(node: Node | None) -> Node | None:
    """Return what made the first operand of a node, without the views between."""
    while node is not None:
        node = node.next_functions[0][0]
        if node is None or operation_of(node) not in _VIEWS:
            return node
    return None
