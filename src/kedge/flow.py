"""What flows between the parts: events, records, and what actions and sinks look like.

A site fires; that is an `Event`. Actions receive its value, and the event if they take two
arguments. Observers keep or emit `Record`s. Everything else in Kedge meets only here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from kedge.errors import ActionArity
from kedge.sites.site import Site


@dataclass(slots=True)
class Event:
    """One firing of one site.

    All indices count from 0 within the session.

    Attributes:
        site: Where, down to the leaf of a structured value.
        call: Which call of the module within its forward pass.
        pass_: Which forward pass of the hooked model.
        backward: Which backward pass; -1 outside of one.
        step: How many optimizer steps came before (forward passes, where nothing optimizes).
        micro_batch: Which forward pass since the last optimizer step.
        rank: The process's rank in `torch.distributed`, 0 without it.
        replica: The thread that ran the forward; "" for the main thread.
        recompute: Whether activation checkpointing runs this forward a second time.
    """

    site: Site
    call: int
    pass_: int
    backward: int
    step: int
    micro_batch: int
    rank: int
    replica: str
    recompute: bool


class Record(NamedTuple):
    """What an observer kept of one event."""

    event: Event
    value: Any


Act: TypeAlias = Callable[[Tensor, Event], "Tensor | None"]
"""An action as the firing loop calls it."""

Action: TypeAlias = Callable[..., Any]
"""An action as users write it: ``(value)`` or ``(value, event)``, returning None or a tensor."""

Schedule: TypeAlias = Callable[[int], bool]
"""When: told the step, says whether the action runs in it."""


def as_act(action: Action) -> Act:
    """Return an action as it is called with ``(value, event)``.

    Raises:
        ActionArity: If it takes neither one nor two arguments.
    """
    try:
        params = list(inspect.signature(action).parameters.values())
    except (TypeError, ValueError):  # builtins such as torch.zeros_like do not tell: they take the value
        return lambda value, _event: action(value)
    places = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in params)
    needs_keywords = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in params)
    if needs_keywords or len(needed) > 2 or not (places or any_number):
        raise ActionArity(
            f"the action {getattr(action, '__qualname__', action)}{inspect.signature(action)} cannot be called; "
            "an action takes (value) or (value, event), everything else needs a default"
        )
    if len(needed) == 2 or (len(places) > 1 and places[1].name == "event"):
        return action
    return lambda value, _event: action(value)


@runtime_checkable
class Bindable(Protocol):
    """An action that wants to know its sites beforehand."""

    def bind(self, site: Site) -> Act:
        """Return what is to be called at this site."""


@runtime_checkable
class Readable(Protocol):
    """An action whose records can be read through its handle: ``acts["layer4"]``."""

    def read(self, name: str, why: Callable[[str], str]) -> Any:
        """Return what was recorded under this name; `why` tells for an error why there is nothing."""

    def records(self, name: str) -> list[Record]:
        """Return everything that was kept under this name, in order of arrival."""


@runtime_checkable
class Preserving(Protocol):
    """An action that keeps values without copying and copies them before a module works in place."""

    def watch_overwrites(self) -> None:
        """Learn that the model has such modules."""

    def preserve(self, storages: Iterable[int]) -> None:
        """Copy what is kept of these storages."""


class Sink(Protocol):
    """Where the records of one step go."""

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Take the statistics of one step: one array a column, one row a site."""
