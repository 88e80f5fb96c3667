"""Parameters that change without an optimizer.

# Note [Trained by hand]
A program may change its parameters itself, as by ``p.data.add_(p.grad, alpha=-rate)``, or by an
optimizer that is none of PyTorch's. No hook tells of that. So at the end of a backward pass of a
measured step, some elements of each parameter that has a gradient and is in no optimizer are
copied, and compared when the next pass begins: by then the program has changed them. A change
belongs to the step of the earlier pass. On a device the result is read at a later pass, when it has
arrived.

Gradients that were not cleared are known by their values: between two passes the program may clip
them, so that a change says nothing. If at the beginning of every pass since one update up to the
next, those that are yet to arrive were not zero, the second update used those of the first.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from kedge.actions.measure.meter import Meter
from kedge.actions.measure.table import Departures, HostCopy
from kedge.by_identity import ByIdentity
from kedge.store.events import GradsKeptEvent
from kedge.torch_internals.graph_task import graph_task
from kedge.watch.models.optimizers import Optimizers, TrainedByHand
from kedge.watch.models.parameters import ParameterSites, WatchedParameters
from kedge.watch.models.roots import RootModule
from kedge.watch.records.curves import Curves
from kedge.watch.records.facts.kept_gradients import CHECKED, can_compare
from kedge.watch.records.optimizer_updates import HeldParameters, Updates
from kedge.watch.records.samples import Samples


@dataclass
class _Before:
    """A model's parameters after a backward pass, to be compared when the next one begins."""

    step: int
    held: HeldParameters
    samples: Samples


@dataclass
class _Change:
    """The changes of a model's parameters since a backward pass; with a copy if they are on a device."""

    step: int
    held: HeldParameters
    counts: Sequence[int]
    squares: Sequence[float | Tensor]
    copy: HostCopy | None = None

    def is_known(self) -> bool:
        """Whether it can be read without waiting."""
        return self.copy is None or self.copy.ready()

    def changed(self) -> list[nn.Parameter]:
        """Return the parameters that have changed."""
        numbers: Sequence[float | Tensor] = self.squares
        if self.copy is not None:
            numbers = self.copy.numpy().tolist()
        pairs = zip(self.held.params, numbers, strict=True)
        return [param for param, number in pairs if number != 0]


@dataclass
class _Gradients:
    """The gradients of a model since its last update.

    Attributes:
        of: The parameters that it changed, those whose gradients arrive last first.
        checked: How many gradients were looked at when a pass began.
        kept: How many of them were not zero at the beginning of any pass; None before the first.
    """

    of: list[ParameterSites] = field(default_factory=list)
    checked: int = 0
    kept: int | None = None


