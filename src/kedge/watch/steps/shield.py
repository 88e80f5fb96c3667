"""The wrapper around each piece of Kedge's work inside the program, which never ends the program.

# Note [What a failure costs]
A piece of work is about one thing: a model, the hooks of a site, an optimizer, a backward pass, a
step. If it fails, this thing is not watched, and all else is: the failure is reported once with its
cause, and noted in the recording, whose verdict then names what was not watched.

# Note [Interrupts]
An interrupt, or another signal whose handler raises, may come between any two of Kedge's calls, and
the program may go on after it. So what the work changes in the process is put back by assignments
and by functions of C's alone, at the beginning of a ``finally``: Python runs handlers only when it
has made a call, or begins a function of Python's, as `__exit__` may be.
"""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

from kedge.actions.measure.meter import Meter
from kedge.signals import came_by_signal
from kedge.stderr import described_failure, release_frames, say
from kedge.store.events import UnseenDetail, UnseenEvent
from kedge.torch_internals import device_graphs, modes
from kedge.torch_internals.own_work import own_work
from kedge.watch.steps.costs import Costs

OFF = 0
"""The level at which a meter measures nothing."""

BACKWARD = "a backward pass"
OPTIMIZER = "the optimizer"
STEP = "a step"
"""Things that some work is about."""

_MANY = 20
"""How many times the objects that Python makes between two searches for garbage are many."""

P = ParamSpec("P")
T = TypeVar("T")


class WatchShield:
    """Wraps the work of a watcher.

    It is timed, runs in one thread at a time, and never ends the program. See Note [What a failure costs].

    Args:
        meter: The meter.
        costs: Times the work.

    Attributes:
        failure: The first error. Its notes hold the text of the traceback.
        losses: What failed, each with its cause, in the order of the first failures.
        over: Whether the watch has ended, so that nothing more is run; set while `meter.lock` is
            held.
        pauses_collection: Whether Python would collect garbage now, were it not for some work.
        in_child: Whether this is a forked child process, which only counts its optimizer steps.
        pid: The process that is watched.
    """

    def __init__(self, meter: Meter, costs: Costs) -> None:
        self.meter = meter
        self.costs = costs
        self.failure: Exception | None = None
        self.losses: dict[str, str] = {}
        self.over = False
        self.in_child = False
        self.pid = os.getpid()
        self.pauses_collection = self._is_working = False

    def around(self, work: Callable[..., None], of: str) -> Callable[..., None]:
        """Return a hook that runs some work.

        Args:
            work: The work.
            of: What it is about, such as ``a step``; of an object the hook's first argument, such
                as ``the model``.
        """

        def hook(*args: Any) -> None:
            if (
                self.in_child
                or torch.compiler.is_compiling()
                or modes.is_under_jit()
                or device_graphs.leaves_alone()
            ):
                return
            try:
                self.alone(self._unless_over, work, args)
            except Exception as error:  # noqa: BLE001 - Kedge's failures are not the program's
                self.lose(_named(of, args), error)

        return hook

    def attempt(
        self, what: str, work: Callable[P, T], *args: P.args, **named: P.kwargs
    ) -> T | None:
        """Return the result of a part of some work; None if it fails."""
        try:
            return work(*args, **named)
        except Exception as error:  # noqa: BLE001 - Kedge's failures are not the program's
            self.lose(what, error)
            return None

    def lose(self, what: str, error: Exception) -> None:
        """Report, once for each thing, that it cannot be watched.

        Raises:
            Exception: A signal handler of the program raised the error.
        """
        if came_by_signal(error):
            raise error
        cause = described_failure(error)
        release_frames(error)
        self.failure = self.failure or error
        if what not in self.losses:
            self.losses[what] = cause
            say(f"{what} cannot be watched: {cause}; everything else is")

    def notes(self) -> list[UnseenEvent]:
        """Return a note for each thing that was not watched."""
        lost = [UnseenDetail(name=what, cause=cause) for what, cause in self.losses.items()]
        return [UnseenEvent(what="failed", detail=detail) for detail in lost]

    def alone(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """Return the result of some work, which is timed, and runs in one thread at a time.

        See Note [Interrupts].

        Python collects no garbage meanwhile, and does not search for it among what the work has made
        and keeps: attaching to thousands of modules makes so many objects that all of the program's
        would be searched again and again, which took a third of the time.
        """
        with self.meter.lock:
            is_inside = self._is_working
            collects = gc.isenabled()
            try:
                self._is_working = True
                if collects:
                    self.pauses_collection = True
                    gc.disable()
                if not is_inside:
                    self.costs.end_interrupted()
                with self.costs, own_work():
                    return work(*args, **named)
            finally:
                self._is_working = is_inside
                if collects:
                    self.pauses_collection = False
                    _make_old()
                    gc.enable()

    def _unless_over(self, work: Callable[..., None], args: tuple[Any, ...]) -> None:
        if not self.over:  # as another thread may have ended the watch meanwhile
            work(*args)


def _make_old() -> None:
    """Count the objects that are new as old ones, where some work has made thousands that it keeps.

    Else Python would search them three times, as it searches all new ones: two seconds for
    10,000 modules. Garbage among the program's newest objects waits for the next full collection.
    """
    new, _, _ = gc.get_count()
    often, _, _ = gc.get_threshold()
    # What the program has frozen itself would be thawed.
    if new > _MANY * often > 0 and not gc.get_freeze_count():
        gc.freeze()
        gc.unfreeze()


def _named(of: str, args: tuple[Any, ...]) -> str:
    if of.startswith("the "):
        return f"{of} {type(args[0]).__name__}"
    return of


def stop_in_children(shield: WatchShield) -> None:
    """Stop measuring in forked children from now on: the recording belongs to their parent."""
    _watching.add(shield)


def _leave_to_parent() -> None:
    for shield in _watching:
        shield.meter.level = OFF
        shield.in_child = True
        # Another thread is at work then, which does not exist in the child.
        if shield.pauses_collection:
            gc.enable()


_watching: weakref.WeakSet[WatchShield] = weakref.WeakSet()

# Once: Python keeps such functions for ever.
os.register_at_fork(after_in_child=_leave_to_parent)
