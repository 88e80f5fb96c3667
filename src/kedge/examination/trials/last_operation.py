"""Whether the model ends in a softmax or a sigmoid that its loss applies too, or in what keeps logits from being negative.

Cannot see: losses that are not PyTorch's own; an operation that the program itself puts between the
model and its loss.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.autograd.graph import Node

from kedge.examination.result import Result
from kedge.examination.step import ExaminedStep
from kedge.torch_internals.autograd_nodes import operation_of

TRIAL = "last-operation"
DID = "compared the model's last operation with what the loss wants"
_VIEWS = frozenset(("view", "unsafe_view", "reshape_alias", "squeeze", "unsqueeze", "transpose"))
_TWICE = {
    "softmax": "The loss applies a softmax itself: of probabilities it learns slowly, and never "
    "gets below a floor. Return the logits, or take NLLLoss of log_softmax.",
    "sigmoid": "The loss applies a sigmoid or softmax itself. Return the logits.",
    "relu": "Logits have to be negative as well: of zeros the loss learns nothing.",
    "tanh": "Logits between -1 and 1 cannot be sure of anything.",
}


def last_operation(step: ExaminedStep) -> Iterator[Result]:
    """Yield whether the last operation of an output does not go with a loss of logits."""
    if not any(target.of_logits for target in step.targets()):
        return
    ends = {}
    for name, value in step.run.graph().items():
        if value.dim() > 0 and value.is_floating_point():
            ends[name] = _operation_at_end(value.grad_fn)
    if len(ends) != 1:
        return
    ((_, operation),) = ends.items()
    means = _TWICE.get(operation)
    where = step.loss.where if step.loss is not None else ""
    if means is None:
        yield Result(TRIAL, "ok", DID, "it wants logits, and gets them")
        return
    yield Result(
        TRIAL, "wrong", DID, f"it ends in {operation}, and the loss wants logits", means, where
    )


def _operation_at_end(node: Node | None) -> str:
    for _ in range(8):
        if node is None or operation_of(node) not in _VIEWS:
            break
        node = node.next_functions[0][0]
    return operation_of(node)
