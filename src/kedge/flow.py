"""The types shared by all parts: events, records, and the protocols of actions and sinks.

Each firing of a site is an `Event`. Actions receive the site's value, and the event if they take
two arguments. Observers keep or emit `Record`s. All other parts of Kedge share only these types.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

from torch import Tensor

from kedge.errors import ActionArity
from kedge.event_call import CallOfEvent
from kedge.sites.site import Site


@dataclass(slots=True)
class Event(CallOfEvent):
    """One firing of one site; `CallOfEvent` shows its module, inputs and output while the action runs.

    All indices count from 0 within the session.

    Attributes:
        site: The site, down to the leaf of a structured value.
        call: The number of the module's call within its forward pass.
        pass_: The number of the hooked model's forward pass.
        backward: The number of the backward pass; -1 outside of one.
        step: The number of optimizer steps before (of forward passes, where nothing optimizes).
        micro_batch: The number of the forward pass since the last optimizer step.
        rank: The process's rank: that of `torch.distributed`, else ``RANK`` of the environment,
            else 0.
        replica: The thread that ran the forward; "" for the main thread.
        recompute: Whether a checkpoint's recompute runs this forward a second time.
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
    """One event, and the value that an observer kept of it."""

    event: Event
    value: Any


V_co = TypeVar("V_co", covariant=True)

Act: TypeAlias = Callable[[Tensor, Event], "Tensor | None"]
"""An action as the firing loop calls it."""

Action: TypeAlias = Callable[..., Any]
"""An action as users write it: ``(value)`` or ``(value, event)``, returning None or a tensor."""

Schedule: TypeAlias = Callable[[int], bool]
"""Whether an action runs in a step, given the step's number."""


def as_act(action: Action) -> Act:
    """Return an action as a function of ``(value, event)``.

    Raises:
        ActionArity: If it takes neither one nor two arguments.
    """
    try:
        params = list(inspect.signature(action).parameters.values())
    except (
        TypeError,
        ValueError,
    ):  # builtins such as torch.zeros_like have no signature: they take the value
        return lambda value, _event: action(value)
    places = [p for p in params if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    needed = [p for p in places if p.default is p.empty]
    any_number = any(p.kind is p.VAR_POSITIONAL for p in params)
    needs_keywords = any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in params)
    if needs_keywords or len(needed) > 2 or not (places or any_number):
        torchs = "; for a hook of PyTorch use kedge.from_hook(...)" if len(needed) in (3, 4) else ""
        raise ActionArity(
            f"{getattr(action, '__qualname__', action)}{inspect.signature(action)} is not an action: an action takes (value) or "
            f"(value, event), everything else needs a default{torchs}"
        )
    if len(needed) == 2 or (len(places) > 1 and places[1].name == "event"):
        return action
    return lambda value, _event: action(value)


@runtime_checkable
class Bindable(Protocol):
    """An action that receives its sites beforehand."""

    def bind(self, site: Site) -> Act:
        """Return the function to call at this site."""


@runtime_checkable
class Readable(Protocol[V_co]):
    """An action whose records can be read through its handle: ``acts["layer4"]``."""

    def read(self, name: str, why: Callable[[str], str]) -> V_co:
        """Return the value recorded under a name; for an error, `why` returns the reason why there is none."""

    def records(self, name: str) -> list[Record]:
        """Return every record kept under a name, in order of arrival."""


@runtime_checkable
class Preserving(Protocol):
    """An action that keeps values without copying, and copies them before a module or operation works in place."""

    def expect_overwrites(self, site: Site) -> None:
        """Called for a site whose value the forward overwrites later, as its source shows."""

    def watch_overwrites(self) -> None:
        """Called if the model has modules or hooked operations that may work in place."""

    def preserve(self, storages: Iterable[int]) -> None:
        """Copy the kept values of these storages."""


@runtime_checkable
class Following(Protocol):
    """An action that needs to know in which passes of its model a site had no value."""

    def follow(self, tap: Any, passes: Any) -> None:
        """Called with each of its taps in a model, and with what counts the model's passes."""


class NotingLeaves(Protocol):
    """An action that needs to know in which order the leaves of a value come in the forward."""

    def note_leaf(self, site: Site) -> None:
        """Called in the forward, at a leaf's first value or before its first gradient."""


class Sink(Protocol):
    """The destination of each step's records."""

    def stats(self, step: int, columns: Mapping[str, Any]) -> None:
        """Called with the statistics of one step: one array a column, one row a site."""
