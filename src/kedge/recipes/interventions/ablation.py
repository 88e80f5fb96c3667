"""Ablation: a model's output without a part of its values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kedge.calls.arguments import called_as, described
from kedge.errors import InterventionError
from kedge.flow import Act, Event, as_act
from kedge.hooks.handle import Hooked
from kedge.hooks.session import hook, session
from kedge.recipes.interventions.positions import Positions, mask
from kedge.recipes.model_run import (
    name_of,
    preserved_state,
    run,
    warn_of_training,
    without_call,
)
from kedge.sites import leaves
from kedge.sites.select import Selectors
from kedge.torch_internals.accelerators import with_doubles

_PASSES = 16
By: TypeAlias = float | Tensor | Callable[..., Tensor]


@called_as('recipes.ablate(model, "layer4", positions=[3], dim=1)')
def ablate(
    model: nn.Module,
    sites: Selectors,
    by: By = 0.0,
    *,
    positions: Positions = None,
    dim: int = 1,
) -> Hooked[Any]:
    """Replace values in a model by zeros, means or other values, to see what it does without them.

    Args:
        model: The model.
        sites: A selector of the values to replace, such as ``"h.3.attn"``.
        by: A number; a tensor that broadcasts to the value; the result of `means` or `resample`; or
            any other action that returns a tensor.
        positions: The positions to replace, counted along `dim`: an index, a slice, indices or a
            mask; None for all.
        dim: The dimension of the positions: 1 for tokens and channels.

    Returns:
        The handle, used as a ``with`` block, or ended by ``remove()``.

    Examples:
        >>> with recipes.ablate(model, "relu", positions=[0, 2]):  # two channels
        ...     output = model(images)
    """
    return hook(model, sites, Ablation(by, positions, dim))


class Ablation:
    """The action of `ablate`, to attach with `kedge.hook`, for example beside other actions in one session.

    Args:
        by: The replacement; see `ablate`.
        positions: The positions to replace; see `ablate`.
        dim: The dimension of the positions; see `ablate`.
    """

    def __init__(self, by: By, positions: Positions = None, dim: int = 1) -> None:
        if not (isinstance(by, (Tensor, Real)) or callable(by)):
            raise InterventionError(
                f"ablate by {by!r}: give a number, a tensor, means, resample, "
                "or an action that returns a tensor"
            )
        self.by = by
        self.positions = positions
        self.dim = dim
        self.act: Act | None = None
        if callable(by) and not isinstance(by, Tensor):
            self.act = as_act(by)

    def __repr__(self) -> str:
        """The replacement of the value."""
        by = leaves.describe(self.by) if isinstance(self.by, Tensor) else self.by
        if self.positions is None:
            return f"Ablation({by})"
        return f"Ablation({by}, {self.positions})"

    def __call__(self, value: Tensor, event: Event) -> Tensor:
        """Return the ablated value."""
        new = self._substitute(value, event)
        if self.positions is None:
            return new
        return torch.where(mask(value, self.positions, self.dim), new, value)

    def _substitute(self, value: Tensor, event: Event) -> Tensor:
        if isinstance(self.by, Tensor):
            return _fitting(self.by, value)
        if self.act is not None:
            new = self.act(value, event)
            if not isinstance(new, Tensor):
                raise InterventionError(
                    f"{self.by!r} returned a {type(new).__name__}, "
                    "so nothing was ablated; "
                    "return a tensor"
                )
            return new

        number: Any = self.by
        holds_fractions = value.dtype.is_floating_point or value.dtype.is_complex
        if not holds_fractions and not float(number).is_integer():
            raise InterventionError(
                f"{self.by} cannot fill {leaves.describe(value)}; "
                "give a whole number, or name one value, such as out[0]"
            )
        return torch.full_like(value, number)


def _fitting(new: Tensor, value: Tensor) -> Tensor:
    """Return a tensor with a value's shape, dtype and device; the program may work on it in place."""
    try:
        return torch.empty_like(value).copy_(new)
    except RuntimeError as error:
        raise InterventionError(
            f"{leaves.describe(new)} does not broadcast to the value, "
            f"{leaves.describe(value)}; "
            "average it over the dimensions in which they differ, "
            "such as means(..., over=(0, 1)) for samples and positions"
        ) from error


