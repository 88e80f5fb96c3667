"""Each backward pass: what it began at, where in the program, and when it ends.

# Note [What backward began at]
Nothing is patched. A hook on a parameter runs inside the pass, in the thread that called it or in one of a device's;
the frame of `torch.autograd.backward` that is under way holds the tensors that were differentiated, and the frames
above it lead to the program's line. In the first steps every parameter has the hook. After a measured step only those
keep it whose gradient arrived first in a pass, and those that have had no gradient yet.
"""

from __future__ import annotations

import math
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge.flow import Act, Event
from kedge.sites.site import Site
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import at_end_of_backward, graph_task
from kedge.torch_internals.source_lines import is_between
from kedge.watch.models.parameters import ParameterSites, WatchedParameters
from kedge.watch.models.roots import RootModule

_REMEMBERED = 16
_INSTALLED = ("site-packages", "dist-packages")


@dataclass(frozen=True)
class BackwardStart:
    """What a backward pass began at.

    Attributes:
        tensors: The tensors that were differentiated.
        where: The code and line that called backward; None if no frame shows it.
        frame: That frame.
    """

    tensors: tuple[Tensor, ...]
    where: tuple[CodeType, int] | None
    frame: FrameType | None


class BackwardPasses:
    """Reports each backward pass that reaches a watched parameter; see Note [What backward began at].

    Args:
        places: Knows the parameters.

    Attributes:
        on_begin: Set to what is given what a pass began at, when the first gradient has arrived.
        on_end: Set to what is called at the end of a pass, with its number.
        on_bad_loss: Set to what is called when the loss of a pass is not finite that is only asked for that.
        quick: Of a pass it is only asked whether its loss is finite, and on a device not even that.
        on_quick_end: Set to what is called at the end of such a pass; None where nobody counts them.
    """

    def __init__(self, places: WatchedParameters) -> None:
        self.places = places
        self.on_begin: Callable[[BackwardStart], None] = lambda began: None
        self.on_end: Callable[[int], None] = lambda task: None
        self.on_bad_loss: Callable[[], None] = lambda: None
        self.on_quick_end: Callable[[], None] | None = None
        self.quick = False
        self._arrived, self._settled = 0, False
        self._kept: dict[int, ParameterSites] = {}
        self._threads: set[int] = set()
        self._tasks: dict[int, None] = {}
        self._depth, self._code = 0, _backward_code()

    def listen(self, params: Iterable[nn.Parameter], *, again: bool = False) -> None:
        """Hook watched parameters that had no hook yet; or again those whose hook was removed."""
        for place in self.places.among(params):
            param = place.param()
            if param is None or (place.hook is not None and (place.is_hooked or not again)):
                continue
            if not is_lazy(param) and param.requires_grad and param.is_leaf:
                place.hook = param.register_post_accumulate_grad_hook(self.arrived)
                self._settled = False
                self._kept.pop(id(param), None)

    def keep_first(self, groups: Callable[[], Iterable[Iterable[ParameterSites]]]) -> None:
        """Keep the hooks of the parameters whose gradients arrive first: in a pass, and of each group.

        Those that had no gradient yet keep theirs too.

        Args:
            groups: Returns the groups; it is called if there is something new.
        """
        if self._settled:
            return
        self._settled = True
        seen = [[place for place in group if place.order is not None] for group in groups()]
        kept = {id(min(places, key=lambda place: place.order or 0)) for places in seen if places}
        self._kept.clear()
        for place in (place for places in seen for place in places):
            if place.first or id(place) in kept:
                self._kept[id(place.param())] = place
            elif place.hook is not None:
                place.hook.remove()

    def reached_here(self, params: Iterable[Tensor]) -> bool:
        """Whether gradients of some parameters arrive in this thread, so that no other one changes them meanwhile."""
        here = threading.get_ident()
        return len(self._threads) < 2 or any(place.thread == here for place in self.places.among(params))

    def reached_by(self, task: int, params: Iterable[nn.Parameter]) -> bool:
        """Whether a backward pass reached some parameters, of which one at least has a hook."""
        return any(place.task == task for place in self.places.among(params))

    def close(self) -> None:
        """Remove every hook."""
        for place in self.places:
            if place.hook is not None:
                place.hook.remove()

    def arrived(self, param: nn.Parameter) -> None:
        """Called by autograd when a parameter's gradient has been accumulated."""
        task = graph_task()
        place = self._kept.get(id(param)) if self.quick else None
        if place is None:
            place = self.places.of(param)
            if place is not None:
                self._note(place)
        if place is None:  # the program has swapped it with another
            self.reached(task)
            return
        place.task = task
        place.times += 1
        if self.reached(task):
            place.first = True

    def _note(self, place: ParameterSites) -> None:
        """Note in which order gradients arrive, and where; in passes that are only asked for their loss it is known."""
        if place.order is None:
            place.order, self._arrived, self._settled = self._arrived, self._arrived + 1, False
        place.thread = threading.get_ident()
        self._threads.add(place.thread)

    def reached(self, task: int) -> bool:
        """Called when a backward pass has come to something that is watched; tells whether that is the first in it."""
        tasks = self._tasks
        if task in tasks or task == -1:
            return False
        if len(tasks) >= _REMEMBERED:
            del tasks[next(iter(tasks))]
        tasks[task] = None
        if self.quick:
            if self._is_sound():
                if self.on_quick_end is not None:
                    at_end_of_backward(self.on_quick_end)
                return True
            self.on_bad_loss()
        at_end_of_backward(partial(self.on_end, task))
        self.on_begin(began())
        return True

    def _is_sound(self) -> bool:
        """Whether the loss of the pass under way is known to be finite, or nothing is known of it."""
        try:
            frame: FrameType | None = sys._getframe(self._depth)  # where it was the last time
        except ValueError:  # the stack is not as deep
            frame = None
        if frame is None or frame.f_code is not self._code:
            frame = self._find()
        value = frame.f_locals.get("tensors") if frame is not None else None
        if type(value) is tuple and len(value) == 1:
            value = value[0]
        if type(value) is not Tensor or not value.is_cpu or value.numel() != 1 or value.is_complex():
            return True
        return math.isfinite(value.item())

    def _find(self) -> FrameType | None:
        self._code = _backward_code()
        frame: FrameType | None = sys._getframe(1)
        depth = 0
        while frame is not None and frame.f_code is not self._code:
            frame, depth = frame.f_back, depth + 1
        self._depth = depth if frame is not None else 0
        return frame


