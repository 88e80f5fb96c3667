"""What an optimizer is about to do, and what it did: gradients, parameters, and how much a step changed them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from torch import Tensor, nn
from torch.optim import Optimizer

from kedge.hooks.lookout import is_finite
from kedge.hooks.pace import Level
from kedge.hooks.roots import Gauge, Parts, Root
from kedge.sites.leaves import own_part
from kedge.sites.site import Site
from kedge.store.exponents import spacing
from kedge.torch_internals import kernels

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
        found = [(site, p.grad) for site, p in zip(self.grads, self.params, strict=True) if p.grad is not None]
        dense = [(site, grad) for site, grad in found if not grad.is_sparse]
        return [site for site, _ in dense], [grad.detach() for _, grad in dense]


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
        self._before: weakref.WeakKeyDictionary[Optimizer, list[list[Tensor]]] = weakref.WeakKeyDictionary()

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
            self._before[optimizer] = [[sample(p).clone() for p in each.params] for each in held]
        elif level is Level.LOOK and not spoiled and self.glance(optimizer):
            return
        for each in held:
            sites, grads = each.graded()
            # In full steps the gradients themselves are measured when backward makes them, where that can be seen.
            light: Parts = "all" if spoiled else "bad"
            parts: Parts = light if level is not Level.FULL else "all" if each.spread else "none"
            found = bool(grads) and self.meter.add(sites, self.step(), grads, each.total, parts=parts)
            if level is Level.FULL or spoiled or found:
                self.meter.add(each.sites, self.step(), [p.detach() for p in each.params])

    def after(self, optimizer: Optimizer) -> None:
        """Measure how far some elements of each parameter have gone."""
        before = self._before.pop(optimizer, None)
        for each, old in zip(self._held.get(optimizer, ()), before or (), strict=False):
            changes = kernels.differences([sample(p) for p in each.params], old) if old else []
            self.meter.add(each.changes, self.step(), list(changes))

    def holds(self, optimizer: Optimizer) -> bool:
        """Tell whether an optimizer holds a parameter that is watched."""
        return any(self.place(param) is not None for param in _params(optimizer))

    def _learn(self, optimizer: Optimizer) -> list[Held]:
        by_root: dict[int, Held] = {}
        for param in _params(optimizer):
            placed = self.place(param)
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


def sample(param: Tensor) -> Tensor:
    """Up to 1,024 elements of a parameter, evenly spread and always the same."""
    flat = own_part(param).detach().reshape(-1)
    return flat[:: spacing(flat.numel(), _SAMPLE)]


def _params(optimizer: Optimizer) -> Iterable[nn.Parameter]:
    return (p for group in optimizer.param_groups for p in group["params"])
