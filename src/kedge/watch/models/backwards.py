"""Each backward pass: its begin, its end, and the parameters whose hooks report it.

# Note [Hooks on parameters]
A hook on a parameter runs inside the pass, in the thread that called it or in a device's thread. In
the first steps every parameter has the hook. After a measured step only two kinds of parameters
keep it: those whose gradient arrived first in a pass, and those without a gradient so far.

# Note [Gradients that are returned]
`torch.autograd.grad` returns the gradients of parameters instead of accumulating them, and their
hooks do not fire. Such a pass is seen in measured steps by the gradient of a root's output, and the
frame of the call names the parameters. It trains them if no optimizer holds them; else it is part
of a step: a penalty, or an inner step of meta-learning.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from time import perf_counter
from typing import Protocol

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kedge.flow import Act
from kedge.hooks.firing.contract import Measure
from kedge.hooks.placing.leaf_hooks import LeafHook, next_hook
from kedge.sites.site import Site
from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.graph_task import at_end_of_backward, graph_task
from kedge.torch_internals.own_work import OwnWork, is_watched
from kedge.watch.models.backward_start import (
    BackwardStart,
    LossCheck,
    SkippedLosses,
    began,
    taken_for,
)
from kedge.watch.models.optimizers import living, params_of
from kedge.watch.models.parameters import ParameterSites, WatchedParameters
from kedge.watch.step import Step, StepKind

_REMEMBERED = 16


class BackwardHandler(SkippedLosses, Protocol):
    """What `BackwardPasses` reports to."""

    def backward_began(self, at: BackwardStart) -> None:
        """Called with the start of a pass when its first gradient has arrived."""

    def backward_ended(self, task: int) -> None:
        """Called at the end of a pass, with the number of the pass."""

    def skipped_backward_ended(self) -> None:
        """Called in skipped steps at the end of a pass."""

    def skipped_gradients(self, places: tuple[ParameterSites, ...]) -> None:
        """Called in skipped steps at the end of a pass, with parameters on a device to check."""

    def skipped_is_bad(self) -> None:
        """Called in skipped steps when a loss, or a gradient that it made, is not finite."""


class BackwardPasses:
    """Reports each backward pass that reaches a watched parameter; see Note [Hooks on parameters].

    Args:
        places: The watched parameters.
        handler: Receives the reports.

    Attributes:
        skipped: Whether the step is skipped, so that a pass is only checked for a finite loss,
            unless that is on a device.
        counts: Whether passes are reported in skipped steps, too, because they are counted.
        seconds: Seconds that the hooks took to note the order in which gradients arrive.
    """

    def __init__(self, places: WatchedParameters, handler: BackwardHandler) -> None:
        self.places = places
        self.handler = handler
        self.skipped = LossCheck(handler)
        self.counts = True
        self.seconds = 0.0
        self._arrived = 0
        self._settled = False
        self._since = 0
        self._kept: dict[int, ParameterSites] = {}
        self._threads: set[int] = set()
        self._tasks: dict[int, None] = {}

    def begin_step(self, step: Step) -> None:
        """Begin a step."""
        self.skipped.on = step.kind is StepKind.SKIPPED

    def listen(self, params: Iterable[nn.Parameter], *, again: bool = False) -> None:
        """Hook watched parameters without a hook; with `again` also those whose hook was removed."""
        for param in params:
            place = self.places.of(param)
            if place is None or (place.hook is not None and not again):
                continue
            if place.hook is not None and place.is_hooked:
                place.hook.renew(param, self._since)
            elif not is_lazy(param) and param.requires_grad and param.is_leaf:
                place.hook = LeafHook(param, self.arrived, accumulated=True, find=place.param)
                self._settled = False
                self._kept.pop(id(param), None)

    def renew(self) -> None:
        """Hook the parameters again that the program has swapped; see Note [Hooks of a swapped leaf].

        First those that always have a hook are looked at, if there are any: a program swaps
        all parameters of a module.
        """
        places: Iterable[ParameterSites] = self._kept.values() if self._settled else self.places
        if any(map(self._renewed, list(places))):
            for place in self.places:
                self._renewed(place)
            self._settled = False
        self._since = next_hook()

    def _renewed(self, place: ParameterSites) -> bool:
        hook = place.hook
        if hook is None or hook.removed:
            return False
        param = place.param()
        return param is not None and hook.renew(param, self._since)

    @property
    def are_settled(self) -> bool:
        """Whether `keep_first` has removed the hooks that are not needed.

        No others were seen or installed since.
        """
        return self._settled

    def keep_first(self, groups: Callable[[], Iterable[Iterable[ParameterSites]]]) -> None:
        """Keep the hooks of the parameters whose gradients arrive first; remove the others.

        That is first in a pass, or in a group.
        Parameters that had no gradient yet keep theirs too.

        Args:
            groups: Returns the groups; called only if something is new.
        """
        if self._settled:
            return
        self._settled = True
        seen: list[ParameterSites] = []
        kept: set[int] = set()
        for group in groups():
            places = [place for place in group if place.order is not None]
            if places:
                seen += places
                kept.add(id(min(places, key=lambda place: place.order or 0)))

        self._kept.clear()
        for place in seen:
            if place.first or id(place) in kept:
                self._kept[place.id] = place
            else:
                place.park()

    def reached_here(self, params: Iterable[Tensor]) -> bool:
        """Whether gradients of some parameters arrive in this thread.

        So no other thread changes them.
        """
        if len(self._threads) < 2:
            return True
        here = threading.get_ident()
        return any(place.thread == here for place in self.places.among(params))

    def reached_by(self, task: int, params: Iterable[nn.Parameter]) -> bool:
        """Whether a backward pass reached some parameters; at least one of them must have a hook."""
        return any(place.task == task for place in self.places.among(params))

    def close(self) -> None:
        """Remove every hook."""
        for place in self.places:
            place.unhook()

    def arrived(self, param: nn.Parameter) -> None:
        """Called by autograd when a parameter's gradient has been accumulated."""
        if is_watched():
            with OwnWork():
                self.arrived(param)
            return
        place = self._kept.get(id(param)) if self.skipped.on else None
        if place is not None and not self.counts and self.skipped.is_finite():
            place.times += 1
            return
        start, task = perf_counter(), graph_task()
        if place is None:
            place = self.places.hooked(param)
            if place is not None:
                self._note(place)
        self.seconds += perf_counter() - start
        if place is None:  # the program has swapped it for another
            self.reached(task)
            return
        place.task = task
        place.times += 1
        if self.reached(task):
            place.first = True

    def _note(self, place: ParameterSites) -> None:
        """Note the order in which gradients arrive, and their thread; in skipped steps both are known."""
        if place.order is None:
            place.order = self._arrived
            self._arrived += 1
            self._settled = False
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
        if self.skipped.on:
            if self.skipped.is_finite():
                if self.counts:
                    at_end_of_backward(self.handler.skipped_backward_ended)
                return True
            self.handler.skipped_is_bad()
        at_end_of_backward(partial(self.handler.backward_ended, task))
        self.handler.backward_began(began())
        return True

    def taken(self, places: Iterable[ParameterSites], task: int) -> None:
        """Called when a pass that returns the gradients of parameters has reached a root's output."""
        for place in places:
            self._note(place)
            place.task = task
            place.times += 1
        self.reached(task)

    def has_seen(self, task: int) -> bool:
        """Whether a pass has reached a watched value before."""
        return task in self._tasks

    def interrupt(self, place: ParameterSites) -> None:
        """Make the skipped step a guarded one: a gradient is not finite in the active pass."""
        self.handler.skipped_is_bad()
        place.task = graph_task()
        self.reached(place.task)


