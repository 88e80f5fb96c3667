"""The sessions that no block ends: hooks that stay until they are removed, as after a cell of a notebook."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from types import FunctionType, MethodType
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

from torch import Tensor, nn

from kedge.calls.closure import defaults, enclosed
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
_DEPTH = 3
"""How far functions within functions are compared."""


def opened(session: S) -> S:
    """Note a session that the program has opened, until a block begins that will end it; returns the session."""
    _OPEN.add(session)
    return session


def in_block(session: S) -> S:
    """Note that a block will end the session; returns the session."""
    _OPEN.discard(session)
    return session


def taps_on(
    model: nn.Module, sites: Collection[Site] | None = None
) -> list[tuple[OpenSession, list[Tap]]]:
    """Return the open sessions with hooks on a model, each with its actions there.

    Args:
        model: The model.
        sites: The only sites that matter; None for all.
    """
    model = dynamo.unwrap(model)
    found = []
    for session in list(_OPEN):
        target = session.targets.get(id(model))
        if session.ended or target is None or target.model() is not model:
            continue
        taps = [tap for tap in session.taps if tap.gate is not None]
        if sites is not None:
            taps = [tap for tap in taps if tap.site in sites]
        taps = [tap for tap in taps if target.module_of(tap.gate) is not None]
        if taps:
            found.append((session, taps))
    return found


def warn_of_repeated(session: OpenSession, target: Any, new: Sequence[Tap]) -> None:
    """Warn if the same action stands at the same site of a model already, in another session that no block ends."""
    if not _OPEN or not isinstance(target, nn.Module):
        return
    on_sites = taps_on(target, {tap.site for tap in new})
    others = [taps for other, taps in on_sites if other is not session]
    if not others:
        return

    made = {_key(tap): tap for tap in new}
    before: Counter[Any] = Counter()
    for taps in others:
        before.update({_key(tap) for tap in taps} & made.keys())
    if not before:
        return

    first = next(tap for key, tap in made.items() if key in before)
    more = ""
    if len(before) > 1:
        more = f" and at {len(before) - 1} more sites"
    times = "an earlier one is"
    most = max(before.values())
    if most > 1:
        times = f"{most} earlier ones are"
    warn(
        AttachedTwice(
            f"{first.label} is attached at {first.site}{more} again, and {times} "
            "still in place, so all of them run. kedge.audit(model).remove() "
            "removes the hooks that no block removes, even if their handles are "
            "lost. A block, with kedge.hook(...), removes its own"
        )
    )


def _key(tap: Tap) -> Any:
    own = _parts(tap.action, _DEPTH)
    if isinstance(tap.action, (FunctionType, MethodType, nn.Module)):
        own = _sameness(tap.action)
    return tap.site, tap.label, own, _sameness(tap.when)


def _sameness(held: Any, depth: int = _DEPTH) -> Any:
    """Return a key that is equal for what does the same: a number, a function that a cell defines again, an edit.

    Everything else is the same only as one object. So two tensors of one shape differ, as two
    directions to steer in do.
    """
    if isinstance(held, MethodType):
        return id(held.__self__), _sameness(held.__func__, depth)
    if isinstance(held, FunctionType) and depth:
        code = held.__code__
        inner = [*defaults(held).values(), *enclosed(held).values()]
        made_of = (code.co_code, code.co_consts, code.co_names, code.co_freevars)
        return made_of, tuple(_sameness(each, depth - 1) for each in inner)
    if held is None or isinstance(held, (int, float, str)):
        return type(held), held
    if depth and callable(held) and type(held).__module__.startswith("kedge."):
        return type(held), repr(held), _parts(held, depth - 1)
    return id(held)


def _parts(action: Any, depth: int) -> Any:
    """Return keys of the functions and tensors that an action object holds, which its name leaves out."""
    held = getattr(action, "__dict__", {}).values()
    return tuple(
        _sameness(each, depth)
        for each in held
        if isinstance(each, (FunctionType, MethodType, Tensor))
    )
