"""What an optimizer is about to do, and what it did: gradients, parameters, and how much a step changed them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from kedge import native
from kedge.hooks.lookout import is_finite
from kedge.hooks.pace import Level
from kedge.hooks.roots import Gauge, Parts, Root
from kedge.sites.leaves import own_part
from kedge.sites.site import Site
from kedge.store.exponents import spacing

_SAMPLE = 1024
_SENTINELS = 4
_SENTINEL_SIZE = 4096


@dataclass
class Held:
    """The watched parameters of one root that an optimizer holds, each with the sites that it is recorded under."""

    total: Site
    params: list[nn.Parameter] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    grads: list[Site] = field(default_factory=list)
    changes: list[Site] = field(default_factory=list)

    def add(self, param: nn.Parameter, site: Site) -> None:
        """Take in a parameter."""
        self.params.append(param)
        self.sites.append(site)
        self.grads.append(replace(site, kind="param.grad"))
        self.changes.append(replace(site, kind="update"))

    @property
    def spread(self) -> bool:
        """Whether they are spread over several processes; hooks on such parameters do not fire."""
        return all(own_part(p) is not p for p in self.params)

    def graded(self) -> tuple[list[Site], list[Tensor]]:
        """The gradients that are there and dense, and their sites."""
        found = [p.grad for p in self.params]
        dense = [grad for grad in found if grad is not None and not grad.is_sparse]
        if len(dense) == len(found):
            return self.grads, dense
        pairs = zip(self.grads, found, strict=True)
        return [site for site, grad in pairs if grad is not None and not grad.is_sparse], dense


class Updates:
    """Measures around the steps of all optimizers.

    Args:
        meter: What measures.
        step: Gives the step under way.
        place: Gives the site and the root of a parameter; None where it is not watched.

    Attributes:
        sees: The last time it was asked for, there were gradients to glance at.
    """

    def __init__(
        self, meter: Gauge, step: Callable[[], int], place: Callable[[nn.Parameter], tuple[Site, Root] | None]
    ) -> None:
        self.meter, self.step, self.place = meter, step, place
        self.sees = True
        self._held: weakref.WeakKeyDictionary[Optimizer, list[Held]] = weakref.WeakKeyDictionary()
        self._sentinels: weakref.WeakKeyDictionary[Optimizer, list[nn.Parameter]] = weakref.WeakKeyDictionary()
        self._before: weakref.WeakKeyDictionary[Optimizer, list[Samples]] = weakref.WeakKeyDictionary()
        self._learned: weakref.WeakKeyDictionary[Optimizer, list[Any]] = weakref.WeakKeyDictionary()

    def before(self, optimizer: Optimizer, level: Level, *, spoiled: bool) -> None:
        """Look at gradients and parameters before they change.

        Args:
            optimizer: The optimizer that steps.
            level: How closely.
            spoiled: Something in this step is known not to be finite.
        """
        if level is Level.FULL:
            self._learn(optimizer)
        held = self._held.get(optimizer) or self._learn(optimizer)
        if level is Level.FULL:
            self._before[optimizer] = [Samples(each.params) for each in held]
        elif level is Level.LOOK and not spoiled and self.glance(optimizer):
            return
        for each in held:
            sites, grads = each.graded()
            # In full steps the gradients themselves are measured when backward makes them, where that can be seen.
            light: Parts = "all" if spoiled else "bad"
            parts: Parts = light if level is not Level.FULL else "all" if each.spread else "none"
            found = bool(grads) and self.meter.add(sites, self.step(), grads, each.total, parts=parts)
            if level is Level.FULL or spoiled or found:
                self.meter.add(each.sites, self.step(), each.params)

    def after(self, optimizer: Optimizer) -> None:
        """Measure how far some elements of each parameter have gone."""
        before = self._before.pop(optimizer, None)
        for each, old in zip(self._held.get(optimizer, ()), before or (), strict=False):
            squares = old.changes()
            if squares is not None:
                self.meter.add_squares(each.changes, self.step(), each.params, squares)
            elif changes := old.differences():
                self.meter.add(each.changes, self.step(), changes)

    def holds(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer holds a parameter that is watched."""
        return any(self.place(param) is not None for param in _params(optimizer))

    def _learn(self, optimizer: Optimizer) -> list[Held]:
        params = list(_params(optimizer))
        placed_now = [self.place(param) for param in params]
        known = [*map(id, params), *placed_now]
        if known == self._learned.get(optimizer):  # as in nearly every step
            return self._held[optimizer]
        self._learned[optimizer] = known
        by_root: dict[int, Held] = {}
        for param, placed in zip(params, placed_now, strict=True):
            if placed is not None and (param.is_floating_point() or param.is_complex()) and param.itemsize > 1:
                site, root = placed
                if root.index not in by_root:
                    by_root[root.index] = Held(Site(root.prefix, "grad.norm"))
                by_root[root.index].add(param, site)
        held = self._held[optimizer] = list(by_root.values())
        self._choose(optimizer)
        return held

    def _choose(self, optimizer: Optimizer) -> None:
        """Choose small parameters of the first layers and the last, of those that have a gradient."""
        held = [p for each in self._held.get(optimizer, ()) for p in each.params]
        small = [p for p in held if p.numel() <= _SENTINEL_SIZE and p.grad is not None]
        self._sentinels[optimizer] = small[: _SENTINELS // 2] + small[_SENTINELS // 2 :][-_SENTINELS // 2 :]

    def glance(self, optimizer: Optimizer) -> bool | None:
        """Look whether some small gradients are finite; None where there are none, or reading them would wait for a device."""
        grads = self._sentinel_grads(optimizer)
        if not grads:  # those that were chosen get none any more, or not yet
            self._choose(optimizer)
            grads = self._sentinel_grads(optimizer)
        self.sees = bool(grads)
        return all(map(is_finite, grads)) if grads else None

    def tell(self, optimizer: Optimizer) -> None:
        """Measure all gradients of a step that has ended."""
        for each in self._held.get(optimizer) or self._learn(optimizer):
            sites, grads = each.graded()
            if grads:
                self.meter.add(sites, self.step(), grads, each.total, parts="all")

    def _sentinel_grads(self, optimizer: Optimizer) -> list[Tensor]:
        """Some small gradients, of the first layers and the last: a value that is not finite reaches them all."""
        there = [p.grad for p in self._sentinels.get(optimizer, ()) if p.grad is not None and not p.grad.is_sparse]
        grads = [own_part(grad) for grad in there]
        return grads if all(grad.is_cpu for grad in grads) else []


class Samples:
    """Some elements of each of many parameters, as they were."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        self.numbers = np.empty(_SAMPLE * len(params))
        self.counts = native.draw_many(self.numbers, params, _SAMPLE)
        self.tensors = [] if all(self.counts) else [sample(param).clone() for param in params]

    def changes(self) -> tuple[NDArray[np.int64], NDArray[np.float64]] | None:
        """How many elements each parameter has here, and the sum of the squares of their changes; None if PyTorch has them."""
        if self.tensors or not self.counts:
            return None
        now = np.empty_like(self.numbers)
        if native.draw_many(now, self.params, _SAMPLE) != self.counts:
            return None
        counts = np.array(self.counts)
        used = int(counts.sum())
        with np.errstate(all="ignore"):
            change = now[:used] - self.numbers[:used]
            return counts, np.add.reduceat(change * change, np.cumsum(counts) - counts)

    def differences(self) -> list[Tensor]:
        """The changes themselves, as tensors."""
        return list(torch._foreach_sub([sample(param) for param in self.params], self.tensors)) if self.tensors else []


def sample(param: Tensor) -> Tensor:
    """Up to 1,024 elements of a parameter, evenly spread and always the same."""
    flat = own_part(param).detach().reshape(-1)
    return flat[:: spacing(flat.numel(), _SAMPLE)]


def _params(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])
