"""Schedules, and the counting of steps, forward passes, calls and backward passes."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch

from kedge.calls.arguments import called_as, described
from kedge.errors import WrongCall
from kedge.flow import Event, Schedule
from kedge.hooks.firing.program_calls import FollowedCalls, Holder, ProgramCall, ProgramCalls
from kedge.hooks.firing.thread_position import ThreadPosition
from kedge.sites.site import Site
from kedge.torch_internals.autograd_nodes import behind
from kedge.torch_internals.checkpoint import Segment, Segments
from kedge.torch_internals.dynamo import look_for_hooks
from kedge.torch_internals.graph_task import at_end_of_backward, backward_call, graph_task
from kedge.torch_internals.own_work import own_work
from kedge.torch_internals.saved_hooks import top_hooks

_TASKS_KEPT = 64
_CALLS_KEPT = 8
AWAITED = 256
"""The number of forward passes to wait for a known optimizer's first step."""


@dataclass(frozen=True)
class _When:
    """Steps ``after, after + n, ...`` before ``until``."""

    n: int
    after: int = 0
    until: int | None = None

    def __repr__(self) -> str:
        """The call that makes this schedule."""
        given = [str(self.n)]
        if self.after:
            given.append(f"after={self.after}")
        if self.until is not None:
            given.append(f"until={self.until}")
        return f"every({', '.join(given)})"

    def __call__(self, step: int) -> bool:
        begun = step >= self.after and (self.until is None or step < self.until)
        return begun and (step - self.after) % self.n == 0


@dataclass(frozen=True)
class _At:
    """Single steps."""

    steps: frozenset[int]  # asked in every step, and there may be thousands

    def __repr__(self) -> str:
        """The call that makes this schedule."""
        return f"at({', '.join(map(str, sorted(self.steps)))})"

    def __call__(self, step: int) -> bool:
        return step in self.steps


def is_schedule(given: object) -> bool:
    """Whether an object is a schedule that `every` or `at` made."""
    return isinstance(given, (_When, _At))


@called_as('kedge.hook(model, "layer4", kedge.record(), when=kedge.every(10))')
def every(n: int, *, after: int = 0, until: int | None = None) -> Schedule:
    """Return a schedule that selects one step in `n`.

    Args:
        n: The distance between two selected steps; 1 selects every step.
        after: The first selected step, counted from 0.
        until: The step before which the schedule ends; None for never.

    Returns:
        The schedule, for the argument `when` of `kedge.hook`.

    Raises:
        WrongCall: If `n` is below 1, or an argument is not a whole number.

    Examples:
        >>> schedule = kedge.every(10, after=100)
        >>> [step for step in range(130) if schedule(step)]
        [100, 110, 120]
    """
    for name, given in (("n", n), ("after", after), ("until", until)):
        if not (_is_step(given) or (name == "until" and given is None)):
            raise WrongCall(
                f"every({name}={described(given)}): {name} is a number of steps, "
                "as in kedge.every(10)"
            )
    if n < 1:
        raise WrongCall(f"every({n}): the distance between two steps must be 1 or more")
    if until is not None:
        until = int(until)
    return _When(int(n), int(after), until)


@called_as('kedge.hook(model, "layer4", kedge.record(), when=kedge.at(0, 10))')
def at(*steps: int) -> Schedule:
    """Return a schedule that selects exactly these steps.

    Args:
        steps: The steps, counted from 0.

    Returns:
        The schedule, for the argument `when` of `kedge.hook`.

    Raises:
        WrongCall: If there is no step, or one is not a whole number.

    Examples:
        >>> with kedge.hook(model, "relu", kedge.record(), when=kedge.at(0)) as acts:
        ...     output = model(images)
    """
    odd = [step for step in steps if not _is_step(step)]
    if odd or not steps:
        found = described(odd[0]) if odd else ""
        raise WrongCall(
            f"at({found}): give the numbers of the steps one by one, as in kedge.at(0, 10, 20)"
        )
    return _At(frozenset(map(int, steps)))


def _is_step(given: object) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool)  # NumPy's, too


