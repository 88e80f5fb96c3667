"""What is done with a saved tensor that is worth the trouble: the choice, and what may choose."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kedge.offload.account import OffloadAccount, Outcome
from kedge.offload.codecs.codec import Codec
from kedge.offload.rebuild.recipe import Find
from kedge.offload.stores.store import Store


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
        """Return what the engine works by, with parts that report to the planner what they do; before the first step."""

    def choose(self, path: str | None, index: int, nbytes: int) -> Choice:
        """Choose for one saved tensor that is neither small, nor stays in any case, nor is known already.

        Args:
            path: The innermost module that runs; None outside of all.
            index: Which such tensor of the step it is in this module, from 0.
            nbytes: The bytes that it takes: those of its storage, or its own if only it is taken of a large storage.
        """

    def took(self, outcome: Outcome) -> None:
        """Note what was done with the tensor that was chosen for last."""

    def turn(self, account: OffloadAccount) -> None:
        """End a step, of which the account says what it came to."""


@dataclass(frozen=True)
class Policy:
    """What an engine works by.

    Attributes:
        least: Tensors of fewer bytes are kept by reference.
        find: Finds how a tensor can be rebuilt; None: nothing is rebuilt.
        store: Where bytes go; None: they stay in memory.
        codec: Stores them in fewer bits; None: as they are.
        planner: Chooses; None: everything is done that can be.
    """

    least: int = 65536
    find: Find | None = None
    store: Store | None = None
    codec: Codec | None = None
    planner: Planner | None = None

    def equipped(self) -> Policy:
        """The same, with parts that report to the planner, if there is one."""
        return self if self.planner is None else self.planner.equip(self)

    def why_kept(self, choice: Choice) -> str:
        """Return why a tensor is kept for which nothing that was chosen could be done."""
        if choice is Choice.KEEP:
            return "planned"
        return "no rule" if self.store is None or choice is Choice.REBUILD else "here"
