"""Recorded once for each root: the lines that call its modules, and the tensors they save."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from time import perf_counter
from types import CodeType
from typing import Any, NamedTuple, Protocol

from torch import nn

from kedge.hooks.placing.module_calls import CallTracker, OpenCalls
from kedge.json_input.classes import as_json
from kedge.stderr import Shield
from kedge.store.events import SavedEvent
from kedge.store.saved_account import Sums
from kedge.torch_internals import dynamo
from kedge.torch_internals.module_tables import modules_in
from kedge.torch_internals.source_lines import calling_frame, source_of
from kedge.watch.models.roots import RootModule
from kedge.watch.records.saved_by_module import SavedByModule


class SavedTensorList(Protocol):
    """A list of every tensor saved in a step, made on request.

    Attributes:
        seconds: Seconds that it has taken of the program's time.
    """

    seconds: float

    def add(self, module: nn.Module, root: RootModule) -> None:
        """Follow a root whose call is active."""

    def close(self, step: int) -> SavedEvent | None:
        """Called when a step is over; returns the event for the recording.

        None as long as nothing was saved.
        """

    def stop(self) -> None:
        """Remove every hook, during a backward as soon as it is over."""


class Surveyed(NamedTuple):
    """A module of a followed root.

    Attributes:
        path: Its recorded path.
        is_root: Whether it is the root itself.
    """

    path: str
    is_root: bool


class FirstStep:
    """Follows the modules of new roots to the end of the step in which they appear.

    Attributes:
        sources: The line where the program calls a module, by the recorded path of the module.
        shield: Reports the first failure, after which nothing more is followed.
        step_account: Set to make the full list of saved tensors in the first step.
    """

    def __init__(self) -> None:
        self.sources: dict[str, Any] = {}
        self._by_module: SavedByModule | None = None
        self._modules: list[Sums] = []
        self._calls: CallTracker[Surveyed, tuple[Surveyed, nn.Module]] | None = None
        self.shield = Shield(
            "recording saved tensors", "they are not recorded", on_failure=self._modules.clear
        )
        self.step_account: SavedTensorList | None = None
        self._seconds = self._step_account_seconds = 0.0
        self._lines: dict[tuple[CodeType, int], dict[str, Any]] = {}
        self._leaving: Callable[[], SavedTensorList | None] = lambda: None

    @property
    def seconds(self) -> float:
        """Seconds that it has taken of the program's time, the list of saved tensors included."""
        seconds = self._seconds + self._step_account_seconds
        if self.step_account is not None:
            seconds += self.step_account.seconds
        return seconds

    def add(self, module: nn.Module, root: RootModule) -> None:
        """Follow a root whose call is active, too late for a pre-hook on it.

        Compiled models are left out: they would compile again when the hooks are removed.
        """
        if any(map(dynamo.compiles, modules_in(module).values())):
            return
        calls = self._tracker()
        for name, inner in modules_in(module).items():
            if name in root.types:
                is_root = inner is module
                calls.follow(inner, Surveyed(root.label(name), is_root), outermost=is_root)
        calls.join(module, Surveyed(root.label(""), is_root=True))
        if self.step_account is not None:
            self.shield(self.step_account.add, module, root)

    def _tracker(self) -> CallTracker[Surveyed, tuple[Surveyed, nn.Module]]:
        if self._calls is None:
            self._by_module = SavedByModule()
            self._calls = CallTracker(self._begin, self._end, shield=self.shield)
        return self._calls

    def _begin(
        self,
        calls: OpenCalls[tuple[Surveyed, nn.Module]],
        subject: Surveyed,
        module: nn.Module,
        given: Any,
    ) -> tuple[Surveyed, nn.Module]:
        start = perf_counter()
        if subject.path not in self.sources:  # its first call
            self.sources[subject.path] = self._line_of(module)
        if self._by_module is not None:
            self._by_module.begin(subject.path, _innermost(calls))
        self._seconds += perf_counter() - start
        return subject, module

    def _line_of(self, module: nn.Module) -> dict[str, Any] | None:
        """Return the line that calls a module; read once, as one line may call thousands."""
        frame = calling_frame(module)
        if frame is None:
            return None
        place = frame.f_code, frame.f_lineno
        if place not in self._lines:
            self._lines[place] = as_json(source_of(frame))
        return self._lines[place]

    def _end(
        self,
        calls: OpenCalls[tuple[Surveyed, nn.Module]],
        ended: tuple[Surveyed, nn.Module],
        output: Any,
    ) -> None:
        if self._by_module is None:
            return
        start = perf_counter()
        self._by_module.end(_innermost(calls))
        if ended[0].is_root:
            self._modules[:] = self._by_module.account(output, ended[1])
        self._seconds += perf_counter() - start

    def close(self, step: int) -> list[SavedEvent]:
        """Remove the hooks.

        Returns:
            The event about saved tensors for the recording; nothing if none were saved.
        """
        if self._calls is not None:
            self._calls.close()
            self._calls = None
        self._by_module = None
        modules = tuple(self._modules)
        self._modules.clear()
        self._lines.clear()

        event = self._close_step_account(step)
        if event is not None:
            return [event]
        if not modules:
            return []
        total = sum(sums.bytes for sums in modules)
        return [SavedEvent(step=step, bytes=total, modules=modules)]

    def end(self) -> None:
        """Remove every hook at the end of the watch, also if nothing was saved."""
        self.close(0)
        step_account = self.step_account or self._leaving()
        if step_account is not None:
            step_account.stop()

    def _close_step_account(self, step: int) -> SavedEvent | None:
        """Return the full list of the step that is over, if it was made; a run makes one."""
        step_account = self.step_account
        if step_account is None:
            return None
        event = self.shield(step_account.close, step)
        if self.shield.off or event is not None:
            step_account.stop()
            self.step_account = None
            self._step_account_seconds = step_account.seconds
            self._leaving = weakref.ref(step_account)
        return event


def _innermost(calls: OpenCalls[tuple[Surveyed, nn.Module]]) -> str | None:
    """Return the path of the module whose call is the innermost; None outside of all."""
    if not calls.notes:
        return None
    surveyed, _ = calls.notes[-1]
    return surveyed.path
