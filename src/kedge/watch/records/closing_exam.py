"""The exam at the end of a training: parameters and buffers that are not finite then."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge import native
from kedge.native import reductions
from kedge.sites.leaves import has_memory, own_part
from kedge.store.events import BadTensor, NonfiniteAtEndEvent
from kedge.torch_internals import kernels, modes
from kedge.torch_internals.module_tables import buffers_in, modules_in
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.roots import RootModule
from kedge.watch.models.slots import BufferSlot, holder

_MOST_NAMED = 16
"""Most tensors that the event names."""


class ClosingExam:
    """Looks at every trained parameter, and at the buffers of trained models, at the end.

    That is the end of the run, or of the life of a model.

    The budget has no say in it: it reads each number once, and without it a run could end with a
    NaN that no measured step saw. A buffer that was not finite when its model was first called is
    left out: masks hold infinities by design, and observers of ranges begin with them.

    Args:
        places: The watched parameters.
        step: Returns the number of the current step.
    """

    def __init__(self, places: WatchedParameters, step: Callable[[], int]) -> None:
        self._places = places
        self._step = step
        self._buffers: dict[int, list[tuple[str, BufferSlot]]] = {}
        self._finalizers: list[weakref.finalize[Any, Any]] = []
        self._notes: list[NonfiniteAtEndEvent] = []

    def begin(
        self, module: nn.Module, root: RootModule, examine: Callable[[RootModule], None]
    ) -> None:
        """Note a root at its first call.

        Args:
            module: The root's module.
            root: The root.
            examine: Calls `examine` of this object, shielded; called when the module is deleted, as
                when the function that trained it returns. The modules inside still
                exist then; its own parameters are found in its optimizers.
        """
        buffers = list(buffers_in(module).items())
        bad = {name for name, _, _ in _not_finite(buffers)}
        inside = modules_in(module)
        self._buffers[root.index] = [
            (name, BufferSlot(*holder(inside, name))) for name, _ in buffers if name not in bad
        ]
        finalizer = weakref.finalize(module, examine, root)
        finalizer.atexit = False
        self._finalizers.append(finalizer)

    def examine(self, root: RootModule) -> None:
        """Look at a root whose module is about to be deleted."""
        mine = [place for place in self._places if place.root is root]
        if not root.optimizers and all(place.order is None for place in mine):
            return  # it was never trained

        parameters = _living((place.site.path, place.param) for place in mine)
        bad = [
            BadTensor(path=path, of="param", nan=nan, inf=inf)
            for path, nan, inf in _not_finite(parameters)
        ]
        buffers = _living(self._buffers.pop(root.index, ()))
        bad += [
            BadTensor(path=root.label(name), of="buffer", nan=nan, inf=inf)
            for name, nan, inf in _not_finite(buffers)
        ]
        if bad:
            named = tuple(bad[:_MOST_NAMED])
            note = NonfiniteAtEndEvent(step=self._step(), count=len(bad), tensors=named)
            self._notes.append(note)

    def end(self, roots: Iterable[RootModule]) -> list[NonfiniteAtEndEvent]:
        """Look at the roots that still exist; returns an event for each with bad tensors."""
        for root in roots:
            self.examine(root)
        return self._notes

    def close(self) -> None:
        """Take no more notice of models that are deleted."""
        for finalizer in self._finalizers:
            finalizer.detach()


def _living(
    named: Iterable[tuple[str, Callable[[], Tensor | None]]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor that still stands in its place, with its name."""
    for name, find in named:
        tensor = find()
        if tensor is not None:
            yield name, tensor


def _not_finite(named: Iterable[tuple[str, Tensor]]) -> list[tuple[str, int, int]]:
    """Return the name, the NaN and the infinities of each tensor that is not finite."""
    suspects: list[tuple[str, Tensor]] = []
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, value in _readable(named):
        if not value.is_cpu:
            by_device.setdefault(value.device, []).append((name, value))
        elif native.all_finite_and_norm([value])[1]:
            suspects.append((name, value))
    for pairs in by_device.values():
        norms = _norms([value for _, value in pairs])
        suspects += [p for p, norm in zip(pairs, norms, strict=True) if not math.isfinite(norm)]
    counted = ((name, int(v.isnan().sum()), int(v.isinf().sum())) for name, v in suspects)
    return [(name, nan, inf) for name, nan, inf in counted if nan or inf]


def _norms(values: Iterable[Tensor]) -> list[float]:
    """Return the norms of tensors of one device, with one wait, and no memory there but for these."""
    norms = kernels.wide_norms([reductions.real(value) for value in values])
    found: list[float] = torch.stack(list(norms)).tolist()
    return found


def _readable(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in named:
        if is_lazy(tensor) or modes.is_fake(tensor) or tensor.is_meta:
            continue
        value = own_part(tensor.detach())
        is_number = value.is_floating_point() or value.is_complex()
        is_plain = value.layout is torch.strided and not value.is_quantized
        if is_number and is_plain and has_memory(value):
            yield name, value
