"""The sessions that no block ends: hooks that stay until they are removed, as after a cell of a notebook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from types import CellType
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from torch import nn

from kedge.errors import AttachedTwice, warn
from kedge.hooks.firing.tap import Tap
from kedge.hooks.target import HookedModel
from kedge.sites.site import Site
from kedge.torch_internals import dynamo


class OpenSession(Protocol):
    """A session, as it is found again without its handle."""

    taps: list[Tap]
    targets: dict[int, HookedModel]
    ended: bool

    def drop(self, taps: list[Tap]) -> None:
        """Remove taps before the session ends."""

    def remove(self) -> None:
        """Remove everything for good."""


S = TypeVar("S", bound=OpenSession)
_OPEN: WeakSet[OpenSession] = WeakSet()


def opened(session: S) -> S:
    """Note a session that the program has opened, until a block begins that will end it; returns the session."""
    _OPEN.add(session)
    return session


def in_block(session: S) -> S:
    """Note that a block will end the session; returns the session."""
    _OPEN.discard(session)
    return session


def taps_on(model: nn.Module, sites: Collection[Site] | None = None) -> list[tuple[OpenSession, list[Tap]]]:
    """Return the open sessions with hooks on a model, each with its actions there.

    Args:
        model: The model.
        sites: The only sites that matter; None for all.
    """
    model = dynamo.unwrap(model)
    found = ((session, _taps(session, model, sites)) for session in list(_OPEN) if not session.ended)
    return [(session, taps) for session, taps in found if taps]


def _taps(session: OpenSession, model: nn.Module, sites: Collection[Site] | None) -> list[Tap]:
    target = session.targets.get(id(model))
    if target is None or target.model() is not model:
        return []
    taps = [tap for tap in session.taps if tap.gate is not None and (sites is None or tap.site in sites)]
    return [tap for tap in taps if target.module_of(tap.gate) is not None]


def warn_of_repeated(session: OpenSession, target: Any, new: Sequence[Tap]) -> None:
    """Warn if the same action stands at the same site of a model already, in another session that no block ends."""
    if not _OPEN or not isinstance(target, nn.Module):
        return
    others = [taps for other, taps in taps_on(target, {tap.site for tap in new}) if other is not session]
    made = {_key(tap): tap for tap in new} if others else {}
    before: Counter[Any] = Counter()
    for taps in others:
        before.update({_key(tap) for tap in taps} & made.keys())
    if before:
        most = max(before.values())
        first = next(tap for key, tap in made.items() if key in before)
        more = f" and at {len(before) - 1} more sites" if len(before) > 1 else ""
        times = "an earlier one is" if most == 1 else f"{most} earlier ones are"
        warn(
            AttachedTwice(
                f"{first.label} is attached at {first.site}{more} again, and {times} still in place, so all of them run. To "
                "remove them, also without their handles: kedge.audit(model).remove(). A block removes its hooks by itself: "
                "with kedge.hook(...)"
            )
        )


def _key(tap: Tap) -> Any:
    return tap.site, tap.label, _code_of(tap.action), _code_of(tap.when) or tap.when


def _code_of(function: Any) -> Any:
    """Return the code of a function, its defaults and the plain values that it encloses; None for another object.

    A function that a cell defines anew has the same; two that a program makes for two names do not.
    """
    code = getattr(function, "__code__", None)
    if code is None:
        return None
    enclosed = [_plain(cell) for cell in getattr(function, "__closure__", None) or ()]
    own = code.co_code, code.co_consts, code.co_names, code.co_freevars
    return *own, repr(getattr(function, "__defaults__", None)), *enclosed


def _plain(cell: CellType) -> str:
    """Return the text of an enclosed value, of another one than a text or number its type."""
    try:
        value = cell.cell_contents
    except ValueError:  # the variable has no value yet
        return ""
    return repr(value) if isinstance(value, (str, bytes, int, float, complex)) else type(value).__name__
