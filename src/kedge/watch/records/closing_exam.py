"""The exam at the end of a watch: parameters and buffers that are not finite then, whatever was measured before."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge import native
from kedge.sites.leaves import has_memory, own_part
from kedge.torch_internals import modes
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.roots import RootModule

_MOST_NAMED = 16
"""Most tensors that the event names."""


class ClosingExam:
    """Looks at every trained parameter, and at the buffers of trained models, once at the end.

    The budget has no say in it: it reads each number once, and without it a run could end with a NaN that no measured step
    saw. A buffer that was not finite when its model was first called is left out: masks hold infinities by design, and
    observers of ranges begin with them.
    """

    def __init__(self) -> None:
        self._bad_from_the_start: weakref.WeakKeyDictionary[nn.Module, frozenset[str]]
        self._bad_from_the_start = weakref.WeakKeyDictionary()

    def begin(self, module: nn.Module) -> None:
        """Note the buffers of a root that are not finite at its first call."""
        bad = _not_finite(module.named_buffers())
        self._bad_from_the_start[module] = frozenset(name for name, _, _ in bad)

    def notes(self, step: int, roots: Iterable[RootModule], places: WatchedParameters) -> list[Mapping[str, Any]]:
        """Return the event that names what is not finite; nothing if all is finite."""
        trained = {place.root.index for place in places if place.order is not None}
        trained |= {root.index for root in roots if root.optimizers}
        parameters = (
            (place.site.path, param)
            for place in places
            if place.root.index in trained and (param := place.param()) is not None
        )
        bad = [_entry("param", *found) for found in _not_finite(parameters)]
        for root in roots:
            module = root.module()
            if module is None or root.index not in trained:
                continue
            before = self._bad_from_the_start.get(module, frozenset())
            found = _not_finite((n, b) for n, b in module.named_buffers() if n not in before)
            bad += [_entry("buffer", root.label(name), nan, inf) for name, nan, inf in found]
        if not bad:
            return []
        return [{"kind": "nonfinite-at-end", "step": step, "count": len(bad), "tensors": bad[:_MOST_NAMED]}]


def _entry(kind: str, path: str, nan: int, inf: int) -> dict[str, Any]:
    return {"path": path, "of": kind, "nan": nan, "inf": inf}


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, int, int]]:
    """Return the name, the NaN and the infinities of each tensor that is not finite."""
    readable = list(_readable(named))
    on_host = [(name, value) for name, value in readable if value.is_cpu]
    suspects = [pair for pair in on_host if native.all_finite_and_norm([pair[1]])[1]]
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, value in readable:
        if not value.is_cpu:
            by_device.setdefault(value.device, []).append((name, value))
    for pairs in by_device.values():  # one wait for each device
        sound = torch.stack([torch.isfinite(value).all() for _, value in pairs]).tolist()
        suspects += [pair for pair, finite in zip(pairs, sound, strict=True) if not finite]
    counted = ((name, int(v.isnan().sum()), int(v.isinf().sum())) for name, v in suspects)
    return [(name, nan, inf) for name, nan, inf in counted if nan or inf]


def _readable(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        if is_lazy(tensor) or modes.is_fake(tensor) or tensor.is_meta:
            continue
        value = own_part(tensor.detach())
        is_number = value.is_floating_point() or value.is_complex()
        if is_number and value.layout is torch.strided and not value.is_quantized and has_memory(value):
            yield name, value