class Reached:
    """The action that reports a backward pass by the gradient of a root's output.

    It serves models with parameters spread over several processes: hooks on these do not fire.
    """

    observes = True
    recomputes = False

    def __init__(self, passes: BackwardPasses) -> None:
        self.passes = passes

    def bind(self, site: Site) -> Act:
        """Return a function that is called with each gradient."""
        return lambda _value, _event: self._look()

    def bind_value(self, site: Site) -> Measure:
        """Return a function that is called with each gradient, without an event."""
        return lambda _value, _step, _leaf="": self._look()

    def _look(self) -> None:
        self.passes.reached(graph_task())


class Taken(Reached):
    """The action that reports a backward pass that returns gradients; see Note [Gradients that are returned]."""

    def __init__(self, passes: BackwardPasses) -> None:
        super().__init__(passes)
        self._is_held: dict[int, bool] = {}

    def _look(self) -> None:
        task = graph_task()
        if task == -1 or self.passes.has_seen(task):
            return
        places = list(self.passes.places.among(taken_for()))
        if places and not any(map(self._held, places)):
            self.passes.taken(places, task)

    def _held(self, place: ParameterSites) -> bool:
        """Whether an optimizer holds a parameter, even if it has not stepped yet."""
        if place.held is not None:
            return True
        if place.id not in self._is_held:
            held = {id(param) for optimizer in living() for param in params_of(optimizer)}
            self._is_held = {each.id: each.id in held for each in self.passes.places}
        return self._is_held.get(place.id, False)


untraced(BackwardPasses.arrived)
