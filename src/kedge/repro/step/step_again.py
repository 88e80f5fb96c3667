"""The examination of a bad step: which operation made its first value that is not finite.

The lines that computed the loss run again in a copy of the process, with every operation seen; see
the notes in `copied_process`, `program_lines` and `first_operations`.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from kedge.json_input.classes import as_json, read_as
from kedge.repro.step.copied_process import CopiedProcess, can_copy, each_in_a_copy
from kedge.repro.step.first_operations import (
    BadElements,
    CalledAt,
    FirstOperations,
    Origin,
    first_bad_node,
    is_bad,
)
from kedge.repro.step.program_lines import StatementsAgain, statements_before
from kedge.sites import leaves
from kedge.store.events import ProducerEvent
from kedge.torch_internals.accelerators import generator_states
from kedge.torch_internals.random_state import RandomState
from kedge.torch_internals.source_lines import line_of

_MOST_TRIES = 16
"""Most beginnings that are tried."""
_DRAWN_ANEW = "; random numbers were drawn anew, so the elements may be others than in the program"

Paths = Callable[[], Mapping[nn.Module, str]]


class StepAgain:
    """The examination of one bad step, in a copy of the process that the program does not notice.

    Args:
        frame: The frame that called backward.
        losses: What it began at.
        step: The number of the step.
        site: The path of the loss.
        paths: Returns the recorded path of each module.
    """

    def __init__(
        self, frame: FrameType, losses: Sequence[Tensor], step: int, site: str, paths: Paths
    ) -> None:
        self.step = step
        self.site = site
        work = partial(_examine, frame, tuple(losses), paths)
        self._copy = CopiedProcess(work)

    def found(self, seconds: float = 0.0) -> ProducerEvent | None:
        """Return the operation, once it is known.

        Args:
            seconds: How long to wait.
        """
        result = self._copy.result(seconds)
        if not result:
            return None
        event = read_as(ProducerEvent, json.loads(result))
        return replace(event, step=self.step, loss=self.site)

    def is_over(self) -> bool:
        """Whether there is nothing to wait for."""
        return self._copy.result() is not None

    def close(self) -> None:
        """Wait for it no longer."""
        self._copy.close()


def can_examine(losses: Sequence[Tensor], modules: Sequence[nn.Module]) -> bool:
    """Whether a step can be examined in a copy: only on a CPU."""
    tensors = [*losses]
    for module in modules:
        tensors += [*module.parameters(), *module.buffers()]
    return all(tensor.is_cpu for tensor in tensors) and can_copy()


class _BackwardAgain(BaseException):
    """What ran again has come to the backward pass."""

    def __init__(self, losses: Any, gradients: Any) -> None:
        super().__init__()
        self.losses = losses
        self.gradients = gradients


def _examine(frame: FrameType, losses: Sequence[Tensor], paths: Paths) -> bytes:
    """Run in the copy: try ever more of the program's statements until they show the operation."""
    gc.disable()  # what would be freed is the program's
    torch.set_grad_enabled(True)
    torch.set_anomaly_enabled(False)
    given = torch.autograd.backward

    def begin_backward(tensors: Any, grad_tensors: Any = None, *_: Any, **__: Any) -> None:
        raise _BackwardAgain(tensors, grad_tensors)

    def tries() -> Iterator[Callable[[], bytes]]:
        for statements in statements_before(frame):
            yield partial(_try, statements, losses, paths, given)

    torch.autograd.backward = begin_backward
    return each_in_a_copy(tries(), _MOST_TRIES)


def _try(
    statements: StatementsAgain, losses: Sequence[Tensor], paths: Paths, backward: Any
) -> bytes:
    """Run some statements again; return what they show, or nothing."""
    modules = list(paths())
    if not _are_finite(param for module in modules for param in module.parameters(recurse=False)):
        return b""  # an earlier step made the first such value
    buffers = (buffer for module in modules for buffer in module.buffers(recurse=False))
    masks = [each for each in buffers if is_bad(each) and not bool(torch.isnan(each).any())]
    seen = FirstOperations(masks)
    again: Sequence[Tensor] = ()
    gradients = None
    names: dict[str, Any] = dict(statements.names)
    random_numbers = _random_numbers()
    try:
        with seen:
            exec(statements.code, names)  # noqa: S102 - the program's own statements
    except _BackwardAgain as reached:
        again = [tensor for _, tensor in leaves.find(reached.losses)]
        gradients = reached.gradients
    if len(again) != len(losses) or not _are_alike(again, losses):
        return b""
    for name in statements.bound:
        if name in statements.names and not _are_alike(
            [tensor for _, tensor in leaves.find(names.get(name))],
            [tensor for _, tensor in leaves.find(statements.names[name])],
        ):
            return b""

    found = _of_losses(seen, again)
    if found is None and not any(map(is_bad, again)):
        torch.autograd.backward = backward
        found = _of_gradients(seen, again, gradients)
    if found is None:
        return b""
    if random_numbers != _random_numbers():
        found = replace(found, detail=found.detail + _DRAWN_ANEW)
    nodes = (node.name() for node, at in seen.nodes.items() if at is found.at)
    event = _event(found, next(nodes, None), statements, paths)
    return json.dumps(as_json(event)).encode()


def _random_numbers() -> tuple[dict[str, bytes], dict[str, Any]]:
    """Return the states of the generators that a program draws from by default."""
    states = {name: state.numpy().tobytes() for name, state in generator_states().items()}
    return states, RandomState().entries()


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

    @classmethod
    def of(cls, origin: Origin, where: Literal["forward", "hidden"], more: str = "") -> Self:
        """Return what an origin shows."""
        return cls(origin.at, origin.inner or origin.at.name, where, _words_of(origin) + more)


def _of_losses(seen: FirstOperations, losses: Sequence[Tensor]) -> _Found | None:
    """Return the operation that made losses which are not finite."""
    for loss in losses:
        origin = seen.origin_of(loss)
        if is_bad(loss) and origin is not None:
            return _Found.of(origin, "forward")
    return None


def _of_gradients(seen: FirstOperations, losses: Sequence[Tensor], gradients: Any) -> _Found | None:
    """Return the operation that made gradients of finite losses which are not finite."""
    if isinstance(gradients, Tensor):
        gradients = [gradients]
    found = first_bad_node(losses, gradients)
    if found is None:
        return None
    hidden = seen.hidden_behind(found.node)
    if hidden is not None:
        return _Found.of(hidden, "hidden", "; the loss hides this, but its gradient does not")
    at = seen.nodes.get(found.node)
    if at is None:
        return None
    bad = BadElements.of(found.gradient)
    detail = (
        f"the gradient that arrived there was finite, and {bad.counted('the', 'element')} that it "
        f"passed on {bad.are} not{bad.in_rows()}"
    )
    return _Found(at, at.name, "backward", detail)


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
    found: _Found, node: str | None, statements: StatementsAgain, paths: Paths
) -> ProducerEvent:
    """Return what ran again has shown as an event; its step and loss are those of the parent."""
    at = found.at
    module: str | None = ""
    if at.module is not None:
        module = paths().get(at.module)
    event = ProducerEvent(
        step=0,
        operation=found.name,
        node=node,
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
