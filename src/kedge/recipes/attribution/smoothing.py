"""SmoothGrad: the mean over noisy copies of the input."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from kedge.calls.arguments import called_as, described
from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.recipes.attribution.attribution import Attribution
from kedge.recipes.attribution.copies import OverCopies
from kedge.recipes.model_run import name_of


class Noise:
    """An action that adds noise to a batch of copies.

    The noise does not depend on the number of copies in a batch.
    """

    verb = "add noise to"

    def __init__(self, share: float, seed: int, samples: int) -> None:
        self.share = share
        self.seed = seed
        self.samples = samples
        self.generator = torch.Generator()
        self.copies = 1
        self.drawn: dict[str, Tensor] = {}

    def begin(self, values: Mapping[str, Tensor]) -> None:
        """Begin to draw anew."""
        self.generator.manual_seed(self.seed)

    def start(self, first: int, copies: int) -> None:
        """Begin another forward with a number of copies."""
        self.copies = copies
        self.drawn.clear()

    def summed(self, parts: Tensor, first: int) -> Tensor:
        """Return the sum of the attributions of some copies."""
        return parts.sum(1)

    def ended(self, name: str, summed: Tensor) -> Tensor:
        """Return the mean."""
        return summed / self.samples

    def __call__(self, value: Tensor, event: Event) -> Tensor | None:
        """Return the value with noise; a recompute of the forward gets the same noise."""
        if not value.is_floating_point():
            return None
        name = name_of(event)
        if name not in self.drawn:
            self.drawn[name] = self._draw(value)
        dims = tuple(range(1, value.dim()))
        span = value.amax(dims, keepdim=True) - value.amin(dims, keepdim=True)
        return value + self.drawn[name] * span * self.share

    def _draw(self, value: Tensor) -> Tensor:
        shape = (value.shape[0] // self.copies, *value.shape[1:])
        dtype = torch.float64 if value.dtype is torch.float64 else torch.float32
        draw = partial(torch.randn, shape, generator=self.generator, dtype=dtype)
        draws = [draw() for _ in range(self.copies)]  # the same, however many there are
        return torch.cat(draws).to(value)


class Smoothed(OverCopies):
    """An attribution, averaged over noisy copies of its input; called like the model."""

    def __init__(
        self,
        attribution: Attribution,
        samples: int,
        noise: float,
        seed: int,
        at_once: int,
    ) -> None:
        super().__init__(attribution, Noise(noise, seed, samples), samples, at_once)

    def __repr__(self) -> str:
        """The attribution, and what to do with it."""
        attribution = repr(self.attribution).lstrip("<")
        return f"<smoothgrad of {self.copies} samples, {attribution}"


@called_as("recipes.smoothgrad(recipes.saliency(model), samples=25)(images)")
def smoothgrad(
    attribution: Attribution,
    *,
    samples: int = 25,
    noise: float = 0.15,
    seed: int = 0,
    at_once: int = 1,
) -> Smoothed:
    """Average an attribution over noisy copies of the input (SmoothGrad).

    Smilkov, Thorat, Kim, Viégas and Wattenberg, "SmoothGrad: removing noise by adding noise", 2017.
    Without a target, the class is that with the highest score for the input without noise. The
    noise comes from a generator of its own, so the program's random state does not change.

    Args:
        attribution: The result of `gradient`, `saliency`, `guided_backprop`, `deconvnet` or
            `grad_cam`.
        samples: The number of copies.
        noise: The standard deviation of the noise, as a share of each sample's range of values.
        seed: The seed of the noise.
        at_once: The number of copies in one batch; every argument with a row for each sample is
            repeated.

    Returns:
        The attribution. Call it like the model.

    Examples:
        >>> recipes.smoothgrad(recipes.saliency(model), samples=5)(images).shape
        torch.Size([8, 1, 8, 8])
    """
    if not isinstance(attribution, Attribution):
        raise AttributionError(
            f"smoothgrad takes an attribution, not {described(attribution)}; "
            "give one without the images, as in smoothgrad(saliency(model))(images)"
        )
    whole = all(isinstance(each, int) for each in (samples, at_once, seed))
    if not whole or not isinstance(noise, (int, float)):
        raise AttributionError(
            f"smoothgrad(samples={described(samples)}, noise={described(noise)}, "
            f"seed={described(seed)}, at_once={described(at_once)}): "
            "these are whole numbers, and noise a number"
        )
    if samples < 1 or at_once < 1 or noise < 0:
        raise AttributionError(
            f"smoothgrad(samples={samples}, noise={noise}, at_once={at_once}): "
            "there must be at least one copy, at least one at once, "
            "and noise of 0 or more"
        )
    return Smoothed(attribution, samples, noise, seed, at_once)
