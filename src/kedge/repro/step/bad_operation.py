"""Which operation made the first value of a step that is not finite: its lines run again, and every operation is seen.

See the notes in `copied_process`, `program_lines` and `first_operations`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from kedge.json_input.classes import as_json
from kedge.repro.step.copied_process import each_in_a_copy
from kedge.repro.step.first_operations import (
    BadElements,
    CalledAt,
    FirstOperations,
    Origin,
    backward_of,
    first_bad_node,
    has_nan,
    is_bad,
)
from kedge.repro.step.program_lines import RanAgain, StatementsAgain, graph_of, statements_before
from kedge.repro.step.rows import Batch
from kedge.short_text import listed
from kedge.sites import leaves
from kedge.store.events import ProducerEvent
from kedge.torch_internals.accelerators import cpu_generator_state
from kedge.torch_internals.loaders import last_samples
from kedge.torch_internals.random_state import RandomState
from kedge.torch_internals.source_lines import line_of

_MOST_TRIES = 16
"""Most beginnings that are tried."""
_DRAWN_ANEW = "; random numbers were drawn anew, so the elements may be others than in the program"

Paths = Callable[[], Mapping[nn.Module, str]]


def find_operation(frame: FrameType, losses: Sequence[Tensor], paths: Paths) -> bytes:
    """Try ever more of the program's statements until they show the operation; runs in a copy of the process.

    Args:
        frame: The frame that called backward.
        losses: What it began at.
        paths: Returns the recorded path of each module.

    Returns:
        The event, as JSON, without its step and its loss; empty if nothing shows it.
    """
    modules = paths()
    if not _are_finite(param for module in modules for param in module.parameters(recurse=False)):
        return b""  # an earlier step made the first such value
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    masks = [each for each in buffers if is_bad(each) and not has_nan(each)]

    def tries() -> Iterator[Callable[[], bytes]]:
        later = []
        for statements in statements_before(frame):
            attempt = partial(_try, statements, losses, modules, masks)
            if _takes_bad_values(statements):
                later.append(attempt)
            else:
                yield attempt
        yield from later

    return each_in_a_copy(tries(), _MOST_TRIES)


def _takes_bad_values(statements: StatementsAgain) -> bool:
    """Whether a variable that statements take is not finite: then those before them may have made the first such value."""
    taken = (statements.names.get(name) for name in statements.taken)
    tensors = (
        tensor
        for value in taken
        if not isinstance(value, nn.Module)
        for tensor in _tensors_in(value)
    )
    return not _are_finite(tensors)


def _try(
    statements: StatementsAgain,
    losses: Sequence[Tensor],
    paths: Mapping[nn.Module, str],
    masks: Sequence[Tensor],
) -> bytes:
    """Run some statements again; return what they show, or nothing."""
    seen = FirstOperations(masks)
    random_numbers = _random_numbers()
    with seen:
        again = statements.run()
    if again is None or not _are_alike(again.losses, losses):
        return b""
    if graph_of(again.losses) != graph_of(losses):
        return b""  # they went another way
    values = [(again.losses, losses)]
    values += [
        (_tensors_in(again.names.get(name)), _tensors_in(statements.names[name]))
        for name in statements.bound & statements.names.keys()
    ]
    if not all(_are_alike(*each) for each in values):
        return b""

    found = _found_in(seen, again)
    if found is None:
        return b""
    found = replace(found, detail=found.detail + _samples(statements, found.bad))
    if random_numbers != _random_numbers() and not _are_same(values):
        found = replace(found, detail=found.detail + _DRAWN_ANEW)
    return json.dumps(as_json(_event(found, seen, statements, paths))).encode()


def operation_of(
    statements: StatementsAgain, paths: Mapping[nn.Module, str]
) -> ProducerEvent | None:
    """Return the operation of some statements that makes their loss, or its gradients, not finite.

    They run once more. It has neither a step nor a loss; None if nothing is not finite, or no
    operation of the statements made it so.

    Args:
        statements: The statements.
        paths: The path of each module.
    """
    seen = FirstOperations(())
    with seen:
        again = statements.run()
    if again is None:
        return None
    found = _found_in(seen, again)
    if found is None:
        return None
    return _event(found, seen, statements, paths)


def _found_in(seen: FirstOperations, again: RanAgain) -> _Found | None:
    """Return the operation that made a loss, or the gradients of finite losses, not finite."""
    found = _of_losses(seen, again.losses)
    if found is None and _are_finite(again.losses):
        found = _of_gradients(seen, again)
    return found


def _random_numbers() -> tuple[bytes, dict[str, Any]]:
    """Return the states of the generators that a program draws from by default."""
    return cpu_generator_state().numpy().tobytes(), RandomState().entries()


def _tensors_in(value: Any) -> list[Tensor]:
    return [tensor for _, tensor in leaves.find(value)]


def _are_same(values: Iterable[tuple[Sequence[Tensor], Sequence[Tensor]]]) -> bool:
    """Whether tensors of the same shapes have the same elements, and there are finite ones that show it."""
    pairs = [pair for some, others in values for pair in zip(some, others, strict=True)]
    if not all(torch.equal(one.nan_to_num(), other.nan_to_num()) for one, other in pairs):
        return False
    return any(bool(torch.isfinite(one).any()) for one, _ in pairs)


def _are_finite(tensors: Iterable[Tensor]) -> bool:
    return not any(map(is_bad, tensors))


def _are_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether tensors have their non-finite elements at the same places."""
    if len(some) != len(others):
        return False
    for one, other in zip(some, others, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        is_number = one.is_floating_point() or one.is_complex()
        if is_number and not torch.equal(torch.isfinite(one), torch.isfinite(other)):
            return False
    return True


@dataclass(frozen=True)
class _Found:
    """What ran again has shown: the operation, on which way, and what was seen of it."""

    at: CalledAt
    name: str
    where: Literal["forward", "backward", "hidden"]
    detail: str
    bad: BadElements

    @classmethod
    def of(cls, origin: Origin, where: Literal["forward", "hidden"], more: str = "") -> Self:
        """Return what an origin shows."""
        name = origin.inner or origin.at.name
        return cls(origin.at, name, where, _words_of(origin) + more, origin.bad)


def _samples(statements: StatementsAgain, bad: BadElements) -> str:
    """Return which samples of a data set made the elements that are not finite, as a clause; empty if that is not known.

    They are those of the rows with such elements, if without these rows everything is finite: the
    first dimension need not be the batch's.
    """
    batch = Batch.of(statements)
    if batch is None or bad.dim or batch.length != bad.length:
        return ""
    samples = last_samples(batch.length)
    rest = [row for row in range(batch.length) if row not in bad.rows]
    if not samples or not bad.rows or not rest:
        return ""
    without = statements.run(batch.only(rest))
    if without is None or not _are_finite(without.losses):
        return ""
    if first_bad_node(without.losses, without.gradients) is not None:
        return ""
    numbers = listed([str(samples[row]) for row in bad.rows])
    if len(bad.rows) == 1:
        return f"; it is sample {numbers} of the data set, without which all is finite"
    return f"; they are samples {numbers} of the data set, without which all is finite"


def _of_losses(seen: FirstOperations, losses: Sequence[Tensor]) -> _Found | None:
    """Return the operation that made losses which are not finite."""
    for loss in losses:
        origin = seen.origin_of(loss)
        if is_bad(loss) and origin is not None:
            return _Found.of(origin, "forward")
    return None


def _of_gradients(seen: FirstOperations, again: RanAgain) -> _Found | None:
    """Return the operation that made gradients of finite losses which are not finite."""
    found = first_bad_node(again.losses, again.gradients)
    if found is None:
        return None
    hidden = seen.hidden_behind(found.node)
    if hidden is not None:
        return _Found.of(hidden, "hidden", "; the loss hides this, but its gradient does not")
    at = seen.nodes.get(found.node) or backward_of(found.node)
    if at is None:
        return None
    bad = BadElements.of(found.gradient)
    detail = (
        f"the gradient that arrived there was finite, and {bad.counted('the', 'element')} that it "
        f"passed on {bad.are} not{bad.in_rows()}"
    )
    return _Found(at, at.name, "backward", detail, bad)


def _words_of(origin: Origin) -> str:
    """Return what was seen of an operation, as a clause."""
    bad = origin.bad
    inside, whose = "", "its"
    if origin.inner not in (None, origin.at.name):
        inside, whose = f"inside of {origin.at.name}; ", f"{origin.at.name}'s"
    made = f"{inside}{bad.counted(whose, 'result')} {bad.are} {bad.kind}{bad.in_rows()}"
    call = origin.call
    if call.is_empty:
        return f"it took the {origin.at.name} of no elements"
    if call.bad or call.has_infinity:
        return f"{made}, made of an infinity that was put in place before it"
    if call.span is None:
        return made
    low, high = call.span
    if low == high:
        return f"{made}, made of {low:.4g} alone"
    return f"{made}, made of finite numbers from {low:.4g} to {high:.4g}"


def _event(
    found: _Found,
    seen: FirstOperations,
    statements: StatementsAgain,
    paths: Mapping[nn.Module, str],
) -> ProducerEvent:
    """Return what ran again has shown as an event, without its step and its loss."""
    at = found.at
    nodes = (node.name() for node, made_at in seen.nodes.items() if made_at is at)
    module: str | None = ""
    if at.module is not None:
        module = paths.get(at.module)
    event = ProducerEvent(
        step=0,
        operation=found.name,
        node=next(nodes, None),
        module=module,
        where=found.where,
        detail=found.detail,
        again=True,
    )
    if at.code is None:
        return event
    line = line_of(at.code, at.line)
    function = line.function
    if at.code is statements.code:
        function = statements.function
    return replace(event, file=line.file, line=line.line, function=function, text=line.text)
