"""SmoothGrad: the mean over noisy copies of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.calls.arguments import called_as, described, noted_arguments
from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.hooks.session import session
from kedge.recipes.attribution.attribution import Attribution
from kedge.recipes.attribution.named import name_of
from kedge.recipes.attribution.preserve_state import preserved_state
from kedge.recipes.attribution.scores import Target, score, settled
from kedge.sites import leaves


class Noise:
    """An action that adds noise to a batch of copies; the noise does not depend on the number of copies in a batch."""

    def __init__(self, share: float, seed: int) -> None:
        self.share, self.generator = share, torch.Generator().manual_seed(seed)
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
        draws = [
            torch.randn(shape, generator=self.generator, dtype=dtype) for _ in range(self.copies)
        ]
        return torch.cat(draws).to(value)


class Smoothed:
    """An attribution, averaged over noisy copies of its input; called like the model."""

    def __init__(
        self, attribution: Attribution, samples: int, noise: float, seed: int, at_once: int
    ) -> None:
        self.attribution, self.samples, self.noise = attribution, samples, noise
        self.seed, self.at_once = seed, at_once

    def __repr__(self) -> str:
        """The attribution, and what to do with it."""
        return f"<smoothgrad of {self.samples} samples, {repr(self.attribution).lstrip('<')}"

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
            wanted = [_for_each(t, n, copies) for t in targets]
            answer = self.attribution.answer(many, keywords, self.where, noise, target=wanted)
            for name, part in (answer if isinstance(answer, Mapping) else {"": answer}).items():
                wide = torch.promote_types(
                    part.dtype, torch.float32
                )  # many halves would lose the last ones
                summed = part.unflatten(1, (copies, -1)).sum(1, dtype=wide)
                total[name] = total[name] + summed if name in total else summed
                kinds[name] = part.dtype
        several = isinstance(self.attribution.target, Sequence)
        means = {
            name: ((t if several else t[0]) / self.samples).to(kinds[name])
            for name, t in total.items()
        }
        return means[""] if isinstance(self.attribution.wrt, str) else means

    @property
    def where(self) -> str:
        """The selector of the values that get noise."""
        wrt = self.attribution.wrt
        return self.attribution.method().noisy or (wrt if isinstance(wrt, str) else ", ".join(wrt))

    def _settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Target], int]:
        """Return the targets for all copies, and the number of samples, by one forward without noise."""
        sizes: list[int] = []

        def measure(value: Tensor) -> None:
            if value.is_floating_point() and value.dim():
                sizes.append(len(value))

        given = self.attribution.target
        with preserved_state(self.attribution.model), torch.no_grad(), session() as s:
            s.hook(self.attribution.model, self.where, measure)
            with noted_arguments(self.attribution.model, args, kwargs):
                output = self.attribution.model(*args, **kwargs)
            s.end(quiet=True)
        if not sizes:
            raise AttributionError(
                f'there is nothing to add noise to: "{self.where}" holds no floating-point tensor'
            )
        return [
            settled(output, one) for one in (given if isinstance(given, Sequence) else [given])
        ], sizes[0]


def _for_each(target: Target, n: int, copies: int) -> Target:
    """Return the target for a number of copies of the samples; a function is called for each copy."""
    if copies == 1 or target is None or isinstance(target, int):
        return target
    if isinstance(target, Tensor) or not callable(target):
        classes = torch.as_tensor(target)
        return classes.repeat(copies) if classes.dim() else target
    one = target

    def together(output: Any) -> Tensor:
        rows = [(name, t) for name, t in leaves.find(output) if t.dim() and len(t) == n * copies]
        parts = [{name: t[i * n : (i + 1) * n] for name, t in rows} for i in range(copies)]
        return sum(
            (score(leaves.put(output, part), one) for part in parts[1:]),
            score(leaves.put(output, parts[0]), one),
        )

    return together


def _repeated(given: tuple[tuple[Any, ...], dict[str, Any]], n: int, copies: int) -> Any:
    """Return the arguments with repeated tensors, where a tensor has a row for each sample."""
    if copies == 1:
        return given
    found = [(name, t) for name, t in leaves.find(given) if t.dim() and len(t) == n]
    return leaves.put(given, {name: t.repeat(copies, *[1] * (t.dim() - 1)) for name, t in found})


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
            f"smoothgrad takes an attribution, not {described(attribution)}; give one without the images, as in "
            "smoothgrad(saliency(model))(images)"
        )
    if not all(isinstance(each, int) for each in (samples, at_once, seed)) or not isinstance(
        noise, (int, float)
    ):
        raise AttributionError(
            f"smoothgrad(samples={described(samples)}, noise={described(noise)}, seed={described(seed)}, "
            f"at_once={described(at_once)}): these are whole numbers, and noise a number"
        )
    if samples < 1 or at_once < 1 or noise < 0:
        raise AttributionError(
            f"smoothgrad(samples={samples}, noise={noise}, at_once={at_once}): there must be at least one copy, at "
            "least one at once, and noise of 0 or more"
        )
    return Smoothed(attribution, samples, noise, seed, at_once)