class Means:
    """Mean values by site, as an action for `ablate`; `means` computes them.

    Attributes:
        over: The dimensions that were averaged over; None for all but the last.
        sums: For each site the sum in float64, and the number of values.
    """

    def __init__(self, over: Sequence[int] | None) -> None:
        self.over = over
        self.sums: dict[str, tuple[Tensor, int]] = {}

    def take(self, value: Tensor, event: Event) -> None:
        """Action that adds a value to the sum of its site."""
        if event.recompute or not value.is_floating_point():
            return
        name = name_of(event)
        dims = _dimensions(value, self.over)
        part = _summed(with_doubles(value.detach()), dims)
        count = torch.Size(value.shape[d] for d in dims).numel()
        if name not in self.sums:
            self.sums[name] = part, count
            return
        total, before = self.sums[name]
        if total.shape != part.shape:
            raise InterventionError(
                f"{name} gives means of the shape {list(total.shape)}, "
                f"then of {list(part.shape)}: "
                "average over the dimension that varies as well, "
                "as over=(0, 1) does for positions"
            )
        self.sums[name] = total + part, before + count

    def __getitem__(self, site: str) -> Tensor:
        """The mean of one site, in float64, with a 1 for each dimension that was averaged.

        Raises:
            InterventionError: If there is none.
        """
        wanted = (site, f"{site}:out")
        names = [name for name in self.sums if name in wanted or without_call(name) in wanted]
        if len(names) != 1:
            found = ", ".join(names or self.sums) or "none"
            raise InterventionError(f'"{site}" matches {len(names)} means; there are {found}')
        total, count = self.sums[names[0]]
        return total / count

    def __call__(self, value: Tensor, event: Event) -> Tensor:
        """Return the mean of the site."""
        return _fitting(self[name_of(event)], value)

    def __repr__(self) -> str:
        """A short name for messages."""
        return f"means of {len(self.sums)} sites"


def _summed(value: Tensor, dims: tuple[int, ...]) -> Tensor:
    if not dims:  # which PyTorch takes for all of them
        return value.to(torch.float64, copy=True)
    return value.sum(dims, keepdim=True, dtype=torch.float64)


def _dimensions(value: Tensor, over: Sequence[int] | None) -> tuple[int, ...]:
    if over is None:
        return tuple(range(value.dim() - 1))
    if any(not -value.dim() <= d < value.dim() for d in over):
        raise InterventionError(
            f"over={tuple(over)}: the value is {leaves.describe(value)}, "
            "which has no such dimension"
        )
    return tuple(dict.fromkeys(d % value.dim() for d in over))


@called_as('recipes.means(model, "layer4", batches)')
def means(
    model: nn.Module,
    sites: Selectors,
    inputs: Iterable[Any],
    *,
    over: int | Sequence[int] | None = 0,
) -> Means:
    """Compute the mean values at some sites over reference inputs, for `ablate`.

    Args:
        model: The model, in the mode for the run: usually `eval`.
        sites: A selector; each selected value gets a mean.
        inputs: Batches of reference inputs: each a tensor, a tuple of arguments, or a dict of
            keyword arguments.
        over: The dimensions to average over: 0 for samples; (0, 1) also for tokens, in sequences of
            any length; (0, 2, 3) also for the pixels of images; None for all but the last
            dimension.

    Returns:
        The means, as an action.

    Examples:
        >>> usual = recipes.means(model, "relu", [images])
        >>> with recipes.ablate(model, "relu", usual):
        ...     output = model(images)
    """
    warn_of_training(model)
    if isinstance(inputs, (Tensor, Mapping, str)):
        raise InterventionError(
            f"the inputs are {leaves.describe(inputs)}, "
            "of which each row or key would be a batch; "
            "give a list of batches, such as [inputs]"
        )
    if isinstance(over, int):
        over = [over]
    found = Means(over)
    with preserved_state(model), torch.no_grad(), session() as s:
        hooked = s.hook(model, sites, found.take)
        for given in inputs:
            run(model, given)
        ledger = str(hooked.ledger())
        s.end(quiet=True)
    if not found.sums:
        raise InterventionError(f'no floating-point value was seen at "{sites}": {ledger}')
    return found


class Resample:
    """An action that replaces each sample's value by that of another one; made by `resample`."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.others: dict[tuple[int, str, int], tuple[Tensor, set[str]]] = {}

    def __call__(self, value: Tensor, event: Event) -> Tensor:
        """Return the values of other samples; all sites of one forward use the same other samples."""
        n = len(value) if value.dim() else 1
        if n < 2:
            raise InterventionError(
                "resample takes values from other samples of the batch, "
                f"and here is one: {leaves.describe(value)}"
            )
        now = event.pass_, event.replica, n
        name = name_of(event)
        if now in self.others and not event.recompute:
            _, names = self.others[now]
            if name in names:
                del self.others[now]  # of another block, whose passes were counted from 0 as well
        if now not in self.others:
            order = torch.randperm(n, generator=self.generator)
            others = torch.empty_like(order).scatter_(0, order, order.roll(1))
            self.others[now] = others, set()
            # A recompute, in a backward, asks for those of its forward again.
            if len(self.others) > _PASSES:
                del self.others[next(iter(self.others))]

        others, names = self.others[now]
        names.add(name)
        return value[others.to(value.device)]

    def __repr__(self) -> str:
        """A short name for messages."""
        return "resample()"


@called_as("recipes.resample(seed=0)")
def resample(seed: int = 0) -> Resample:
    """Replace each sample's value by that of another sample of its batch: an action for `ablate`.

    A sample never gets its own value. Each forward draws other samples, from a generator of its
    own.

    Args:
        seed: The seed of the generator.

    Returns:
        The action.

    Examples:
        >>> with recipes.ablate(model, "relu", recipes.resample(seed=0)):
        ...     output = model(images)
    """
    if not isinstance(seed, int):
        raise InterventionError(
            f"resample(seed={described(seed)}): seed is a whole number; "
            "the model and the place are arguments of ablate, as in "
            'ablate(model, "layer4", resample())'
        )
    return Resample(seed)
