"""What one call of a module runs as its forward, and the blocks around it.

A forward-pre hook asks for the `ForwardCall` of the call that runs it; see Note [The forward of one
call] in `torch_internals.module_calls`. It is shared by all sessions, and over when the call is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import FrameType
from typing import Any

from torch import nn

from kedge.torch_internals.dynamo import untraced
from kedge.torch_internals.module_calls import forward_cell

Block = Callable[[], AbstractContextManager[Any]]


class ForwardCall:
    """The forward of one call of a module.

    Attributes:
        forward: What runs: at first the module's forward.
        blocks: Make the blocks in which it runs, the first outermost. They also end by an interrupt.
        checks: Called with its output in these blocks.
    """

    __slots__ = ("blocks", "checks", "forward")

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.blocks: list[Block] = []
        self.checks: list[Callable[[Any], None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        __tracebackhide__ = True
        if not self.blocks:
            return self.forward(*args, **kwargs)
        with ExitStack() as stack:
            for block in self.blocks:
                stack.enter_context(block())
            output = self.forward(*args, **kwargs)
            for check in self.checks:
                check(output)
            return output


def forward_call(module: nn.Module, frame: FrameType) -> ForwardCall | None:
    """Return the forward of the call of a module that runs a forward-pre hook.

    Args:
        module: The module.
        frame: A frame of the hook.

    Returns:
        The forward; None if PyTorch does not call the hook in a call of the module.
    """
    cell = forward_cell(module, frame)
    if cell is None:
        return None
    held = cell.cell_contents
    if not isinstance(held, ForwardCall):
        held = cell.cell_contents = ForwardCall(held)
    return held


AROUND = id(ForwardCall.__call__.__code__)
"""The id of the code between a call and the forward."""

untraced(ForwardCall.__call__)
