"""The losses of a program: what each backward pass began at, by the line that called it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from types import FrameType
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from kedge.actions.measure.meter import Meter
from kedge.frames import SourceLine
from kedge.json_input.classes import as_json
from kedge.sites.operation_names import plain_name
from kedge.sites.site import Site
from kedge.store.events import (
    BadBackwardEvent,
    DropoutsEvent,
    LossGraphEvent,
    LossLinesEvent,
    LossOperationEvent,
    NoWayBackEvent,
    OperationLine,
    ProducerEvent,
    RunEvent,
    SmallBatchEvent,
)
from kedge.torch_internals import modes
from kedge.torch_internals.autograd_nodes import is_leaf, shape_of_output
from kedge.torch_internals.source_lines import source_of
from kedge.watch.models.backward_start import BackwardStart, ascends, operation_of, programs_line
from kedge.watch.records.broadcasts import broadcast_in
from kedge.watch.records.curves import Arrived, Curves, number_of
from kedge.watch.records.dropouts_called import dropouts_called
from kedge.watch.records.gradient_checks import GradientChecks
from kedge.watch.records.loss_jumps import LossJumps
from kedge.watch.records.loss_scaling import LossScaling, unscaled
from kedge.watch.records.operation_lines import ProducerLines, nodes_of
from kedge.watch.records.producer import find_able, find_behind_gradients, find_producer
from kedge.watch.records.softmax_reads import SOFTMAXES, softmaxes_read
from kedge.watch.records.ways_back import without_a_way_back

_MOST_LINES = 16
"""Most lines that call backward and are kept apart."""
_LONGEST = 12
"""Most recorded nodes of a loss's graph."""
_MOST_OPERATIONS = 28
"""Most operations of a loss whose lines are recorded."""
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
        recorded: The last step of which a loss was recorded.
        has_jumped: Whether the last loss has jumped far above those before it.
        scale: What a GradScaler has multiplied the last loss by; None without one.
        last: The losses of the last backward pass; on a device they are not read. None of those
            that a GradScaler has scaled: it skips the step if they are too large.
    """

    def __init__(self, meter: Meter, curves: Curves, checks: GradientChecks) -> None:
        self.meter = meter
        self.curves = curves
        self.checks = checks
        self.bad = False
        self.described: dict[str, Mapping[str, Any]] = {}
        self.lines = ProducerLines()
        self._scaling = LossScaling()
        self._paths: dict[Any, str] = {}
        self._seats: dict[str, int] = {}
        self._makers: dict[str, tuple[str | None, Any]] = {}
        self._changes = 0
        self._searches = _SEARCHES
        self._found: list[ProducerEvent] = []
        self._able: dict[str, list[tuple[int, ProducerEvent | None]]] = {}
        self._told: set[str] = set()
        self.recorded = -1
        self.scale: Tensor | None = None
        self._jumps: dict[str, LossJumps] = {}
        self._samples: dict[str, int] = {}
        self.has_jumped = False
        self.last: tuple[Tensor | float, ...] = ()

    def began(self, began: BackwardStart, step: int, *, measured: bool) -> list[RunEvent]:
        """Record the loss at which a backward pass began; returns the events for the recording."""
        notes: list[RunEvent] = []
        self.last = ()
        if not began.tensors or not all(map(modes.has_data, began.tensors)):
            return notes
        path = self.path_of(began)
        first = began.tensors[0]
        scale = self._scaling.scale(began)
        self.scale = None
        if scale is not None and measured:
            self.scale = scale.detach().clone()  # the scaler changes it in place
        has_learned = measured and self.lines.learn(began.tensors)
        if has_learned or path not in self.described:
            dropouts = dropouts_called(began.tensors, self.lines)
            if dropouts:
                notes.append(DropoutsEvent(step=step, site=path, dropouts=dropouts))
        if path not in self.described:
            seats = self.meter.sites.seats
            for output, through in without_a_way_back(began.tensors, seats.values()):
                notes.append(NoWayBackEvent(step=step, site=output, through=through))
            self._samples[path] = _samples_of(first)
            _, operation = operation_of(first)
            self.described[path] = {"operation": operation, "source": as_json(_source(began))}
            notes.append(
                LossGraphEvent(
                    step=step,
                    site=path,
                    nodes=tuple(node.name() for node in chain_of(first.grad_fn)),
                    softmaxes=softmaxes_read(began.tensors),
                    broadcast=broadcast_in(began.tensors),
                    unscaled=scale is not None,
                    ascends=began.ascends,
                )
            )
        if has_learned:
            operations = tuple(self._operation_lines(began.tensors))
            if any(operation.source for operation in operations):
                notes.append(LossLinesEvent(step=step, site=path, operations=operations))
        changed = self._changed_maker(began, path, step)
        notes += changed

        seat = self.meter.sites.seat(Site(path, "loss"), first)
        self._seats[path] = seat.id
        bad = False
        for tensor in began.tensors:
            number = number_of(tensor)
            if number is None:
                continue
            if scale is not None:
                number = unscaled(number, scale)
            else:
                self.last = (*self.last, number)
            bad |= self.curves.add_value(step, seat.id, number, measured=measured)
            notes += self._note_jump(path, first, number, step)
        self.bad |= bad

        if not first.is_cpu and (has_learned or changed or path not in self._able):
            able = self._able.setdefault(path, [])
            able.append((step, find_able(began.tensors, self.lines)))
        self.recorded = step
        if bad and self._searches > 0:
            self._searches -= 1
            found = find_producer(began, self.lines)
            if found is not None and found not in self._found:
                self._found.append(found)
                notes.append(replace(found, step=step, loss=path))
        return notes

    def _operation_lines(self, losses: Sequence[Tensor]) -> Iterator[OperationLine]:
        """Yield the lines of the recorded nodes of a loss's graph, then those of other softmaxes."""
        nodes = [node for node in nodes_of(losses) if not is_leaf(node)]
        known = dict(zip(nodes, self.lines.of(nodes), strict=True))
        chain = list(chain_of(losses[0].grad_fn))
        others = [node for node in known if plain_name(node.name()) in SOFTMAXES]
        for node in [*chain, *(node for node in others if node not in chain)][:_MOST_OPERATIONS]:
            source = known.get(node)
            yield OperationLine(node=node.name(), shape=shape_of_output(node), source=source)

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
        if (
            path is None
            or self._scaling.has_scaler
            or (number is None and self._is_made_otherwise(loss, path))
        ):
            return self.began(
                BackwardStart((loss,), where, line, ascends(frame)), step, measured=False
            )

        if type(number) is not float:
            number = number_of(loss) if modes.has_data(loss) else None
        self.last = ()
        if number is not None:
            self.last = (number,)
            self.curves.add_value(step, self._seats[path], number, measured=False)
            self.recorded = step
            return self._note_jump(path, loss, number, step)
        return []

    def forget_last(self) -> None:
        """Forget the losses of the last backward pass, as there was another one, whose are not read."""
        self.last = ()

    def _note_jump(
        self, path: str, loss: Tensor, number: Tensor | float, step: int
    ) -> list[RunEvent]:
        """Notice whether a loss has jumped far above its last ones; those on devices are not read.

        Returns:
            An event if it did so in a smaller batch than the first.
        """
        self.has_jumped = False
        if type(number) is not float or not isfinite(number):
            return []
        jumps = self._jumps.get(path)
        if jumps is None:
            jumps = self._jumps[path] = LossJumps()
        self.has_jumped = jumps.add(number)
        usual = self._samples.get(path, 0)
        if not self.has_jumped or usual <= (samples := _samples_of(loss)):
            return []
        return [SmallBatchEvent(step=step, loss=path, samples=samples, usual=usual)]

    def late(self, news: Sequence[Arrived]) -> list[RunEvent]:
        """Note what arrived late from devices: losses that were not finite, or gradients of finite ones.

        The graph of such a loss no longer exists, and nothing was read of its values; so only the
        operations that can have made them are known, from the graph of an earlier step.

        Returns:
            The events.
        """
        paths: dict[int | None, str] = {seat: path for path, seat in self._seats.items()}
        without_loss = {each.step for each in news if each.site in paths}
        notes: list[RunEvent] = []
        for each in news:
            if each.site is None and each.step not in without_loss:
                notes.append(BadBackwardEvent(step=each.step))
            path = paths.get(each.site, "")
            known = [able for since, able in self._able.get(path, ()) if since <= each.step]
            if not known or known[-1] is None or path in self._told:
                continue
            self._told.add(path)
            able = known[-1]
            detail = None
            if self.curves.last_sound != each.step - 1:
                detail = "the gradients of the step before were not checked"
            notes.append(replace(able, step=each.step, loss=path, detail=detail))
        return notes

    def gradients_are_bad(
        self, began: BackwardStart, step: int, *, measured: bool
    ) -> list[RunEvent]:
        """Note that gradients of a finite loss are not, and the operation that made them so.

        A measured step has the gradients of all modules, which say more than a mere suspicion.

        Returns:
            The events.
        """
        if self.bad or not began.tensors:
            return []
        loss = self.path_of(began)
        is_known = all(tensor.is_cpu for tensor in began.tensors)
        notes: list[RunEvent] = []
        if is_known and not measured:
            notes.append(BadBackwardEvent(step=step, loss=loss))
        if self._searches <= 0:
            return notes
        self._searches -= 1
        found = find_behind_gradients(began, self.lines)
        if found is None or found in self._found or (measured and not found.certain):
            return notes
        self._found.append(found)
        return [*notes, replace(found, step=step, loss=loss)]

    def _is_made_otherwise(self, loss: Tensor, path: str) -> bool:
        """Whether another operation made a loss than in the last backward; it is noted a few times."""
        maker = loss.grad_fn
        node, _ = self._makers[path]
        return self._changes <= _MOST_CHANGES and maker is not None and maker.name() != node

    def _changed_maker(self, began: BackwardStart, path: str, step: int) -> list[RunEvent]:
        """Return the event that a loss is made otherwise than in the last backward.

        That is by another operation, or on another line. Its site describes the first backward
        alone. What makes a loss bad is often an operation of that step only.
        """
        node = None
        maker = began.tensors[0].grad_fn
        if maker is not None:
            node = maker.name()
        made = (node, began.where)
        known = self._makers.setdefault(path, made)
        if known == made or self._changes > _MOST_CHANGES:
            return []
        self._makers[path] = made
        self._changes += 1
        if self._changes > _MOST_CHANGES:
            return [LossOperationEvent(step=step)]
        return [LossOperationEvent(step=step, loss=path, node=node, source=_source(began))]

    def path_of(self, began: BackwardStart) -> str:
        """Return the path of the loss that a line calls backward on."""
        known = self._paths.get(began.where)
        if known is not None:
            return known
        number = min(len(self._paths) + 1, _MOST_LINES)
        path = "loss" if number == 1 else f"loss_{number}"
        self._paths[began.where] = path
        return path


def _source(began: BackwardStart) -> SourceLine | None:
    """Return the line of the program that called backward."""
    if began.frame is None:
        return None
    return source_of(began.frame)


def _samples_of(loss: Tensor) -> int:
    """Return the first size of what a loss was made of, which is that of its batch as a rule; 0 if it is not known."""
    for node in chain_of(loss.grad_fn):
        shape = shape_of_output(node)
        if shape:
            return shape[0]
    return 0


def chain_of(node: Node | None) -> Iterator[Node]:
    """Yield the nodes behind a loss, along the first input of each that needs a gradient."""
    for _ in range(_LONGEST):
        if node is None:
            return
        yield node
        behind = (before for before, _ in node.next_functions if before is not None)
        node = next(behind, None)
