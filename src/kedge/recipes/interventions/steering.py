"""Steering: a direction that is added to a model's values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from kedge.calls.arguments import called_as
from kedge.errors import InterventionError
from kedge.hooks.handle import Hooked
from kedge.hooks.session import hook
from kedge.recipes.interventions.ablation import means
from kedge.recipes.interventions.positions import Positions, mask
from kedge.recipes.model_run import warn_of_training
from kedge.sites import leaves


class Steering:
    """The action of `steer`, to attach with `kedge.hook`, with more options.

    Args:
        direction: A tensor [width], or of a shape that broadcasts to the value.
        strength: The factor of the direction.
        norm: The length to which the direction is scaled first; None leaves it.
        keep_norm: Whether to scale each position of the sum back to its former length.
        positions: Only these positions, counted along `dim`; None for all.
        dim: The dimension of the positions: 1 for tokens.
    """

    def __init__(
        self,
        direction: Tensor,
        strength: float = 1.0,
        *,
        norm: float | None = None,
        keep_norm: bool = False,
        positions: Positions = None,
        dim: int = 1,
    ) -> None:
        if not isinstance(direction, Tensor) or not direction.is_floating_point():
            given = type(direction).__name__
            if isinstance(direction, Tensor):
                given = leaves.describe(direction)
            raise InterventionError(
                f"the direction is {given}; pass a floating-point tensor, "
                "such as the result of contrast(...)"
            )
        self.direction = direction.detach()
        self.strength = strength
        self.keep_norm = keep_norm
        self.positions = positions
        self.dim = dim
        if norm is not None:
            length = self.direction.norm()
            if not length > 0:
                raise InterventionError(
                    f"a direction of length {float(length)} cannot be scaled to the length {norm}"
                )
            self.direction = self.direction * (norm / length)

    def __repr__(self) -> str:
        """A short form for messages."""
        return f"Steering({leaves.describe(self.direction)}, {self.strength})"

    def __call__(self, value: Tensor) -> Tensor:
        """Return the value with the direction added."""
        try:
            moved = value + self.strength * self.direction.to(value)
        except RuntimeError as error:
            raise InterventionError(
                f"a direction {leaves.describe(self.direction)} "
                f"cannot be added to the value {leaves.describe(value)}; it must "
                "have the width of the value's last dimension, "
                "or a shape that broadcasts"
            ) from error
        if self.keep_norm:
            length = moved.norm(dim=-1, keepdim=True)
            factor = value.norm(dim=-1, keepdim=True) / length
            moved = moved * torch.where(length > 0, factor, 0)  # zero has no direction
        if self.positions is None:
            return moved
        return torch.where(mask(value, self.positions, self.dim), moved, value)


@called_as('recipes.steer(model, "layer4", direction)')
def steer(
    model: nn.Module,
    site: str,
    direction: Tensor,
    strength: float = 1.0,
    *,
    norm: float | None = None,
    positions: Positions = None,
) -> Hooked[Any]:
    """Add a direction to the value at a site (activation steering).

    Args:
        model: The model.
        site: A selector, such as ``"h.6"``.
        direction: A tensor [width], or of a shape that broadcasts to the value; see `contrast`.
        strength: The factor of the direction.
        norm: The length to which the direction is scaled first; None leaves it.
        positions: Only these tokens (positions in dimension 1); None for all. `Steering` takes
            another dimension, and can keep the length of the value.

    Returns:
        The handle, used as a ``with`` block, or ended by ``remove()``.

    Examples:
        >>> direction = recipes.contrast(model, "fc", toward=[images[:4]], away=[images[4:]])
        >>> with recipes.steer(model, "fc", direction, strength=2.0):
        ...     output = model(images)
    """
    return hook(model, site, Steering(direction, strength, norm=norm, positions=positions))


@called_as('recipes.contrast(model, "layer4", toward, away)')
def contrast(model: nn.Module, site: str, toward: Iterable[Any], away: Iterable[Any]) -> Tensor:
    """Return the direction from one set of inputs to another: the difference of their mean values.

    Values are averaged over samples and positions.

    Args:
        model: The model, in the mode for the run: usually `eval`.
        site: A selector of one value [..., width].
        toward: Batches of inputs that the direction leads to: each a tensor, a tuple of arguments,
            or a dict of keyword arguments.
        away: Batches of inputs that it leads away from.

    Returns:
        The direction, for `steer`, as a tensor [width].
    """
    warn_of_training(model)
    ends = []
    for inputs in (toward, away):
        end = means(model, site, inputs, over=None)
        if len(end.sums) != 1:
            raise InterventionError(
                f'"{site}" matches {len(end.sums)} values; name one of {", ".join(end.sums)}'
            )
        (only,) = end.sums
        ends.append(end[only].flatten())
    positive, negative = ends
    return positive - negative
