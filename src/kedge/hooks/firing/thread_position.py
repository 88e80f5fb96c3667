"""The position of one thread in one model, and the notes that gates leave there."""

from __future__ import annotations

import threading
from types import FrameType
from typing import Any

from kedge.hooks.firing.program_calls import ProgramCalls
from kedge.torch_internals.checkpoint import Segment


class RecomputedCalls:
    """The calls in recomputes of an unknown checkpoint, counted from 0 in each backward pass.

    Attributes:
        inside: The innermost checkpointed block that the current recompute of a known one calls
            again.
    """

    __slots__ = ("_calls", "_task", "inside")

    def __init__(self) -> None:
        self.inside: Segment | None = None
        self._task = -1
        self._calls: dict[Any, int] = {}

    def number(self, task: int, key: Any) -> int:
        """Count a call.

        Returns its number in the backward pass of this autograd task.
        """
        if self._task != task:
            self._task = task
            self._calls.clear()
        call = self._calls.get(key, 0)
        self._calls[key] = call + 1
        return call


class GateNotes:
    """Notes that the gates of modules leave for each other: who saw a parameter first, the edges of inputs, and these inputs."""

    __slots__ = ("_edges", "_firsts", "_inputs")

    def __init__(self) -> None:
        self._firsts: dict[str, str] = {}
        self._edges: dict[Any, Any] = {}
        self._inputs: dict[Any, Any] = {}

    def begin_pass(self) -> None:
        """Forget who saw the parameters first, and the inputs of the last calls."""
        self._firsts.clear()
        self._inputs.clear()

    def is_first(self, path: str, holder: str) -> bool:
        """Return whether a module is the first of the pass to show a parameter, which several modules may hold."""
        return self._firsts.setdefault(path, holder) == holder

    def leave_edges(self, gate: Any, edges: Any) -> None:
        """Leave the gradient edges of a call's inputs for a gate."""
        self._edges[gate] = edges

    def leave_inputs(self, gate: Any, inputs: Any) -> None:
        """Leave the inputs of the newest call for a gate whose actions may ask for them."""
        self._inputs[gate] = inputs

    def inputs_of(self, gate: Any) -> Any:
        """Return the inputs that were left for a gate; None if nothing was."""
        return self._inputs.get(gate)

    def take_edges(self, gate: Any) -> Any:
        """Return the edges that were left for a gate, once.

        Without any, an empty dict.
        """
        return self._edges.pop(gate, {})


class ThreadPosition:
    """The position of one thread in one model: the forward pass, and the calls so far.

    Attributes:
        replica: The name of the thread; empty for the main thread.
        pass_: The number of the forward pass, -1 before the first.
        micro_batch: Its number among those of its step.
        step: Its step.
        graded: Whether it builds a graph.
        inside: Whether the hooked model's forward runs.
        frame: The frame that called the model.
        segment: The checkpointed block that the newest call is in; in a recompute the one that is
            recomputed.
        calls: The number of calls in the pass, by key.
        past: The calls of a model that calls itself; None of any other.
        recomputed: The calls in recomputes.
        notes: The notes of gates.
        followed: What the program calls of the model on this thread; None if no action follows that.
    """

    __slots__ = (
        "calls",
        "followed",
        "frame",
        "graded",
        "inside",
        "micro_batch",
        "notes",
        "pass_",
        "past",
        "recomputed",
        "replica",
        "segment",
        "step",
    )  # fmt: skip

    def __init__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.replica = "" if main else threading.current_thread().name
        self.pass_ = -1
        self.micro_batch = -1
        self.step = -1
        self.inside = self.graded = False
        self.segment: Segment | None = None
        self.frame: FrameType | None = None
        self.calls: dict[Any, int] = {}
        self.past: dict[Any, int] | None = None
        self.recomputed = RecomputedCalls()
        self.notes = GateNotes()
        self.followed: ProgramCalls | None = None
