"""The hooks of a dump: each hands what it hears to the dump, and nothing that fails there ends the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from kedge.hooks.placing.concealed import Own
from kedge.repro.calls import Call, Holders
from kedge.repro.finiteness import Looks
from kedge.torch_internals.dynamo import untraced


class Listening(Protocol):
    """What these hooks report to.

    Attributes:
        looks: The values that are summed up.
    """

    looks: Looks

    def attempt(self, work: Callable[..., None], *args: Any) -> None:
        """Do something inside the program; a failure never ends the program."""

    def entered(self, post: Post, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called when a call begins."""

    def left(self, post: Post, module: nn.Module, given: tuple[Any, Any], output: Any) -> None:
        """Called when a call ends."""


class Post(Own):
    """What a dump knows of one module."""

    def __init__(self, dump: Listening, label: str) -> None:
        self.dump, self.label = dump, label
        self.calls = Holders()
        self.overwrites = False

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward-pre hook."""
        if not torch.compiler.is_compiling():
            self.dump.attempt(self.dump.entered, self, module, args, kwargs)


class Leave(Own):
    """The forward hook that belongs to a `Post`."""

    def __init__(self, post: Post) -> None:
        self.post = post

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        """The forward hook."""
        if not torch.compiler.is_compiling():
            self.post.dump.attempt(self.post.dump.left, self.post, module, (args, kwargs), output)


class Listen:
    """A hook for the gradient of a tensor."""

    __torch_unserializable__ = True  # a tensor is sent or saved without it, and without a warning

    def __init__(self, dump: Listening, work: Callable[[Tensor], None]) -> None:
        self.dump, self.work = dump, work

    def __call__(self, gradient: Tensor) -> None:
        """The tensor's hook."""
        self.dump.attempt(self.work, gradient)


class Share:
    """A hook for what one operation of a call adds to the gradient of an input; see Note [Shares of a gradient]."""

    def __init__(self, dump: Listening, call: Call, place: int) -> None:
        self.dump, self.call, self.place = dump, call, place

    def __call__(self, shares: tuple[Tensor | None, ...], gradients: tuple[Tensor | None, ...]) -> None:
        """The hook of an autograd node."""
        share = shares[self.place]
        if share is not None:
            self.dump.attempt(self.dump.looks.look, "in.grad", (self.call,), share)


untraced(Post.__call__, Leave.__call__, Listen.__call__)
