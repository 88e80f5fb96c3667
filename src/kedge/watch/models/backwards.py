"""Each backward pass: its tensors, the line of the program that began it, and its end.

# Note [What backward began at]
Nothing is patched. A hook on a parameter runs inside the pass, in the thread that called it or in a device's thread;
the active frame of `torch.autograd.backward` holds the differentiated tensors, and the frames above it lead to the
program's line. In the first steps every parameter has the hook. After a measured step only two kinds of parameters keep
it: those whose gradient arrived first in a pass, and those without a gradient so far.
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
    """The start of a backward pass.

    Attributes:
        tensors: The differentiated tensors.
        where: The code and line that called backward; None if no frame shows it.
        frame: That frame.
    """

    tensors: tuple[Tensor, ...]
    where: tuple[CodeType, int] | None
    frame: FrameType | None


class BackwardPasses:
    """Reports each backward pass that reaches a watched parameter; see Note [What backward began at].

    Args:
        places: The watched parameters.

    Attributes:
        on_begin: Called with the start of a pass when its first gradient has arrived.
        on_end: Called at the end of a pass, with the number of the pass.
        on_bad_loss: Called in quick mode when the loss of a pass is not finite.
        quick: Whether passes are only checked for a finite loss; a loss on a device is not checked.
        on_quick_end: Called in quick mode at the end of a pass; None if nothing counts the passes.
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
        """Hook watched parameters without a hook; with `again` also those whose hook was removed."""
        for place in self.places.among(params):
            param = place.param()
            if param is None or (place.hook is not None and (place.is_hooked or not again)):
                continue
            if not is_lazy(param) and param.requires_grad and param.is_leaf:
                place.hook = param.register_post_accumulate_grad_hook(self.arrived)
                self._settled = False
                self._kept.pop(id(param), None)

    def keep_first(self, groups: Callable[[], Iterable[Iterable[ParameterSites]]]) -> None:
        """Keep the hooks of the parameters whose gradients arrive first, in a pass or in a group; remove the others.

        Parameters that had no gradient yet keep theirs too.

        Args:
            groups: Returns the groups; called only if something is new.
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
        """Whether gradients of some parameters arrive in this thread, so that no other thread changes them."""
        here = threading.get_ident()
        return len(self._threads) < 2 or any(place.thread == here for place in self.places.among(params))

    def reached_by(self, task: int, params: Iterable[nn.Parameter]) -> bool:
        """Whether a backward pass reached some parameters; at least one of them must have a hook."""
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
        if place is None:  # the program has swapped it for another
            self.reached(task)
            return
        place.task = task
        place.times += 1
        if self.reached(task):
            place.first = True

    def _note(self, place: ParameterSites) -> None:
        """Note the order in which gradients arrive, and their thread; in quick passes both are known."""
        if place.order is None:
            place.order, self._arrived, self._settled = self._arrived, self._arrived + 1, False
        place.thread = threading.get_ident()
        self._threads.add(place.thread)

    def reached(self, task: int) -> bool:
        """Called when a backward pass has reached a watched value.

        Returns:
            Whether it is the first one in the pass.
        """
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
        """Whether the loss of the active pass is finite, or unknown."""
        try:
            frame: FrameType | None = sys._getframe(self._depth)  # its depth in the last pass
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
    """Return the start of the active backward pass of this thread: of the outermost, if passes are nested."""
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
    """Return the code of the functions that begin a backward pass, with the name of their variable for the tensors."""
    functions = ((torch.autograd.backward, "tensors"), (torch.autograd.grad, "outputs"))
    return {f.__code__: name for f, name in functions if hasattr(f, "__code__")}


def _threads() -> Iterator[FrameType]:
    """Yield the frame that called `began`, then those of the other threads: a device's backward has its own thread.

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
    """Return the frame of the program that called; failing that, the nearest frame of an installed library."""
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
    """Return the name of the autograd node that made a tensor, and that of its operation: ``nll_loss``."""
    if value.grad_fn is None:
        return None, "leaf"
    return value.grad_fn.name(), plain_name(value.grad_fn.name())


def plain_name(node: str) -> str:
    """Return the usual name of the operation behind a node: ``nll_loss`` for ``NllLossBackward0``."""
    name = re.sub(r"(Backward\d*|<.*>)$", "", node.rpartition("::")[2])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class Reached:
    """The action that reports a backward pass by the gradient of a root's output.

    It serves models with parameters spread over several processes: hooks on these do not fire.
    """

    observes = True
    recomputes = False

    def __init__(self, passes: BackwardPasses, root: RootModule) -> None:
        self.passes, self.root = passes, root

    def bind(self, site: Site) -> Act:
        """Return a function that is called with each gradient."""

        def reached(value: Tensor, event: Event) -> None:
            self.passes.reached(graph_task())

        return reached


untraced(BackwardPasses.arrived)