class UpdatesByHand:
    """Measures the changes that a program makes without an optimizer; see Note [Trained by hand].

    Args:
        updates: Measures gradients and parameters.
        curves: Receives the changes.
        optimizers: The program's optimizers.
        places: The watched parameters.
        step: Returns the number of the current step.
    """

    def __init__(
        self,
        updates: Updates,
        curves: Curves,
        optimizers: Optimizers,
        places: WatchedParameters,
        step: Callable[[], int],
    ) -> None:
        self._updates = updates
        self._meter: Meter = updates.meter
        self._curves = curves
        self._optimizers = optimizers
        self._places = places
        self._step = step
        self._trained: dict[int, TrainedByHand] = {}
        self._before: ByIdentity[nn.Module, _Before] = ByIdentity()
        self._changes: list[_Change] = []
        self._gradients: dict[int, _Gradients] = {}

    @property
    def waits(self) -> bool:
        """Whether the beginning of the next backward pass is of interest."""
        return bool(self._before or self._changes)

    def backward_ended(self, task: int, elsewhere: Container[int], *, measured: bool) -> None:
        """Measure what no optimizer holds.

        Args:
            task: The number of the pass.
            elsewhere: The ids of the parameters that an optimizer holds.
            measured: Whether the step is measured.
        """
        for root, params in self._unheld(task, elsewhere):
            module = root.module()
            is_trained = root.index in self._trained
            if module is None or not (measured or is_trained):
                continue
            held = self._updates.hold(module, params)
            if held is None:
                continue
            # Beside an optimizer, what is in none of them is measured only once it has changed.
            if is_trained or not self._optimizers.entries:
                self._updates.by_hand(module, held)
            if measured:
                self._before[module] = _Before(self._step(), held, Samples(held.params))

    def _unheld(
        self, task: int, elsewhere: Container[int]
    ) -> Iterator[tuple[RootModule, list[nn.Parameter]]]:
        """Yield the roots that a pass has reached, each with its parameters that no optimizer holds."""
        found: dict[int, list[ParameterSites]] = {}
        for place in self._places:
            is_unheld = place.held is None and place.id not in elsewhere
            if is_unheld and place.wanted and place.order is not None:
                found.setdefault(place.root.index, []).append(place)
        for places in found.values():
            if any(place.task == task for place in places):
                params = [p for place in places if isinstance(p := place.param(), nn.Parameter)]
                yield places[0].root, params

    def backward_began(self, *, measured: bool) -> list[GradsKeptEvent]:
        """Look at what the program has changed since the last pass; returns the events."""
        self._compare()
        notes = self._look()
        if measured:
            task = graph_task()
            for gradients in self._gradients.values():
                _look_at(gradients, task)
        else:
            self._gradients.clear()
        return notes

    def end(self) -> list[GradsKeptEvent]:
        """Look at the last changes, waiting for devices; returns the events."""
        self._compare()
        return self._look(wait=True)

    def _compare(self) -> None:
        """Compare the parameters with what they were after the last pass."""
        compared = list(self._before.values())
        self._before.clear()
        for before in compared:
            if self._step() - before.step > 1:
                continue  # a pass in between was not seen
            counts, squares = before.samples.changes()
            change = _Change(before.step, before.held, counts, squares)
            if any(isinstance(each, Tensor) for each in squares):
                change.copy = _sent(squares)
            self._changes.append(change)

    def _look(self, *, wait: bool = False) -> list[GradsKeptEvent]:
        notes: list[GradsKeptEvent] = []
        while self._changes and (wait or self._changes[0].is_known()):
            change = self._changes.pop(0)
            changed = self._unheld_by_now(change.changed())
            if changed:
                notes += self._note(change, changed)
        return notes

    def _unheld_by_now(self, changed: list[nn.Parameter]) -> list[nn.Parameter]:
        """Return the parameters that no optimizer holds; a new one may have made its first step since the pass."""
        return [param for param in changed if not self._is_held(param)]

    def _is_held(self, param: nn.Parameter) -> bool:
        place = self._places.of(param)
        return place is not None and place.held is not None

    def _note(self, change: _Change, changed: list[nn.Parameter]) -> list[GradsKeptEvent]:
        """Record the changes that were made in one step."""
        root = change.held.root
        trained = self._trained.get(root.index)
        if trained is None:
            trained = self._trained[root.index] = self._optimizers.add_by_hand(root.index)
            root.optimizers.add(trained.index)
            root.by_hand = True
        trained.steps += 1
        places = list(self._places.among(changed))
        for place in places:
            place.by_hand = True
        trained.parameters = max(trained.parameters, len(changed))

        params = dict(enumerate(change.held.params))
        seats = change.held.seats(self._meter, "update", params)
        for seat, count, squares in zip(seats, change.counts, change.squares, strict=True):
            self._curves.add_norm(change.step, seat.id, count, squares, measured=True)

        gradients = self._gradients.get(root.index)
        notes = []
        if gradients is not None and gradients.kept:
            note = GradsKeptEvent(
                step=change.step,
                optimizer=trained.index,
                checked=gradients.checked,
                kept=gradients.kept,
            )
            notes.append(note)
        places.sort(key=lambda place: -(place.order or 0))
        self._gradients[root.index] = _Gradients(places)
        return notes

    def release(self) -> None:
        """Drop what is kept of the parameters, at the end of the watch."""
        self._before.clear()
        self._changes.clear()
        self._gradients.clear()


def _look_at(gradients: _Gradients, task: int) -> None:
    """Count the gradients that are there though the pass that begins has not made them."""
    checked = kept = 0
    for place in gradients.of:
        param = place.param()
        if param is None or place.task == task:
            continue
        checked += 1
        kept += param.grad is not None and can_compare(param.grad)
        if checked == CHECKED:
            break
    gradients.checked = checked
    if gradients.kept is None:
        gradients.kept = kept
    else:
        gradients.kept = min(gradients.kept, kept)


def _sent(squares: Iterable[float | Tensor]) -> HostCopy:
    """Send numbers, some of them on a device, to the host."""
    numbers = list(squares)
    device = next(each.device for each in numbers if isinstance(each, Tensor))
    stacked = torch.stack([torch.as_tensor(each, device=device).float() for each in numbers])
    departures = Departures()
    copy = departures.add(stacked)
    departures.send()
    return copy
