"""What the program gave to PyTorch's losses that the graph does not show: probabilities in place of classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the field's name for it

from kedge.examination.tape import Tape


@dataclass(frozen=True)
class LossCall:
    """A call of a loss that compares two tensors.

    Attributes:
        name: The name of the function.
        predicted: What it was given as predictions.
        target: The targets.
    """

    name: str
    predicted: Tensor
    target: Tensor


def loss_calls(tape: Tape) -> Iterator[LossCall]:
    """Yield the calls of cross entropy and of the Kullback-Leibler divergence on a tape."""
    for function in (F.cross_entropy, F.kl_div):
        for args, kwargs in tape.calls_of(function):
            given = (*args, kwargs.get("input"), kwargs.get("target"))
            tensors = [value for value in given if isinstance(value, Tensor)]
            if len(tensors) >= 2:
                predicted, target = tensors[:2]
                yield LossCall(
                    function.__name__, predicted.detach().clone(), target.detach().clone()
                )