def began() -> BackwardStart:
    """Return what the backward pass under way in this thread began at: the outermost, which others may run in."""
    codes = _codes()
    for frame in _threads():
        above: FrameType | None = frame
        found: FrameType | None = None
        while above is not None:
            found = above if above.f_code in codes else found
            above = above.f_back
        if found is not None:
            tensors = found.f_locals.get(codes[found.f_code], ())
            line = _programs_line(found)
            where = None if line is None else (line.f_code, line.f_lineno)
            return BackwardStart(tuple(t for t in _each(tensors) if isinstance(t, Tensor)), where, line)
    return BackwardStart((), None, None)


def _backward_code() -> CodeType | None:
    return getattr(torch.autograd.backward, "__code__", None)


def _codes() -> dict[CodeType, str]:
    """The code of what begins a backward pass, with the name of its local variable for the tensors."""
    functions = ((torch.autograd.backward, "tensors"), (torch.autograd.grad, "outputs"))
    return {f.__code__: name for f, name in functions if hasattr(f, "__code__")}


def _threads() -> Iterator[FrameType]:
    """The frame that called this thread's `began`, and then those of the others: a device's backward has its own thread.

    The frame of `began` is left out: as one of its own variables it would keep itself alive, and the loss with it.
    """
    yield sys._getframe(2)
    mine = threading.get_ident()
    for thread, frame in list(sys._current_frames().items()):
        if thread != mine:
            yield frame


def _each(tensors: Any) -> tuple[Any, ...]:
    return tuple(tensors) if isinstance(tensors, (tuple, list)) else (tensors,)


def is_installed(file: str) -> bool:
    """Whether a file belongs to an installed library, not to the program."""
    return any(folder in file for folder in _INSTALLED)


def _programs_line(frame: FrameType) -> FrameType | None:
    """The frame of the program that called, or of an installed library if no other is above."""
    above, library = frame.f_back, None
    while above is not None:
        file = above.f_code.co_filename
        if not is_between(file):
            if not is_installed(file):
                return above
            library = library or above
        above = above.f_back
    return library


def operation_of(value: Tensor) -> tuple[str | None, str]:
    """Return the name of the autograd node that made a tensor, and of its operation: ``nll_loss``."""
    if value.grad_fn is None:
        return None, "leaf"
    return value.grad_fn.name(), plain_name(value.grad_fn.name())


def plain_name(node: str) -> str:
    """Return what people call the operation behind a node: ``nll_loss`` for ``NllLossBackward0``."""
    name = re.sub(r"(Backward\d*|<.*>)$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class Reached:
    """The action that tells of a backward pass by the gradient of what a root returns.

    It is for models whose parameters are spread over several processes: hooks on these do not fire.
    """

    observes = True
    recomputes = False

    def __init__(self, passes: BackwardPasses, root: RootModule) -> None:
        self.passes, self.root = passes, root

    def bind(self, site: Site) -> Act:
        """Return what is called with each gradient."""

        def reached(value: Tensor, event: Event) -> None:
            self.passes.reached(graph_task())

        return reached


untraced(BackwardPasses.arrived)
