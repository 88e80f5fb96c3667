"""The arguments of a model's calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from kedge.hooks.placing.module_calls import CallTracker
from kedge.torch_internals import dynamo


def hear(stack: ExitStack, model: nn.Module, tell: Callable[[Any], None]) -> None:
    """Call a function with the arguments (args, kwargs) at the beginning of each call of a model, until `stack` closes."""
    calls: CallTracker[None, None] = CallTracker(
        lambda _calls, _subject, _module, given: tell(given)
    )
    calls.follow(dynamo.unwrap(model), None)
    stack.callback(calls.close)