class BackwardNumbers:
    """The backward passes of one session, numbered in the order in which their first hook fires.

    Attributes:
        count: How many there were so far.
        ending: The autograd task of the backward pass at whose end a step is counted; -1 for none.
    """

    def __init__(self) -> None:
        self.count = 0
        self.ending = -1
        #: Held while a backward pass is numbered: threads may run backward passes side by side.
        self._numbering = threading.RLock()
        self._known: dict[int, int] = {}
        self._calls: deque[NumberedCall] = deque(maxlen=_CALLS_KEPT)
        self._searched = (-1, False)

    def now(self, within: int = -1) -> int:
        """Return the number of this thread's backward pass, -1 outside of any.

        Args:
            within: The backward pass that recomputed this part of the graph, -1 for none: a
                backward that a reentrant checkpoint runs inside another belongs to that one.
        """
        task = graph_task()
        if task == -1:
            return -1
        number = self._known.get(task)
        if number is None:
            with self._numbering:
                number = within if within >= 0 else self._number()
                self._known[task] = number
                while len(self._known) > _TASKS_KEPT:
                    del self._known[next(iter(self._known))]
        return number

    def may_nest(self) -> bool:
        """Whether the current backward pass may run inside of another one, or another inside of it.

        The latter if it leads to a checkpoint that runs a backward pass.
        """
        task = graph_task()
        if task != self._searched[0]:
            call = backward_call()
            found = call is None or call.nested
            if call is not None and not call.nested:
                roots = (
                    getattr(root, "grad_fn", None) or getattr(root, "node", None)
                    for root in call.roots
                )
                found = any("Checkpoint" in node.name() for node in behind(roots))
            self._searched = task, found
        return self._searched[1]

    def _number(self) -> int:
        """Return the number of a backward pass that fires its first hook.

        See Note [One backward].
        """
        call = backward_call()
        marks = () if call is None else call.marks
        nested = call is not None and call.nested
        for known in self._calls if marks else ():
            if (nested or known.inside_only) and known.is_of(marks):
                known.inside_only = known.inside_only and nested
                return known.number
        number, self.count = self.count, self.count + 1
        if marks:
            refs = tuple(map(weakref.ref, marks))
            self._calls.append(NumberedCall(number, refs, inside_only=nested))
        return number


class NumberedCall:
    """A call of autograd by the program, and its number.

    # Note [One backward]
    The backward of a reentrant checkpoint differentiates the checkpointed part by a backward pass
    of its own. For autograd that is another pass, for the program it belongs to the call that it
    made: both have one number, whichever fires a hook first.

    Attributes:
        number: The number.
        inside_only: Whether hooks have fired only in passes inside of it.
    """

    def __init__(
        self, number: int, marks: tuple[weakref.ref[Any], ...], *, inside_only: bool
    ) -> None:
        self.number = number
        self._marks = marks
        self.inside_only = inside_only

    def is_of(self, marks: Sequence[Any]) -> bool:
        """Whether these tensors are those of the call."""
        return len(marks) == len(self._marks) and all(
            ref() is one for ref, one in zip(self._marks, marks, strict=True)
        )


