"""The connections of a recording's sites: modules that feed others, and modules that hold others."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from kedge.rules.recorded.once import once
from kedge.rules.recorded.roots import root_paths
from kedge.store.recording import Recording, SiteInfo


@dataclass(frozen=True)
class ModuleSites:
    """The sites of one module, as ids.

    ``position`` is its place in the order in which modules return; the modules inside it have lower
    ones. ``sources`` are the sites whose tensors it takes, None for a tensor that no watched site
    made.
    """

    path: str
    root: int
    type: str
    position: int
    ins: tuple[int, ...]
    outs: tuple[int, ...]
    grads: tuple[int, ...]
    params: tuple[int, ...]
    param_grads: tuple[int, ...]
    sources: frozenset[int | None]


@dataclass(frozen=True)
class Wiring:
    """The modules of a recording in the order in which they return."""

    sites: tuple[SiteInfo, ...]
    modules: dict[str, ModuleSites]
    heads: frozenset[str]
    "The paths of the roots."
    recording: Recording = field(repr=False, compare=False)

    def __iter__(self) -> Iterator[ModuleSites]:
        return iter(self.modules.values())

    def ancestors(self, module: ModuleSites) -> list[ModuleSites]:
        """Return the watched modules that hold this one, the nearest first."""
        path, found = module.path, []
        while path and path not in self.heads:
            path = path.rpartition(".")[0]
            if path in self.modules and self.modules[path].root == module.root:
                found.append(self.modules[path])
        return found

    def inside(self, module: ModuleSites) -> tuple[ModuleSites, ...]:
        """Return the watched modules inside this one."""
        return self._inside.get(module.path, ())

    def consumers(self, module: ModuleSites) -> list[ModuleSites]:
        """Return the modules that take this one's output unchanged; of nested ones, the innermost."""
        paths = {path for out in module.outs for path in self._takers.get(out, ())}
        taking = [m for path in paths if (m := self.modules[path]) is not module]
        innermost = []
        for taker in taking:
            inner = [other for other in self.inside(taker) if other is not module]
            if not any(other.path in paths for other in inner):
                innermost.append(taker)
        return sorted(innermost, key=lambda m: self._order[m.path])

    def returned(self, holder: ModuleSites) -> ModuleSites | None:
        """Return the module whose output a container returned unchanged; None if its own forward made its output."""
        for module in reversed(self.inside(holder)):
            if self._returns(holder, module):
                return module
        return None

    def start(self, module: ModuleSites) -> int:
        """Return the position of the first module that returns after this one was entered."""
        positions = [inner.position for inner in self.inside(module)]
        return min([module.position, *positions])

    def later(self, module: ModuleSites) -> int:
        """Return how many modules of the same root return after this one."""
        positions = self._positions[module.root]
        return len(positions) - bisect_right(positions, module.position)

    def text(self, site: int) -> str:
        """Return the text of a site."""
        return self.sites[site].site

    def _returns(self, holder: ModuleSites, module: ModuleSites) -> bool:
        """Whether a container's output may be a module's: they have the same node, gradient and figures."""
        if not holder.outs or not module.outs:
            return module is self.inside(holder)[-1]
        outer = self.sites[holder.outs[0]]
        inner = self.sites[module.outs[0]]
        if outer.node != inner.node:
            return False
        # Hooks on one tensor fire in the order of registration, the inner one first; backward
        # reaches later tensors earlier.
        if holder.grads and module.grads and holder.grads[0] < module.grads[0]:
            return False
        return have_same_figures(self.recording, outer, inner)

    @cached_property
    def has_nodes(self) -> bool:
        """Whether the nodes of the autograd graph are known."""
        return any(site.node is not None for site in self.sites)

    @cached_property
    def described(self) -> Mapping[str, Mapping[str, Any]]:
        """The recording's descriptions of the modules themselves, by path."""
        described = {}
        for root in self.recording.roots:
            for module in root.modules:
                described[module["path"]] = module
        return described

    @cached_property
    def _order(self) -> dict[str, int]:
        return {path: place for place, path in enumerate(self.modules)}

    @cached_property
    def _takers(self) -> dict[int, list[str]]:
        """The paths of the modules that take the value of each site."""
        found: dict[int, list[str]] = {}
        for module in self:
            for source in module.sources:
                if source is not None:
                    found.setdefault(source, []).append(module.path)
        return found

    @cached_property
    def _positions(self) -> dict[int, list[int]]:
        """The positions of the modules of each root, in order."""
        found: dict[int, list[int]] = {}
        for module in self:
            found.setdefault(module.root, []).append(module.position)
        return found

    @cached_property
    def _inside(self) -> dict[str, tuple[ModuleSites, ...]]:
        found: dict[str, list[ModuleSites]] = {}
        for module in self:
            for holder in self.ancestors(module):
                found.setdefault(holder.path, []).append(module)
        return {path: tuple(modules) for path, modules in found.items()}


def have_same_figures(recording: Recording, one: SiteInfo, other: SiteInfo) -> bool:
    """Whether two sites had the same figures in all steps in which both were seen equally often."""
    a = recording.rows(one)
    b = recording.rows(other)
    _, i, j = np.intersect1d(a.step, b.step, return_indices=True)
    same = a.calls[i] == b.calls[j]
    i, j = i[same], j[same]
    with np.errstate(invalid="ignore"):
        differs = (a.count[i] != b.count[j]) | (
            np.isfinite(a.sum[i]) & np.isfinite(b.sum[j]) & (a.sum[i] != b.sum[j])
        )
    return not differs.any()


@once
def wire(recording: Recording) -> Wiring:
    """Return the sites of a recording by module."""
    groups: dict[str, list[SiteInfo]] = {}
    for site in recording.sites:
        if site.kind in _KINDS:
            groups.setdefault(site.owner, []).append(site)
    found = {path: _module(path, sites) for path, sites in groups.items()}
    modules = sorted(
        (_placed(module, found) for module in found.values()), key=lambda m: m.position
    )
    heads = root_paths(recording)
    return Wiring(recording.sites, {module.path: module for module in modules}, heads, recording)


_KINDS = ("in", "out", "out.grad", "param", "param.grad")


def _placed(module: ModuleSites, found: Mapping[str, ModuleSites]) -> ModuleSites:
    """Return a module with its place in the flow: one that never fired, as in a fused call, has that of its container.

    Its parameters were seen when the optimizer first stepped, which says nothing about its place.
    """
    if module.ins or module.outs:
        return module
    path = module.path
    while path:
        path = path.rpartition(".")[0]
        holder = found.get(path)
        if holder is not None and holder.root == module.root and holder.outs:
            return replace(module, position=holder.position)
    return module


def _module(path: str, sites: Iterable[SiteInfo]) -> ModuleSites:
    kinds: dict[str, list[SiteInfo]] = {kind: [] for kind in _KINDS}
    for site in sites:
        kinds[site.kind].append(site)
    ins, outs, grads, params, param_grads = (
        tuple(site.id for site in kinds[kind]) for kind in _KINDS
    )
    named: list[SiteInfo] = []
    for kind in ("out", "in", "out.grad", "param", "param.grad"):
        named += kinds[kind]
    sources = {source for site in kinds["in"] or kinds["out"] for source in site.sources}
    # Gradients fire from the loss backwards, so without outputs their order is reversed.
    position = min(outs or ins or params, default=-min(grads or param_grads, default=0))
    return ModuleSites(
        path=path,
        root=named[0].root,
        type=named[0].type,
        position=position,
        ins=ins,
        outs=outs,
        grads=grads,
        params=params,
        param_grads=param_grads,
        sources=frozenset(sources),
    )
