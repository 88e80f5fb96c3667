"""SmoothGrad: the mean over noisy copies of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kedge.calls.arguments import called_as, described, noted_arguments
from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.hooks.session import session
from kedge.recipes.attribution.attribution import Attribution
from kedge.recipes.attribution.scores import Target, score, settled
from kedge.recipes.model_run import name_of, preserved_state
from kedge.sites import leaves


class Noise:
    """An action that adds noise to a batch of copies.

    The noise does not depend on the number of copies in a batch.
    """

    def __init__(self, share: float, seed: int) -> None:
        self.share = share
        self.generator = torch.Generator().manual_seed(seed)
        self.copies = 1
        self.drawn: dict[str, Tensor] = {}

    def start(self, copies: int) -> None:
        """Begin another forward with a number of copies."""
        self.copies = copies
        self.drawn.clear()

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


class Smoothed:
    """An attribution, averaged over noisy copies of its input; called like the model."""

    def __init__(
        self,
        attribution: Attribution,
        samples: int,
        noise: float,
        seed: int,
        at_once: int,
    ) -> None:
        self.attribution = attribution
        self.samples = samples
        self.noise = noise
        self.seed = seed
        self.at_once = at_once

    def __repr__(self) -> str:
        """The attribution, and what to do with it."""
        attribution = repr(self.attribution).lstrip("<")
        return f"<smoothgrad of {self.samples} samples, {attribution}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the averaged attribution for these arguments; see `Attribution`."""
        targets, n = self._settled(args, kwargs)
        noise = Noise(self.noise, self.seed)
        total: dict[str, Tensor] = {}
        kinds: dict[str, torch.dtype] = {}
        for first in range(0, self.samples, self.at_once):
            copies = min(self.at_once, self.samples - first)
            noise.start(copies)
            many, keywords = _repeated((args, kwargs), n, copies)
            wanted = [_for_each(target, n, copies) for target in targets]
            answer = self.attribution.answer(many, keywords, self.where, noise, target=wanted)
            if not isinstance(answer, Mapping):
                answer = {"": answer}
            for name, part in answer.items():
                # Many halves would lose the last ones.
                wide = torch.promote_types(part.dtype, torch.float32)
                summed = part.unflatten(1, (copies, -1)).sum(1, dtype=wide)
                if name in total:
                    summed = total[name] + summed
                total[name] = summed
                kinds[name] = part.dtype

        several = isinstance(self.attribution.target, Sequence)
        means = {}
        for name, summed in total.items():
            mean = summed / self.samples
            if not several:
                mean = mean[0]
            means[name] = mean.to(kinds[name])
        if isinstance(self.attribution.wrt, str):
            return means[""]
        return means

    @property
    def where(self) -> str:
        """The selector of the values that get noise."""
        noisy = self.attribution.method().noisy
        if noisy:
            return noisy
        wrt = self.attribution.wrt
        if isinstance(wrt, str):
            return wrt
        return ", ".join(wrt)

    def _settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Target], int]:
        """Return the targets for all copies, and the number of samples.

        They are found by one forward without noise.
        """
        sizes: list[int] = []

        def measure(value: Tensor) -> None:
            if value.is_floating_point() and value.dim():
                sizes.append(len(value))

        model = self.attribution.model
        with preserved_state(model), torch.no_grad(), session() as s:
            s.hook(model, self.where, measure)
            with noted_arguments(model, args, kwargs):
                output = model(*args, **kwargs)
            s.end(quiet=True)
        if not sizes:
            raise AttributionError(
                f'there is nothing to add noise to: "{self.where}" holds no floating-point tensor'
            )

        given = self.attribution.target
        targets = list(given) if isinstance(given, Sequence) else [given]
        return [settled(output, one) for one in targets], sizes[0]


def _for_each(target: Target, n: int, copies: int) -> Target:
    """Return the target for a number of copies of the samples; a function is called for each copy."""
    if copies == 1 or target is None or isinstance(target, int):
        return target
    if isinstance(target, Tensor) or not callable(target):
        classes = torch.as_tensor(target)
        if not classes.dim():
            return target
        return classes.repeat(copies)
    one = target

    def together(output: Any) -> Tensor:
        found = leaves.find(output)
        rows = {name: t for name, t in found if t.dim() and len(t) == n * copies}
        scores = []
        for i in range(copies):
            part = {name: t[i * n : (i + 1) * n] for name, t in rows.items()}
            scores.append(score(leaves.put(output, part), one))
        return sum(scores[1:], scores[0])

    return together


def _repeated(given: tuple[tuple[Any, ...], dict[str, Any]], n: int, copies: int) -> Any:
    """Return the arguments with repeated tensors, where a tensor has a row for each sample."""
    if copies == 1:
        return given
    repeated = {}
    for name, tensor in leaves.find(given):
        if tensor.dim() and len(tensor) == n:
            repeated[name] = tensor.repeat(copies, *[1] * (tensor.dim() - 1))
    return leaves.put(given, repeated)


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