class StepClock:
    """The steps and backward passes of one session.

    A step ends when an optimizer that holds one of the session's parameters has stepped; with
    several optimizers the first one seen counts. Until one has, each forward pass of the
    first hooked model is a step.

    Attributes:
        step: The current step, from 0.
        numbers: Numbers the forward passes of all hooked models.
        backwards: The backward passes.
        by_models: Whether the optimizers of the session's models make the steps, so that each model
            looks for its own.
        expects_optimizer: Whether an optimizer exists that will make the steps.
        awaited: For how many more forward passes to wait for a known optimizer.
        leader: The pass counter of the model whose forward passes are the steps where nothing
            optimizes.
    """

    by_models = True

    def __init__(self, rank: int) -> None:
        self.step = 0
        self.rank = rank
        self.numbers = itertools.count()
        self.led = 0
        self.backwards = BackwardNumbers()
        self.optimizer: tuple[int, int] | None = None
        self.expects_optimizer: Callable[[], bool] = lambda: False
        self.on_step: list[Callable[[int], None]] = []
        self.leader: PassCounter | None = None
        self.awaited = 0
        self.looked = False

    def optimized(self) -> None:
        """Count an optimizer's step.

        Within a backward, where it steps as gradients arrive, at the end of that backward.
        """
        task = graph_task()
        if task == -1:
            self.end_step()
        elif task != self.backwards.ending:
            self.backwards.ending = task
            if not at_end_of_backward(self.end_step):
                self.end_step()

    def end_step(self) -> None:
        """Count one step, and notify the listeners of the step that ended."""
        ended, self.step = self.step, self.step + 1
        with own_work():
            for listener in list(self.on_step):
                listener(ended)

    def follow(self, expects_optimizer: Callable[[], bool], prefix: str = "") -> PassCounter:
        """Return the pass counter of one more model.

        The first model's passes are the steps where nothing optimizes.
        """
        passes = PassCounter(self, ForwardPasses(), Segments(), prefix)
        if self.leader is None:
            self.lead(passes, expects_optimizer)
        return passes

    def follow_code(self) -> PassCounter:
        """Return the pass counter of code that belongs to no model; no optimizer is known to be its."""
        return self.follow(lambda: False)

    def lead(self, passes: PassCounter, expects_optimizer: Callable[[], bool]) -> None:
        """Set the model that defines the steps: by its optimizer if there is one, else by its forward passes."""
        self.leader = passes
        self.expects_optimizer = expects_optimizer
        self.led = 0

    def look(self) -> None:
        """Check, once, whether there is an optimizer, and set how many forward passes to wait for its first step."""
        self.looked = True
        self.awaited = AWAITED if self.expects_optimizer() else 0

    def began(self, passes: PassCounter, *, graded: bool) -> None:
        """Count a forward pass.

        Where nothing optimizes, the first hooked model's passes are the steps.
        """
        if self.leader is not passes:
            return
        if self.led and not self.looked and self.optimizer is None and graded:
            self.look()
        if self.optimizer is None and self.led and self.awaited <= 0:
            self.end_step()
        self.led += 1
        self.awaited -= 1


class ForwardPasses:
    """The forward passes of one hooked model that have begun, on all threads together.

    Attributes:
        count: How many there were, with those in which parts of the model were called by
            themselves.
        whole: How many of them called the model.
        raised: How many of those ended with an error.
        calls: What the program called in them.
        beginning: Called when one begins; None if nothing is to be done then.
    """

    def __init__(self) -> None:
        self.count = self.whole = self.raised = 0
        self.calls = FollowedCalls()
        self.beginning: Callable[[], None] | None = None


