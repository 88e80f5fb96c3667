"""Where one step ends and the next one begins.

# Note [Steps]
A step is what is saved together and gone together: forward passes that are alive at the same time are of one step, so what a
plan keeps in memory it keeps once. The first tensor that is saved in a call of the model begins a step if something of the step
before was read back, or if what its first call saved has gone: its graph was abandoned, or each graph is dropped when the next
one is there. A call that saves nothing, as under ``no_grad``, is nothing. Outside of the model a saved tensor begins a step if
something was read back and all is gone: what belongs to the next call may be saved before it, and what is saved
beside a graph that was read and retained is of its step. Within a call no step ends, whatever is differentiated in it. A model
of which only parts are called has a step from the first to the last that is read. In a backward pass no step begins.

What is gone is known without asking autograd: whatever stands in a saved tensor's place holds a `ModelCall`, what is kept
by reference too, and the step has a weak reference to its first one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from kedge.torch_internals.graph_task import in_backward


def _none() -> None:
    return None


class OffloadStep:
    """What is saved together; see Note [Steps].

    Attributes:
        read: Whether something of it was read back.
        calls: How many calls of the model have saved something in it.
        latest: Returns what `call` would, without waiting for a lock, if something holds it already.
    """

    __slots__ = ("_first", "_lock", "calls", "latest", "read")

    def __init__(self) -> None:
        self.read, self.calls = False, 0
        self._first: weakref.ref[ModelCall] | None = None
        self.latest: Callable[[], ModelCall | None] = _none
        self._lock = threading.RLock()  # what is collected meanwhile may save, too

    @property
    def gone(self) -> bool:
        """Whether nothing is left of what was saved first."""
        return self._first is not None and self._first() is None

    def called(self) -> None:
        """Begin another call: what is saved from now on is that one's."""
        self.calls += 1
        if self.calls > 1:
            self.latest = _none

    def call(self) -> ModelCall:
        """Return what is to be held by what the call under way saves."""
        with self._lock:  # other threads save too
            latest = self.latest()
            if latest is None:
                latest = ModelCall(self)
                self.latest = ref = weakref.ref(latest)
                if self.calls <= 1:
                    self._first = ref
            return latest


class ModelCall:
    """Lives as long as anything that one call of the model saved."""

    __slots__ = ("__weakref__", "step")

    def __init__(self, step: OffloadStep) -> None:
        self.step = step

    def unpacked(self) -> None:
        """Note that something is read back."""
        self.step.read = True


class StepBoundaries:
    """Knows which step is under way.

    Attributes:
        step: The step.
        called: Whether the model was called since a tensor was saved last.
    """

    def __init__(self) -> None:
        self.step, self.called = OffloadStep(), False

    def begin(self) -> None:
        """Note that the model is called."""
        if torch.is_grad_enabled() and not in_backward():
            self.called = True

    def advance(self, path: str | None, *, recompute: bool) -> bool:
        """Go on to another step, or another call, if a tensor that is about to be saved begins one.

        It need not be asked as long as the model was not called, and nothing of the step was read back.

        Args:
            path: The module that saves the tensor; None outside of all.
            recompute: Whether activation checkpointing makes it again.

        Returns:
            Whether it is another step.
        """
        step, called = self.step, self.called
        if recompute or in_backward():
            return False
        self.called = False
        due = _is_over(step, path, called=called)
        if due:
            step = self.step = OffloadStep()
        if called:
            step.called()
        return due


def _is_over(step: OffloadStep, path: str | None, *, called: bool) -> bool:
    """See Note [Steps]."""
    if called:
        return step.read or (step.calls > 0 and step.gone)
    return step.read and (step.gone if path is None else not step.calls)
