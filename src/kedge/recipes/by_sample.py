"""The gradient of each sample's own loss, for every parameter.

# Note [Why not by hooks]
Hooks see the inputs of each module and the gradient of its output, from which follows what each
sample adds to the gradients of its parameters. That was tried beside `torch.func`, which needs
fewer rules and was faster (`benchmarks/RESULTS.md`). So `torch.func` does it here, for some samples
at once, and where norms are wanted, no more gradients exist at a time than those of these samples.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kedge.calls.arguments import called_as, described, not_a_model
from kedge.errors import AttributionError
from kedge.recipes.model_run import arguments, preserved_state
from kedge.sites import leaves
from kedge.torch_internals.module_tables import parameters_in

Loss = Callable[..., Tensor]
"""A function of an output and of targets that returns a loss."""


class SamplewiseLoss:
    """The loss of one sample as a function of the parameters.

    Args:
        model: The model.
        given: Its input, for all samples.
        loss: The loss.
        targets: Its other arguments, for all samples.
    """

    def __init__(self, model: nn.Module, given: Any, loss: Loss, targets: tuple[Any, ...]) -> None:
        self.model = model
        self.loss = loss
        self.whole = (*arguments(given), targets)
        found = [(name, t) for name, t in leaves.find(self.whole) if t.dim()]
        if not found:
            raise AttributionError(
                f"sample_gradients was given {leaves.describe(given)}, which has no samples: "
                "give a tensor with a row for each"
            )
        self.n = len(found[0][1])
        self.rows = {name: t.detach() for name, t in found if len(t) == self.n}
        self.weights = {
            name: weight.detach()
            for name, weight in parameters_in(model).items()
            if weight.requires_grad
        }

    def of(self, weights: dict[str, Tensor], row: dict[str, Tensor]) -> Tensor:
        """Return the loss of one sample.

        Raises:
            AttributionError: It is not one number.
        """
        one = {name: t.unsqueeze(0) for name, t in row.items()}
        args, kwargs, targets = leaves.put(self.whole, one)
        output = torch.func.functional_call(self.model, weights, args, dict(kwargs))
        loss = self.loss(output, *targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise AttributionError(
                f"loss returned {leaves.describe(loss)} for one sample; it must return one number, "
                "as cross_entropy(output, label) does"
            )
        return loss.sum()

    def together(self, first: int, count: int) -> dict[str, Tensor]:
        """Return the gradients of some samples, by one run of the model for them all."""
        some = {name: t[first : first + count] for name, t in self.rows.items()}
        each: Any = torch.vmap(torch.func.grad(self.of), in_dims=(None, 0), randomness="different")
        found: dict[str, Tensor] = each(self.weights, some)
        return found

    def alone(self, first: int, count: int) -> dict[str, Tensor]:
        """Return the gradients of some samples, by a run of the model for each."""
        found: dict[str, list[Tensor]] = {name: [] for name in self.weights}
        for i in range(first, first + count):
            row = {name: t[i] for name, t in self.rows.items()}
            weights = {name: t.detach().requires_grad_() for name, t in self.weights.items()}
            grads = torch.autograd.grad(
                self.of(weights, row), list(weights.values()), materialize_grads=True
            )
            for name, grad in zip(weights, grads, strict=True):
                found[name].append(grad)
        return {name: torch.stack(each) for name, each in found.items()}


@called_as("recipes.sample_gradients(model, images, cross_entropy, labels)")
def sample_gradients(
    model: nn.Module,
    given: Any,
    loss: Loss,
    *targets: Any,
    norms: bool = False,
    at_once: int | None = None,
) -> dict[str, Tensor]:
    """Return the gradient of each sample's own loss, for every parameter that requires grad.

    Each sample runs as a batch of one, so samples do not influence each other; many of them run at
    once by `torch.func`. A model that `torch.func` cannot run, such as one whose forward reads a
    number from a tensor, runs for one sample after another.

    Args:
        model: The model; it and its gradients are not changed.
        given: The input: a tensor, a tuple of arguments, or a dict of keyword arguments. The first
            dimension of the first tensor counts the samples; tensors without so many rows go to
            each sample as a whole.
        loss: A function of the model's output and of the targets that returns a loss.
        targets: The other arguments of the loss, such as labels.
        norms: Whether to return the norm of each gradient alone.
        at_once: How many samples run at once; None for all. With `norms`, so many gradients exist
            at a time.

    Returns:
        For each name of a parameter, a tensor [n, *shape], or [n] with `norms`.

    Raises:
        AttributionError: If there are no samples, or `loss` returns no number.

    Examples:
        >>> labels = torch.zeros(8, dtype=torch.long)
        >>> loss = torch.nn.functional.cross_entropy
        >>> recipes.sample_gradients(model, images, loss, labels, norms=True)["fc.bias"].shape
        torch.Size([8])
    """
    if not isinstance(model, nn.Module):
        raise AttributionError(f"sample_gradients takes a model first, not {not_a_model(model)}")
    if not callable(loss):
        raise AttributionError(
            f"sample_gradients(loss={described(loss)}): loss is a function of the output and the "
            "targets, such as torch.nn.functional.cross_entropy"
        )
    if at_once is not None and (not isinstance(at_once, int) or at_once < 1):
        raise AttributionError(
            f"sample_gradients(at_once={described(at_once)}): at_once is a whole number from 1 on"
        )
    parts: dict[str, list[Tensor]] = {}
    with preserved_state(model):
        wanted = SamplewiseLoss(model, given, loss, targets)
        run = wanted.together
        size = at_once or wanted.n
        for first in range(0, wanted.n, size):
            count = min(size, wanted.n - first)
            try:
                found = run(first, count)
            except (RuntimeError, NotImplementedError):
                if run == wanted.alone:
                    raise
                run = wanted.alone
                found = run(first, count)
            for name, grads in found.items():
                kept = grads
                if norms:
                    kept = torch.linalg.vector_norm(grads.flatten(1), dim=1)
                parts.setdefault(name, []).append(kept)
            del found
    return {name: _joined(each) for name, each in parts.items()}


def _joined(parts: list[Tensor]) -> Tensor:
    """Return the parts in one tensor; one part is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts)