class PassCounter(threading.local):
    """Counts the forward passes of one hooked model, on each thread separately.

    Args:
        clock: The clock of the session.
        begun: The model's passes on all threads.
        segments: The model's checkpointed blocks.
        prefix: The first part of its sites' paths; empty for a model that the user named as the
            target.
    """

    def __init__(
        self, clock: StepClock, begun: ForwardPasses, segments: Segments, prefix: str = ""
    ) -> None:
        self.clock = clock
        self.begun = begun
        self.segments = segments
        self.prefix = prefix
        self.here = ThreadPosition()

    def label(self, path: str) -> str:
        """Return the path of a site for a path in the model."""
        if not self.prefix:
            return path
        if not path:
            return self.prefix
        return f"{self.prefix}.{path}"

    def note_program_calls(self, paths: dict[int, str]) -> None:
        """Note from now on what the program calls of a model, whose modules have these paths by their ids."""
        self.begun.calls.paths = {of: self.label(path) for of, path in paths.items()}

    def add_holder(self, holder: Holder) -> None:
        """Ask an action for its values when a part of the model is called again."""
        self.begun.calls.holders.append(holder)

    def differentiate(self, event: Event) -> None:
        """Note that a followed site had a gradient."""
        followed = self.begun.calls.on(event.replica)
        if followed is not None:
            followed.differentiate(event.site.path, event.pass_)

    def end_of(self, event: Event) -> ProgramCall | None:
        """Return the program's call that ended a value; None if the value is new."""
        followed = self.begun.calls.on(event.replica)
        if followed is None:
            return None
        return followed.end_of(event.site.path, event.pass_)

    def begin(self, *, inside: bool = True, graded: bool | None = None) -> None:
        """Start a forward pass.

        Args:
            inside: Whether the hooked model itself was called, so that `end` will follow.
            graded: Whether a graph is built; None for the current grad mode.
        """
        graded = torch.is_grad_enabled() if graded is None else graded
        here = self.here
        clock = self.clock
        number = next(clock.numbers)
        self.begun.count += 1
        self.begun.whole += inside
        if self.begun.beginning is not None:
            self.begun.beginning()
        clock.began(self, graded=graded)
        here.micro_batch = here.micro_batch + 1 if here.step == clock.step else 0
        here.step = clock.step
        here.pass_ = number
        here.inside = inside
        here.graded = graded
        here.calls.clear()
        here.past = None
        here.notes.begin_pass()
        here.followed = self.begun.calls.on(here.replica)
        if here.followed is not None and inside:
            here.followed.begin_model(number, clock.step)
        look_for_hooks()

    def end(self, *, raised: bool = False) -> None:
        """End a forward pass; later forward hooks of the model itself still belong to it.

        Args:
            raised: Whether the model's call has raised an error.
        """
        here = self.here
        here.inside = False
        self.begun.raised += raised
        if here.past is not None:
            here.past = {
                key: here.calls.pop(key)
                for key in list(here.calls)
                if getattr(key, "path", None) == ""
            }

    def count(self, key: Any) -> tuple[int, bool]:
        """Return the number of this call within its forward pass, and whether it is a recompute.

        A module called outside of the hooked model's forward belongs to no pass: one begins
        there, and the next when a module is called again.
        """
        here = self.here
        task = graph_task()
        if task != -1:
            return self._recount(task, key), True
        calls = here.calls
        if not here.inside and (here.pass_ < 0 or key in calls):
            self.begin(inside=False)
        call = calls.get(key, 0) or (here.past.get(key, 0) if here.past else 0)
        calls[key] = call + 1
        followed = here.followed
        if followed is not None and (followed.callers or not here.inside):
            self._reached(followed, key)
        here.segment = None
        if top_hooks(True) is not None or (here.graded and not torch.is_grad_enabled()):
            self.note_in_checkpoint(key, call)
        return call, False

    def note_in_checkpoint(self, key: Any, call: int) -> None:
        """Note a call in the checkpointed block that this thread is in, if any, whose recompute will repeat it."""
        here = self.here
        here.segment = self.segments.forward(here)
        if here.segment is not None:
            here.segment.add(key, call)

    def _reached(self, followed: ProgramCalls, key: Any) -> None:
        """Note, for actions that follow the program's calls, that one has reached a site."""
        here = self.here
        path = getattr(key, "path", None)
        if path is None:
            return
        if here.inside:
            followed.reached_by_model(self.label(path))
        else:
            followed.reached_by_part(self.label(path), here.pass_, here.step)

    def _recount(self, task: int, key: Any) -> int:
        """Return the number of the call that is recomputed.

        See Note [Which call is recomputed].
        """
        segment = self.recomputes()
        if segment is None:
            return self.here.recomputed.number(task, key)
        call = segment.again(task, key)
        inside = self.here.recomputed.inside
        if inside is not None:
            inside.add(key, call)
        return call

    def recomputes(self) -> Segment | None:
        """Find the checkpointed block that this thread recomputes.

        None if its forward was not seen.
        """
        here = self.here
        here.segment, here.recomputed.inside = self.segments.recompute()
        return here.segment

    def differentiates_again(self, listened: int) -> bool:
        """Return whether gradients come from the current recompute, not from the forward that it repeats.

        They do for a reentrant checkpoint; any other discards the graph of its recompute. If the
        checkpoint is unknown, a module that listened to gradients in its forward counts as in one
        that is not reentrant.

        Args:
            listened: How many gradients the module listened to in its forward.
        """
        segment = self.here.segment
        return segment.reentrant if segment is not None else not listened

    def is_heard(self, place: tuple[Any, Site, int], *, recompute: bool) -> bool:
        """Return whether a reentrant checkpoint's forward has set this hook, as on its inputs, which have their own graph."""
        here = self.here
        running = here.recomputed.inside if recompute else here.segment
        if running is not None:
            running.hear(place)
        return recompute and here.segment is not None and place in here.segment.heard

    def event(self, site: Site, call: int, recompute: bool) -> Event:
        """Return the event of a forward value."""
        here = self.here
        clock = self.clock
        origin, backward = (
            (here.segment or here, clock.backwards.now()) if recompute else (here, -1)
        )
        micro_batch = origin.micro_batch
        replica = origin.replica
        return Event(
            site,
            call,
            origin.pass_,
            backward,
            clock.step,
            micro_batch,
            clock.rank,
            replica,
            recompute,
        )


def rank() -> int:
    """Return this process's rank: that of `torch.distributed`, else the launcher's ``RANK`` if that is a number, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    launched = os.environ.get("RANK", "")
    return int(launched) if launched.isdecimal() else 0
