"""What a model is called with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from kedge.hooks.placing.module_calls import CallTracker
from kedge.torch_internals import dynamo


def hear(stack: ExitStack, model: nn.Module, tell: Callable[[Any], None]) -> None:
    """Have a function called with the arguments as each call of a model begins, until `stack` is closed."""
    calls: CallTracker[None, None] = CallTracker(lambda _calls, _subject, _module, given: tell(given))
    calls.follow(dynamo.unwrap(model), None)
    stack.callback(calls.close)
