"""What a model is called with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from kedge.hooks.placing.concealed import Own, conceal
from kedge.torch_internals import dynamo
from kedge.torch_internals.dynamo import untraced


class Arguments(Own):
    """The hook that hears what a module is called with."""

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self._tell = tell

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Be a forward-pre hook."""
        if not torch.compiler.is_compiling():
            self._tell((args, kwargs))


def hear(stack: ExitStack, model: nn.Module, tell: Callable[[Any], None]) -> None:
    """Have a function told, as each call of a model begins, the arguments; until `stack` is closed."""
    root = dynamo.unwrap(model)
    handle = root.register_forward_pre_hook(Arguments(tell), with_kwargs=True)
    stack.callback(handle.remove)
    stack.callback(conceal(root))


untraced(Arguments.__call__)
