"""A pair of hooks around the calls of a module, which surround as little else as possible.

The pre-hook goes before all others of the module, so it sees the inputs of the call. The forward hook
goes before all others, too: what other hooks do with the output comes after it. It runs also when
the call raises.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from torch.compiler import is_compiling

from kedge.hooks.placing.concealed import KedgeHook
from kedge.hooks.placing.installed import ConcealedHook
from kedge.torch_internals.dynamo import untraced

Begin = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
End = Callable[[nn.Module, Any], None]


def bracket(stack: ExitStack, module: nn.Module, begin: Begin, end: End) -> None:
    """Call functions as each call of a module begins and ends, until a stack closes.

    Args:
        stack: Removes the hooks.
        module: The module.
        begin: Called with the module and its arguments by position and by name.
        end: Called with the module and its output; None if the call raised.
    """
    handles = (
        module.register_forward_pre_hook(BracketBegins(begin), prepend=True, with_kwargs=True),
        module.register_forward_hook(BracketEnds(end), prepend=True, always_call=True),
    )
    for handle in handles:
        stack.callback(ConcealedHook(handle).remove)


def bracket_hooks(stack: ExitStack, module: nn.Module, begun: Begin, ended: End) -> None:
    """Call functions when the pre-hooks of each call have run, and when its forward hooks have.

    With `bracket` around them, the hooks of a module lie between two moments before its forward and
    two behind it. Arguments as those of `bracket`.
    """
    handles = (
        module.register_forward_pre_hook(BracketBegins(begun), with_kwargs=True),
        module.register_forward_hook(BracketEnds(ended), always_call=True),
    )
    for handle in handles:
        stack.callback(ConcealedHook(handle).remove)


class BracketBegins(KedgeHook):
    """Forward-pre hook of a bracket."""

    def __init__(self, begin: Begin) -> None:
        self.begin = begin

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        """Begin a call, unless a compiler captures it.

        PyTorch leaves out the arguments by name in a call of another thread that runs while the
        hook is put in or taken out.
        """
        if not is_compiling():
            self.begin(module, args, kwargs or {})


class BracketEnds(KedgeHook):
    """Forward hook of a bracket."""

    def __init__(self, end: End) -> None:
        self.end = end

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a call, unless a compiler captures it."""
        if not is_compiling():
            self.end(module, output)


untraced(BracketBegins.__call__, BracketEnds.__call__)
