"""Parameters of trained models that were never to be trained, and whether they are as fresh layers have them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from kedge.actions.measure.table import Departures, HostCopy
from kedge.store.events import FrozenEvent, FrozenPart
from kedge.torch_internals import modes
from kedge.torch_internals.module_tables import parameters_in
from kedge.watch.models.parameters import WatchedParameters
from kedge.watch.models.roots import RootModule
from kedge.watch.records.samples import sample

_NAMED = 50
"""Most parts of a model in a note."""
_LEAST = 256
"""Least elements of which the spread is judged."""
_EVEN = (1.6, 1.9)
"""The largest magnitude of evenly spread numbers, in root mean squares.

It is the root of 3, and differs a little for 256 elements.
"""


class FrozenParameters:
    """Finds trained models of which most elements have requires_grad False.

    # Note [Fresh layers]
    PyTorch draws the weights of most layers evenly between two bounds. Training does not leave them
    so: a few become much larger than the rest. So evenly spread weights have never been trained.
    The opposite is not known: other initialisations are bell-shaped, as trained weights may be.

    Args:
        step: Returns the number of the current step.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._notes: dict[int, FrozenEvent] = {}
        self._spreads: dict[int, dict[str, tuple[int, HostCopy]]] = {}

    def compare(self, roots: Iterable[RootModule], places: WatchedParameters) -> None:
        """Look at the models as they are now."""
        for root in roots:
            module = root.module()
            if module is None or not root.optimizers:
                continue
            own = {n: p for n, p in parameters_in(module).items() if not is_lazy(p)}
            frozen = {n: p for n, p in own.items() if _was_never_trainable(p, places)}
            elements = sum(p.numel() for p in own.values())
            count = sum(p.numel() for p in frozen.values())
            if 2 * count <= elements:
                self._notes.pop(root.index, None)
                continue

            since = self._step()
            before = self._notes.get(root.index)
            if before is not None:
                since = before.step
            self._look(root.index, frozen)
            self._notes[root.index] = FrozenEvent(
                step=since,
                root=root.index,
                frozen=count,
                elements=elements,
                beside=_beside(own, frozen),
                parts=tuple(_parts(root, own, frozen)[:_NAMED]),
            )

    def notes(self, roots: Iterable[RootModule], places: WatchedParameters) -> list[FrozenEvent]:
        """Return the notes at the end of the run."""
        self.compare(roots, places)
        notes = []
        for index, note in self._notes.items():
            spreads = self._spreads.get(index, {}).values()
            low, high = _EVEN
            even = sum(n for n, spread in spreads if low < float(spread.numpy()[0]) < high)
            weights = sum(n for n, _ in spreads)
            notes.append(replace(note, even=even, weights=weights))
        return notes

    def _look(self, root: int, frozen: Mapping[str, Tensor]) -> None:
        """Take the spread of frozen weights, once of each: they do not change."""
        known = self._spreads.setdefault(root, {})
        for name in known.keys() - frozen.keys():
            del known[name]
        departures = Departures()
        for name, param in frozen.items():
            if name in known or not _can_judge(param):
                continue
            drawn = sample(param).float()
            spread = drawn.abs().amax() / drawn.square().mean().sqrt()
            known[name] = param.numel(), departures.add(spread.reshape(1))
        departures.send()


def _was_never_trainable(param: Tensor, places: WatchedParameters) -> bool:
    if param.requires_grad:
        return False
    place = places.of(param)
    return place is None or not (place.trainable or place.times or place.by_hand)


def _can_judge(param: Tensor) -> bool:
    """Whether a parameter is a dense weight with enough elements here."""
    if param.dim() < 2 or param.layout is not torch.strided or not param.is_floating_point():
        return False
    return modes.has_data(param) and sample(param).numel() >= _LEAST


def _beside(own: Mapping[str, Tensor], frozen: Mapping[str, Tensor]) -> int:
    """Return how many frozen elements stand in a module that has trained ones too, or in one of its parts.

    Those of adapters do; the whole model does not count as such a module.
    """
    trained = set()
    for name in own.keys() - frozen.keys():
        path = name.rpartition(".")[0]
        while path:
            trained.add(path)
            path = path.rpartition(".")[0]
    found = 0
    for name, param in frozen.items():
        owner = name.rpartition(".")[0]
        if owner in trained or owner.rpartition(".")[0] in trained:
            found += param.numel()
    return found


def _parts(
    root: RootModule, own: Mapping[str, Tensor], frozen: Mapping[str, Tensor]
) -> list[FrozenPart]:
    """Return the elements of each child of a root, and how many of them are frozen."""
    elements: dict[str, int] = {}
    still: dict[str, int] = {}
    for name, param in own.items():
        child = name.partition(".")[0]
        elements[child] = elements.get(child, 0) + param.numel()
        if name in frozen:
            still[child] = still.get(child, 0) + param.numel()
    return [FrozenPart(root.label(c), n, still.get(c, 0)) for c, n in elements.items()]
