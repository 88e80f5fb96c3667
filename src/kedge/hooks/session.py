"""Until when: the block that attaches all or nothing and always removes what it attached."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal, Self

from torch import Tensor, nn

from kedge.errors import NeverFired, NeverFiredWarning, SessionEnded, warn
from kedge.flow import Schedule
from kedge.hooks.attach import Attachments
from kedge.hooks.handle import Hooked
from kedge.hooks.ledger import Ledger, Timeline


class Session(Attachments):
    """Hooks for the length of a ``with`` block: all attached or none, and always removed.

    Args:
        strict: Raise `NeverFired` at the end if a site did not fire, instead of warning.
        on_error: What an action's failure does: "raise" it, or "warn" and disable the action.
    """

    def __init__(self, *, strict: bool = False, on_error: Literal["raise", "warn"] = "raise") -> None:
        if on_error not in ("raise", "warn"):
            raise ValueError(f'on_error={on_error!r}: it is "raise" or "warn"')
        super().__init__(on_error)
        self.strict = strict

    def hook(self, target: Any, *what: Any, when: Schedule | None = None) -> Hooked:
        """Attach actions to the sites that a selector stands for.

        Args:
            target: A module with a selector; or a tensor, a dict of named tensors, or an autograd node.
            what: The selector (text or `Selector`; tensors and nodes may do without), then the actions in order.
            when: The schedule; None for always.

        Returns:
            The handle: it removes the hook, and reads what its actions recorded.

        Raises:
            NoSiteMatched: If the selector stands for nothing.
            NoSuchKind: If the target has no such kind of site.
            ActionArity: If an action cannot be called with (value) or (value, event).
            SessionEnded: If the session is over.
        """
        self._check_open()
        spec = self.attach(target, what, when)
        return Hooked(self, spec.taps, spec.actions)

    def _check_open(self) -> None:
        if self.ended:
            raise SessionEnded("this session has ended and its hooks are gone; open a new one")

    def pause(self) -> None:
        """Take every hook out of PyTorch's tables, those of gradients under way too; records and counts stay."""
        self.mounts.out()

    def resume(self, *, eager: bool = False) -> None:
        """Put every hook back in its place, unless the session is over.

        Args:
            eager: Whether the models are going to be called uncompiled, so that code compiled meanwhile can stay.
        """
        self._check_open()
        if self.mounts.back() and not eager:
            self.refresh()

    def ledger(self) -> Ledger:
        """How often each site fired, or why it did not."""
        return Ledger.of(self.taps, self)

    def timeline(self) -> Timeline:
        """Return the last 2,000 firings in the order in which they happened."""
        return Timeline(tuple((event, tap.label) for tap, event in self.fired or ()))

    def end(self, *, quiet: bool = False) -> None:
        """Remove every hook, then report the sites that never fired. A second call does nothing.

        Args:
            quiet: Report nothing, as when an exception is on its way.

        Raises:
            NeverFired: In a strict session, if a site did not fire.
        """
        if self.ended:
            return
        try:
            ledger = self.ledger()
        finally:
            self.remove()
        if quiet or not (silent := ledger.silent()):
            return
        if self.strict:
            raise NeverFired(silent)
        warn(NeverFiredWarning(silent))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        self.end(quiet=kind is not None)


def session(*, strict: bool = False, on_error: Literal["raise", "warn"] = "raise") -> Session:
    """Open a session: ``with kedge.session() as s: s.hook(...)``; see `Session`."""
    return Session(strict=strict, on_error=on_error)


def hook(target: nn.Module | Tensor | Mapping[str, Tensor] | Any, *what: Any, when: Schedule | None = None) -> Hooked:
    """Attach one hook in a session of its own, at once; arguments and errors as in `Session.hook`.

    Use it as a block, or keep the handle and call its ``remove()``.
    """
    alone = Session()
    hooked = alone.hook(target, *what, when=when)
    return Hooked(alone, hooked.taps, hooked.actions, alone.end)
