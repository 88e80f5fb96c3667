"""Looks at a running program: they find where it is, and never stop it."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from kedge.watch.run.position import ProgramPosition

pytestmark = pytest.mark.timing


class Waiting(nn.Module):
    """Lets others look while it is called."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.inner = inner
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call what is inside, or wait for a look."""
        if self.inner is not None:
            result: torch.Tensor = self.inner(x)
            return result
        asking.set()
        answered.wait()
        return x


asking = threading.Event()
answered = threading.Event()


def watch_of(*roots: nn.Module) -> Any:
    """Return a watch of some models, named by their numbers."""
    named = []
    for number, root in enumerate(roots):
        named.append(
            SimpleNamespace(
                module=lambda root=root: root,
                label=lambda path, number=number: f"{number}:{path}",
            )
        )
    return SimpleNamespace(models=SimpleNamespace(roots=named), step=lambda: 7)


def seen_in(model: nn.Module, *roots: nn.Module) -> tuple[str | None, str | None]:
    """Look at a thread that calls a model; returns its module and direction."""
    asking.clear()
    answered.clear()
    thread = threading.Thread(target=model, args=(torch.ones(1),))
    thread.start()
    asking.wait()
    try:
        position = ProgramPosition(watch_of(*roots)).now()
    finally:
        answered.set()
        thread.join()
    return position.module, position.direction


def test_the_innermost_module_that_a_model_holds_is_named() -> None:
    """By the model that was found first; else by its class. The thread need not be the main one."""
    inner = Waiting()
    model = Waiting(inner)

    assert seen_in(model, nn.Linear(1, 1), model) == ("1:inner", "forward")
    assert seen_in(model) == ("Waiting", "forward")
    assert seen_in(Waiting(model), model) == ("0:inner", "forward")


def test_a_thread_that_calls_no_module_is_outside() -> None:
    """Its line is known."""
    position = ProgramPosition(watch_of()).now()

    assert (position.module, position.direction, position.step) == (None, None, 7)


def test_a_look_is_never_interrupted_by_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is off meanwhile, since in Python 3.11 it waits for a lock that is held then; after that it is as before."""
    during: list[bool] = []
    frames = sys._current_frames

    def noted() -> dict[int, FrameType]:
        during.append(gc.isenabled())
        return frames()

    monkeypatch.setattr(sys, "_current_frames", noted)
    position = ProgramPosition(watch_of())
    assert gc.isenabled()
    position.now()
    assert gc.isenabled()
    gc.disable()
    try:
        position.now()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert during == [False, False]
