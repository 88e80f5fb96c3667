"""Integrated gradients: the gradient along the straight way from a baseline to the input."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from kedge.calls.arguments import called_as, described
from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.recipes.attribution.attribution import INPUT, Attribution, Method
from kedge.recipes.attribution.baseline import Baseline
from kedge.recipes.attribution.copies import OverCopies
from kedge.recipes.attribution.scores import Targets
from kedge.recipes.model_run import name_of


class StraightWay(Baseline):
    """An action that puts each copy at another place between the baseline and the value.

    The places and their weights are those of the Gauss-Legendre rule on the interval from 0 to 1,
    which is exact for polynomials of degree 2 n - 1.

    Args:
        baseline: A number, or a tensor that fits the values.
        steps: The number of places.
    """

    verb = "integrate along"

    def __init__(self, baseline: float | Tensor, steps: int) -> None:
        super().__init__(baseline)
        places, weights = np.polynomial.legendre.leggauss(steps)
        self.places = torch.from_numpy((places + 1) / 2)
        self.weights = torch.from_numpy(weights / 2)
        self.first = 0
        self.copies = 1

    def start(self, first: int, copies: int) -> None:
        """Begin another forward with the places from one on."""
        self.first = first
        self.copies = copies

    def __call__(self, value: Tensor, event: Event) -> Tensor | None:
        """Return the places of the copies that are in this forward."""
        difference = self.differences.get(name_of(event))
        if difference is None:
            return None
        places = self.places[self.first : self.first + self.copies].to(value)
        places = places.view(-1, *[1] * difference.dim())
        baseline = value.view(self.copies, *difference.shape)[0] - difference
        return (baseline + places * difference).flatten(0, 1)

    def summed(self, parts: Tensor, first: int) -> Tensor:
        """Return the weighted sum of the gradients of some copies."""
        weights = self.weights[first : first + parts.shape[1]].to(parts)
        weighted = parts * weights.view(1, -1, *[1] * (parts.dim() - 2))
        return weighted.sum(1)


class Integrated(OverCopies):
    """A gradient, integrated from a baseline to the input; called like the model."""

    def __repr__(self) -> str:
        """The attribution, and what to do with it."""
        attribution = repr(self.attribution).lstrip("<")
        return f"<integrated gradients in {self.copies} steps, {attribution}"


@called_as("recipes.integrated_gradients(model, target=3)(images)")
def integrated_gradients(
    model: nn.Module,
    target: Targets = None,
    *,
    baseline: float | Tensor = 0.0,
    steps: int = 50,
    at_once: int = 1,
    wrt: str | Sequence[str] = INPUT,
) -> Integrated:
    """Explain a score by its gradient along the straight way from a baseline to the input.

    The attributions of a sample add up to the difference of its score from that of the baseline;
    the more steps, the closer.

    Sundararajan, Taly and Yan, "Axiomatic attribution for deep networks", 2017. The steps are those
    of the Gauss-Legendre rule, as in Captum.

    Args:
        model: The model, in the mode for the attribution: usually `eval`.
        target: The class to explain; see `Attribution`. Without one, the class that has the highest
            score for the input itself.
        baseline: The value from which the way begins: a number, one sample, or one for each sample.
        steps: The number of places on the way.
        at_once: The number of places in one forward; every argument with a row for each sample is
            repeated.
        wrt: A selector of the place that is explained; see `saliency`. With several, all of them go
            their way together.

    Returns:
        The attribution. Call it like the model; it returns a tensor in the shape of the input.

    Examples:
        >>> recipes.integrated_gradients(model, target=2)(images).shape
        torch.Size([8, 1, 8, 8])
    """
    whole = all(isinstance(each, int) and each > 0 for each in (steps, at_once))
    if not whole or not isinstance(baseline, (int, float, Tensor)):
        raise AttributionError(
            f"integrated_gradients(steps={described(steps)}, at_once={described(at_once)}, "
            f"baseline={described(baseline)}): steps and at_once are whole numbers from 1 on, and "
            "the baseline a number or a tensor"
        )
    attribution = Attribution(model, Method, target, wrt)
    return Integrated(attribution, StraightWay(baseline, steps), steps, at_once)
