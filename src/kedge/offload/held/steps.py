"""Step boundaries: where one step ends and the next one begins.

# Note [Steps]
A step is a set of tensors saved together and freed together: forward passes that are alive at the
same time belong to one step, so a plan's limit of memory covers all of them. The first tensor saved
in a call of the model begins a step if something of the step before was read back, or if all that
its first call saved is freed: its graph was abandoned, or the program drops each graph after the
next forward. A call that saves nothing, as under ``no_grad``, does not count. Outside of the model
a saved tensor begins a step if something was read back and the first call's tensors are freed: the
program may save tensors of the next call before it, and tensors saved beside a graph that was read
and retained belong to its step. Within a call no step ends, whatever the program differentiates in
it. If only parts of a model are called, a step lasts from the first saved tensor to the last one
read. In a backward pass no step begins.

Kedge knows without autograd what is freed: every handle, also of a tensor kept by reference, holds
a `ModelCall`, and the step has a weak reference to its first one.

# Note [Compared steps]
What is computed again is compared with what was saved. On an accelerator a comparison takes the
host several launches, so it is made in the first two steps and later in one of 128. A program that
changes tensors without autograd noticing does so step after step; the CPU, which reads a tensor's
memory in a fraction of the time that an operation takes, compares in every step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch

from kedge.torch_internals.graph_task import in_backward

_ALWAYS_COMPARED = 2
"""The first steps, all of which are compared; see Note [Compared steps]."""
_COMPARED_EVERY = 128
"""Of later steps, one in so many."""


def is_compared(number: int) -> bool:
    """Whether a step, counted from 1, is one in which what is computed again is compared.

    See Note [Compared steps].
    """
    return number <= _ALWAYS_COMPARED or number % _COMPARED_EVERY == 0


def _none() -> None:
    return None


class OffloadStep:
    """One step: tensors that are saved together; see Note [Steps].

    Attributes:
        read: Whether a tensor of it was read back.
        calls: The number of calls of the model that have saved something in it.
        latest: Returns the same as `call` without a lock; None if no saved tensor holds that call
            yet.
    """

    __slots__ = ("_first", "_lock", "calls", "latest", "read")

    def __init__(self) -> None:
        self.read = False
        self.calls = 0
        self._first: weakref.ref[ModelCall] | None = None
        self.latest: Callable[[], ModelCall | None] = _none
        self._lock = threading.RLock()  # reentrant: a garbage collection meanwhile may save, too

    @property
    def gone(self) -> bool:
        """Whether all tensors of the first call are freed."""
        return self._first is not None and self._first() is None

    def called(self) -> None:
        """Begin another call: tensors saved from now on belong to it."""
        self.calls += 1
        if self.calls > 1:
            self.latest = _none

    def call(self) -> ModelCall:
        """Return the object that the handles of the current call have to hold."""
        with self._lock:  # other threads save too
            latest = self.latest()
            if latest is None:
                latest = ModelCall(self)
                self.latest = ref = weakref.ref(latest)
                if self.calls <= 1:
                    self._first = ref
            return latest


class ModelCall:
    """One call of the model; lives as long as any tensor that it saved."""

    __slots__ = ("__weakref__", "step")

    def __init__(self, step: OffloadStep) -> None:
        self.step = step

    def unpacked(self) -> None:
        """Called when autograd reads a tensor of this call."""
        self.step.read = True


class StepBoundaries:
    """The current step, and the rule that ends it.

    Attributes:
        step: The current step.
        number: Its number, from 1.
        called: Whether the model was called since a tensor was saved last.
    """

    def __init__(self) -> None:
        self.step = OffloadStep()
        self.number = 1
        self.called = False

    def begin(self) -> None:
        """Called when the model is called."""
        if torch.is_grad_enabled() and not in_backward():
            self.called = True

    def advance(self, path: str | None, *, recompute: bool) -> bool:
        """Begin another step, or another call of the model, if it is due.

        That is decided by the tensor that is about to be saved. The call can be skipped as long as
        the model was not called, and nothing of the step was read back.

        Args:
            path: The module that saves the tensor; None outside of all.
            recompute: Whether activation checkpointing recomputes it.

        Returns:
            Whether another step began.
        """
        if recompute or in_backward():
            return False
        step = self.step
        called = self.called
        self.called = False

        # See Note [Steps].
        if called:
            due = step.read or (step.calls > 0 and step.gone)
        elif path is None:
            due = step.read and step.gone
        else:
            due = step.read and not step.calls

        if due:
            step = self.step = OffloadStep()
            self.number += 1
        if called:
            step.called()
        return due
