"""What is done with a saved tensor that is worth the trouble: the choice, and what may choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from torch import Tensor

from kedge.offload.account import Account
from kedge.offload.codecs.codec import Codec
from kedge.offload.held.handle import Handle
from kedge.offload.rebuild.recipe import Recipe
from kedge.offload.stores.store import Store

HandleOf = Callable[[Any], Handle | None]
Find = Callable[[Tensor, HandleOf], Recipe | None]


class Choice(Enum):
    """What is done with one saved tensor; where it cannot be, the tensor is kept by reference."""

    KEEP = "keep"
    REBUILD = "rebuild"
    MOVE = "move"
    COMPRESS = "compress"
    ALL = "all"
    """Rebuild it if a rule applies; otherwise compress it if there is a codec, and move it if there is a store."""


class Planner(Protocol):
    """Chooses, tensor by tensor. The first step is there to learn from: what is chosen in it holds as well."""

    def equip(self, policy: Policy) -> Policy:
        """Give what the engine works by, with parts that tell the planner what they do; before the first step."""

    def choose(self, path: str | None, index: int, nbytes: int) -> Choice:
        """Choose for one saved tensor that is neither small, nor kept anyhow, nor known already.

        Args:
            path: The innermost module that runs; None outside of all.
            index: Which such tensor of the step it is in this module, from 0.
            nbytes: The bytes that it takes: those of its storage, or its own if only it is taken of a large storage.
        """

    def took(self, path: str | None, index: int, what: str, seconds: float) -> None:
        """Hear what was done, ``"rebuilt gelu"``, ``"moved disk"``, ``"kept planned"``, and how long it took."""

    def turn(self, account: Account) -> None:
        """Hear that a step is over, and what it came to."""


class All:
    """Does everything that can be done, and learns nothing."""

    def equip(self, policy: Policy) -> Policy:
        """Change nothing."""
        return policy

    def choose(self, path: str | None, index: int, nbytes: int) -> Choice:  # noqa: ARG002 - it is a Planner
        """Choose all."""
        return Choice.ALL

    def took(self, path: str | None, index: int, what: str, seconds: float) -> None:
        """Ignore it."""

    def turn(self, account: Account) -> None:
        """Ignore it."""


@dataclass(frozen=True)
class Policy:
    """What an engine works by.

    Attributes:
        least: Tensors of fewer bytes are kept by reference.
        find: Finds how a tensor can be rebuilt; None: nothing is rebuilt.
        store: Where bytes go; None: they stay in memory.
        codec: Stores them in fewer bits; None: as they are.
        planner: Chooses.
    """

    least: int = 65536
    find: Find | None = None
    store: Store | None = None
    codec: Codec | None = None
    planner: Planner = field(default_factory=All)
