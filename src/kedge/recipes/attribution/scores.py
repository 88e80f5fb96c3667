"""The number that an attribution explains: an entry of a model's output, or a function of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kedge.calls.arguments import described
from kedge.errors import AttributionError
from kedge.sites import leaves

Target: TypeAlias = int | Tensor | Callable[[Any], Tensor] | None
"""A class; a class for each sample; a function from the output to scores.

None for the class with the highest score.
"""

Targets: TypeAlias = Target | Sequence[Target]
"""One target, or a list of several."""


def score(output: Any, target: Target) -> Tensor:
    """Return the number whose gradient is taken: the sum of the samples' scores.

    Raises:
        AttributionError: If the output does not determine it, or it has no gradient.
    """
    if callable(target) and not isinstance(target, Tensor):
        found = target(output)
        if not isinstance(found, Tensor) or not found.is_floating_point():
            given = leaves.describe(found) if leaves.find(found) else repr(found)
            raise AttributionError(
                f"the target returned {given}; it must return a floating-point tensor: "
                "a score for each sample"
            )
    else:
        found = _entries(output, target)
    if not found.requires_grad:
        raise AttributionError(
            f"the score, {leaves.describe(found)}, has no gradient: "
            "the forward runs under no_grad, detaches, "
            "or does not use what is differentiated"
        )
    return found.sum()


def settled(output: Any, target: Target) -> Target:
    """Return the target; for None the class with the highest score of each sample."""
    if target is not None:
        return target
    return _best(_logits(output))


def _entries(output: Any, target: int | Tensor | None) -> Tensor:
    logits = _logits(output)
    if target is None:
        if logits.dim() == 0:
            return logits
        target = _best(logits)
    classes = _classes(logits, target)
    return logits.gather(-1, classes.unsqueeze(-1))


def _logits(output: Any) -> Tensor:
    """Return the only tensor of an output that holds scores."""
    found = [tensor for _, tensor in leaves.find(output) if tensor.is_floating_point()]
    if len(found) != 1:
        raise AttributionError(
            f"the model returned {leaves.describe(output)}. "
            "Which part should be explained? "
            "Pass a function of the output, "
            'such as target=lambda output: output["logits"][:, 3]'
        )
    logits = found[0]
    if logits.dim() > 2:
        raise AttributionError(
            f"the model returned {leaves.describe(logits)}, "
            "which has no classes in its second and last dimension; "
            "pass a function of the output, "
            "such as target=lambda output: output[:, 3].mean((1, 2))"
        )
    return logits


def _best(logits: Tensor) -> Tensor:
    if logits.dim() != 2:
        raise AttributionError(
            f"the model returned {leaves.describe(logits)}: "
            "are these classes, or samples? "
            "Pass a class as target, or target=lambda output: output for samples"
        )
    return logits.detach().argmax(-1)


def _classes(logits: Tensor, target: int | Tensor) -> Tensor:
    try:
        classes = torch.as_tensor(target, device=logits.device)
    except (TypeError, RuntimeError, ValueError) as error:
        raise AttributionError(
            f"target={described(target)}: give a class, "
            "a tensor with a class for each sample, or a function of the output"
        ) from error

    wanted = logits.shape[:-1]
    whole = not classes.is_floating_point() and classes.dtype != torch.bool
    if not whole or classes.shape not in (torch.Size(()), wanted):
        raise AttributionError(
            f"target {leaves.describe(classes)} for an output {leaves.describe(logits)}: "
            f"give one class, or an integer for each of the {wanted.numel()} samples; "
            "to explain several classes, a list of them"
        )
    count = logits.shape[-1]
    if classes.numel() and not (-count <= int(classes.min()) and int(classes.max()) < count):
        raise AttributionError(f"target {target}: the model has {count} classes, counted from 0")
    return (classes % count).expand(wanted).long()
