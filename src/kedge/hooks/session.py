"""The session: a block that attaches all hooks or none, and always removes them."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Literal, Self

from kedge.calls.arguments import called_as
from kedge.errors import NeverFired, NeverFiredWarning, SessionEnded, warn
from kedge.flow import Schedule
from kedge.hooks.attach import Attachments, warn_of_unrepeated
from kedge.hooks.handle import Hooked
from kedge.hooks.ledger import Ledger, Timeline
from kedge.hooks.open_sessions import in_block, opened
from kedge.hooks.signature import documented_like, typed
from kedge.torch_internals.own_work import own_work


class Session(Attachments):
    """Hooks for the length of a ``with`` block: all are attached or none, and all are removed at its end.

    Args:
        strict: Whether to raise `NeverFired` at the end if a hook never ran, instead of warning.
        on_error: What to do if an action fails: "raise" its error, or "warn" and switch the action
            off.
    """

    def __init__(
        self, *, strict: bool = False, on_error: Literal["raise", "warn"] = "raise"
    ) -> None:
        super().__init__(on_error)
        self.strict = strict

    @typed
    def hook(self, target: Any, *what: Any, when: Schedule | None = None) -> Hooked[Any]:
        """Attach actions to the sites that a selector matches.

        Args:
            target: A model, `everywhere` (also if left out), a tensor, a dict of named tensors, an
                autograd node, or a Python function, whose operations are hooked.
            what: The selector (text, a list of texts, or a `Selector`; optional for tensors and
                nodes), then one or more actions: `kedge.record()`, or any function that takes a
                tensor and returns None or a new tensor.
            when: The schedule, such as ``kedge.every(10)``, in optimizer steps; None for always.

        Returns:
            The handle, which removes the hook and maps names to recorded values, as in
            ``acts["layer4"]`` and ``dict(acts)``.

        Raises:
            NoSiteMatched: If the selector matches nothing.
            NoSuchKind: If the target has no such kind of value.
            ActionArity: If an action cannot be called with (value) or (value, event).
            SessionEnded: If the session has ended.
        """
        self._check_open()
        with own_work():
            spec = self.attach(target, what, when)
        return Hooked(self, spec.taps, spec.actions)

    def _check_open(self) -> None:
        if self.ended:
            raise SessionEnded("this session has ended and its hooks are gone; open a new one")

    def pause(self) -> None:
        """Remove every hook from PyTorch until `resume`, also those on existing graphs.

        Records and counts stay.
        """
        self.installed.out()

    def resume(self, *, eager: bool = False) -> None:
        """Put every hook back in its place after `pause`.

        Args:
            eager: Whether the models will be called uncompiled, so that code compiled during the
                pause can stay.

        Raises:
            SessionEnded: If the session has ended.
        """
        self._check_open()
        if self.installed.back() and not eager:
            self.refresh_hooked()

    def ledger(self) -> Ledger:
        """Return how often each hook fired, or why it did not."""
        with own_work():
            return Ledger.of(self.taps, self)

    def timeline(self) -> Timeline:
        """Return the last 2,000 firings of hooks, in order."""
        fired = tuple(self.fired or ())
        return Timeline(tuple((make(*of), tap.label) for tap, make, of in fired))

    def end(self, *, quiet: bool = False) -> None:
        """Remove every hook and report those that never fired. A second call does nothing.

        Args:
            quiet: Whether to report nothing, as when an exception is propagating.

        Raises:
            NeverFired: In a strict session, if a hook never ran.
        """
        if self.ended:
            return
        if quiet:  # nobody reads the ledger, and causes are searched for in sources
            self.remove()
            return
        try:
            ledger = self.ledger()
        finally:
            self.remove()
        warn_of_unrepeated(self.taps)
        if not (silent := ledger.silent()):
            return
        if self.strict:
            raise NeverFired(silent)
        warn(NeverFiredWarning(silent))

    def __enter__(self) -> Self:
        return in_block(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        self.end(quiet=kind is not None)


@documented_like(Session)
@called_as('with kedge.session() as s: s.hook(model, "layer4", kedge.record())')
def session(*, strict: bool = False, on_error: Literal["raise", "warn"] = "raise") -> Session:
    """Open a session, for hooks that end together: ``with kedge.session() as s: s.hook(...)``; returns the `Session`."""
    return opened(Session(strict=strict, on_error=on_error))


@typed
@documented_like(Session.hook)
def hook(target: Any, *what: Any, when: Schedule | None = None) -> Hooked[Any]:
    """Attach actions to places in a model, to record, measure or change values: for a block, or until ``remove()``.

    Examples:
        >>> with kedge.hook(model, "relu", kedge.record()) as acts:
        ...     output = model(images)
    """
    alone = opened(Session())
    hooked = alone.hook(target, *what, when=when)
    return Hooked(alone, hooked.taps, hooked.actions, alone.end)
