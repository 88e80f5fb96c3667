"""The choice for a saved tensor that is not small, and the planner and policy that make it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from kedge.offload.codecs.codec import Codec
from kedge.offload.outcomes import OffloadAccount, Outcome
from kedge.offload.rebuild.recipe import Find
from kedge.offload.stores.store import Store


class Choice(Enum):
    """The treatment of one saved tensor; if it is not possible, the tensor is kept by reference."""

    KEEP = "keep"
    REBUILD = "rebuild"
    RECOMPUTE = "recompute"
    MOVE = "move"
    COMPRESS = "compress"
    ALL = "all"
    """Rebuild it if a rule applies.

    Otherwise compress it if there is a codec, and move it if there is a store.
    """


class PlannedCall(Protocol):
    """One call of a module that may be run again.

    Attributes:
        again: Whether it is run again in backward; if not, its tensors are treated one by one.
    """

    again: bool

    def begin(self) -> None:
        """Called when the call begins."""

    def end(self, nbytes: int = 0, inputs: int = 0) -> None:
        """Called when the call has ended.

        Args:
            nbytes: Of a call that is run again, the bytes that it saved and did not keep.
            inputs: The bytes of its inputs, which are kept for the second run.
        """

    def second_run(self) -> AbstractContextManager[None]:
        """Context around the second run."""


class Planner(Protocol):
    """A planner that chooses tensor by tensor, and call by call.

    Its choices in the first step, which it learns from, are carried out too.
    """

    @property
    def shown(self) -> object:
        """What the account shows: the plan, or that there is none yet."""

    def equip(self, policy: Policy) -> Policy:
        """Return the policy with parts that report to the planner; called before the first step."""

    def choose(self, path: str | None, index: int, nbytes: int) -> Choice:
        """Return the choice for one saved tensor.

        It is not small, does not stay in any case, and is not known yet.

        Args:
            path: The innermost module that runs; None outside of all.
            index: The number of the tensor among those of this module in the step, from 0.
            nbytes: The bytes that it takes: those of its storage, or its own if only it is taken of
                a large storage.
        """

    def plan_call(self, path: str) -> PlannedCall:
        """Return what is planned for the call of a module that may be run again, and begins now."""

    def took(self, outcome: Outcome) -> None:
        """Called with the outcome of the tensor of the last choice."""

    def turn(self, account: OffloadAccount) -> None:
        """Called at the end of a step, with the account."""


@dataclass(frozen=True)
class Policy:
    """The policy of an engine.

    Attributes:
        least: Tensors of fewer bytes are kept by reference.
        find: Returns the recipe of a tensor; None: nothing is rebuilt.
        store: The store for moved bytes; None: they stay in memory.
        codec: The codec that stores them in fewer bits; None: they are stored as they are.
        planner: The planner that chooses; None: `Choice.ALL` for every tensor.
    """

    least: int = 65536
    find: Find | None = None
    store: Store | None = None
    codec: Codec | None = None
    planner: Planner | None = None

    def equipped(self) -> Policy:
        """Return the policy with parts that report to the planner, if there is one."""
        if self.planner is None:
            return self
        return self.planner.equip(self)

    def why_kept(self, choice: Choice) -> str:
        """Return the reason why a tensor is kept.

        Either that is the choice, or the choice could not be carried out.
        """
        if choice is Choice.KEEP:
            return "planned"
        if self.store is None or choice is Choice.REBUILD:
            return "no rule"
        return "here"
