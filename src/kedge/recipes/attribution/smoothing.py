"""SmoothGrad: the mean over noisy copies of the input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from kedge.errors import AttributionError
from kedge.flow import Event
from kedge.hooks.session import session
from kedge.recipes.attribution.attribution import Attribution
from kedge.recipes.attribution.named import name_of
from kedge.recipes.attribution.preserve_state import undisturbed
from kedge.recipes.attribution.scores import Target, score, settled
from kedge.sites import leaves


class Noise:
    """An action that adds noise to a batch of copies; the numbers do not depend on how many copies come at once."""

    def __init__(self, share: float, seed: int) -> None:
        self.share, self.generator = share, torch.Generator().manual_seed(seed)
        self.copies = 1
        self.drawn: dict[str, Tensor] = {}

    def start(self, copies: int) -> None:
        """Begin another forward, of so many copies."""
        self.copies = copies
        self.drawn.clear()

    def __call__(self, value: Tensor, event: Event) -> Tensor | None:
        """Add the noise; a recompute of the forward adds the same again."""
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
        draws = [torch.randn(shape, generator=self.generator, dtype=dtype) for _ in range(self.copies)]
        return torch.cat(draws).to(value)


class Smoothed:
    """An attribution, averaged over noisy copies of what it is given; called as the model is called."""

    def __init__(self, attribution: Attribution, samples: int, noise: float, seed: int, at_once: int) -> None:
        self.attribution, self.samples, self.noise = attribution, samples, noise
        self.seed, self.at_once = seed, at_once

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Explain what the model answers to these arguments; see `Attribution`."""
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
                wide = torch.promote_types(part.dtype, torch.float32)  # many halves would lose the last ones
                summed = part.unflatten(1, (copies, -1)).sum(1, dtype=wide)
                total[name] = total[name] + summed if name in total else summed
                kinds[name] = part.dtype
        several = isinstance(self.attribution.target, Sequence)
        means = {name: ((t if several else t[0]) / self.samples).to(kinds[name]) for name, t in total.items()}
        return means[""] if isinstance(self.attribution.wrt, str) else means

    @property
    def where(self) -> str:
        """The selector of what the noise is added to."""
        wrt = self.attribution.wrt
        return self.attribution.method().noisy or (wrt if isinstance(wrt, str) else ", ".join(wrt))

    def _settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Target], int]:
        """Ask the model once without noise: for the classes to explain in all copies, and the number of samples."""
        sizes: list[int] = []

        def measure(value: Tensor) -> None:
            if value.is_floating_point() and value.dim():
                sizes.append(len(value))

        given = self.attribution.target
        with undisturbed(self.attribution.model), torch.no_grad(), session() as s:
            s.hook(self.attribution.model, self.where, measure)
            output = self.attribution.model(*args, **kwargs)
            s.end(quiet=True)
        if not sizes:
            raise AttributionError(f'there is nothing to add noise to: "{self.where}" holds no floating-point tensor')
        return [settled(output, one) for one in (given if isinstance(given, Sequence) else [given])], sizes[0]


def _for_each(target: Target, n: int, copies: int) -> Target:
    """The target for so many copies of the samples: a function is asked about each copy, as it is about the samples."""
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
            (score(leaves.put(output, part), one) for part in parts[1:]), score(leaves.put(output, parts[0]), one)
        )

    return together


def _repeated(given: tuple[tuple[Any, ...], dict[str, Any]], n: int, copies: int) -> Any:
    """The arguments with every tensor that has a row a sample repeated."""
    if copies == 1:
        return given
    found = [(name, t) for name, t in leaves.find(given) if t.dim() and len(t) == n]
    return leaves.put(given, {name: t.repeat(copies, *[1] * (t.dim() - 1)) for name, t in found})


def smoothgrad(
    attribution: Attribution, *, samples: int = 25, noise: float = 0.15, seed: int = 0, at_once: int = 1
) -> Smoothed:
    """Average an attribution over noisy copies of the input, such as ``smoothgrad(saliency(model))(images)``.

    Smilkov, Thorat, Kim, Viégas and Wattenberg, "SmoothGrad: removing noise by adding noise", 2017. The class with the
    highest score is that of the input without noise. The noise has a generator of its own.

    Args:
        attribution: What `gradient`, `saliency`, `guided_backprop`, `deconvnet` or `grad_cam` made.
        samples: How many copies.
        noise: The standard deviation of the noise, as a share of each sample's range of values.
        seed: Of the noise.
        at_once: How many copies go through the model in one batch; every argument that has a row a sample is repeated.
    """
    if samples < 1 or at_once < 1 or noise < 0:
        raise AttributionError(
            f"smoothgrad(samples={samples}, noise={noise}, at_once={at_once}): there must be at least one copy, at "
            "least one at once, and noise of 0 or more"
        )
    return Smoothed(attribution, samples, noise, seed, at_once)
