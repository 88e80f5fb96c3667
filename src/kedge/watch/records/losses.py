"""The losses of a program: the tensors that each backward pass began at, by the line of the program that called it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from kedge.actions.measure.meter import Meter
from kedge.json_input.classes import as_json
from kedge.sites.site import Site
from kedge.store.events import (
    BadBackwardEvent,
    LossGraphEvent,
    LossOperationEvent,
    ProducerEvent,
    RunEvent,
)
from kedge.torch_internals import modes
from kedge.torch_internals.autograd_nodes import dimension_of
from kedge.torch_internals.source_lines import source_of
from kedge.watch.models.backward_start import BackwardStart, operation_of, programs_line
from kedge.watch.records.curves import Curves, number_of
from kedge.watch.records.gradient_checks import GradientChecks
from kedge.watch.records.loss_scaling import LossScaling, unscaled
from kedge.watch.records.producer import ProducerLines, find_behind_gradients, find_producer

_MOST_LINES = 16
"""Most lines that call backward and are kept apart."""
_LONGEST = 12
"""Most recorded nodes of a loss's graph."""
_MOST_CHANGES = 64
"""Most changes of a loss's operation that are recorded; after these it is unknown."""
_SEARCHES = 4
"""Most searches for the producer in the graph of a non-finite loss."""


class Losses:
    """Records the loss of every step.

    Args:
        meter: Has the entries of the sites.
        curves: Receives the values.
        checks: Checks gradients in skipped steps.

    Attributes:
        bad: Whether a loss of this step, or another part of it, is known to be non-finite.
        described: The operation and the program's line of each loss, by its path.
        lines: The program's line of each operation.
    """

    def __init__(self, meter: Meter, curves: Curves, checks: GradientChecks) -> None:
        self.meter, self.curves, self.checks = meter, curves, checks
        self.bad = False
        self.described: dict[str, Mapping[str, Any]] = {}
        self.lines, self._scaling = ProducerLines(), LossScaling()
        self._paths: dict[Any, str] = {}
        self._seats: dict[str, int] = {}
        self._makers: dict[str, tuple[str | None, Any]] = {}
        self._changes = 0
        self._searches = _SEARCHES
        self._found: list[ProducerEvent] = []

    def began(self, began: BackwardStart, step: int, *, measured: bool) -> list[RunEvent]:
        """Record the loss at which a backward pass began; returns the events for the recording."""
        notes: list[RunEvent] = []
        if not began.tensors or not all(map(modes.has_data, began.tensors)):
            return notes
        path, new = self._path(began)
        first = began.tensors[0]
        scale = self._scaling.scale(began)
        if new:
            _, operation = operation_of(first)
            source = None if began.frame is None else source_of(began.frame)
            self.described[path] = {"operation": operation, "source": as_json(source)}
            chain = list(chain_of(first.grad_fn))
            softmax = next((node for node in chain if "Softmax" in node.name()), None)
            dim = None if softmax is None else dimension_of(softmax)
            graph = LossGraphEvent(
                step=step,
                site=path,
                nodes=tuple(node.name() for node in chain),
                dim=dim,
                unscaled=scale is not None,
            )
            notes.append(graph)
        notes += self._changed_maker(began, path, step)
        seat = self.meter.sites.seat(Site(path, "loss"), first)
        self._seats[path] = seat.id
        bad = False
        for tensor in began.tensors:
            number = number_of(tensor)
            if number is not None and scale is not None:
                number = unscaled(number, scale)
            bad |= number is not None and self.curves.add_value(
                step, seat.id, number, measured=measured
            )
        if measured:
            self.lines.learn(began.tensors)
        if bad and self._searches > 0:
            self._searches -= 1
            found = find_producer(began, self.lines)
            if found is not None and found not in self._found:
                self._found.append(found)
                notes.append(replace(found, step=step, loss=path))
        self.bad |= bad
        return notes

    def skipped(self, loss: Tensor, number: Any, frame: FrameType, step: int) -> list[RunEvent]:
        """Record the loss of a skipped step, as `began` does but quickly; returns the events.

        Args:
            loss: The tensor, which has one element.
            number: Its value, which is finite; None if it is on a device.
            frame: That of `torch.autograd.backward`.
            step: The step.
        """
        line = programs_line(frame)
        where = None if line is None else (line.f_code, line.f_lineno)
        path = self._paths.get(where)
        if path is None or self._scaling.has_scaler:
            return self.began(BackwardStart((loss,), where, line), step, measured=False)

        if type(number) is not float:
            number = number_of(loss) if modes.has_data(loss) else None
        if number is not None:
            self.curves.add_value(step, self._seats[path], number, measured=False)
        return []

    def gradients_are_bad(
        self, began: BackwardStart, step: int, *, measured: bool
    ) -> list[RunEvent]:
        """Note that gradients of a finite loss are not, with the operation that made them so; returns the events.

        A measured step has the gradients of all modules, which say more than a mere suspicion.
        """
        if self.bad or not began.tensors:
            return []
        loss, known = self._path(began)[0], all(tensor.is_cpu for tensor in began.tensors)
        notes: list[RunEvent] = []
        if known and not measured:
            notes.append(BadBackwardEvent(step=step, loss=loss))
        if self._searches <= 0:
            return notes
        self._searches -= 1
        found = find_behind_gradients(began, self.lines)
        if found is None or found in self._found or (measured and not found.certain):
            return notes
        self._found.append(found)
        return [*notes, replace(found, step=step, loss=loss)]

    def _changed_maker(self, began: BackwardStart, path: str, step: int) -> list[RunEvent]:
        """Return the event that a loss is made by another operation, or on another line, than in the last backward.

        Its site describes the first backward alone. What makes a loss bad is often an operation of
        that step only.
        """
        first = began.tensors[0]
        made = (None if first.grad_fn is None else first.grad_fn.name(), began.where)
        known = self._makers.setdefault(path, made)
        if known == made or self._changes > _MOST_CHANGES:
            return []
        self._makers[path] = made
        self._changes += 1
        if self._changes > _MOST_CHANGES:
            return [LossOperationEvent(step=step)]
        source = None if began.frame is None else source_of(began.frame)
        return [LossOperationEvent(step=step, loss=path, node=made[0], source=source)]

    def _path(self, began: BackwardStart) -> tuple[str, bool]:
        known = self._paths.get(began.where)
        if known is not None:
            return known, False
        number = min(len(self._paths) + 1, _MOST_LINES)
        path = "loss" if number == 1 else f"loss_{number}"
        self._paths[began.where] = path
        return path, path not in self.described


def chain_of(node: Node | None) -> Iterator[Node]:
    """Yield the nodes behind a loss, along the first input of each that needs a gradient."""
    for _ in range(_LONGEST):
        if node is None:
            return
        yield node
        node = next((behind for behind, _ in node.next_functions if behind is not None), None)
