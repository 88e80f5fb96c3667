"""The handle of one hook: removes it, and reads its records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from kedge.errors import ReadError
from kedge.flow import Readable, Record
from kedge.hooks.attach import Attachments
from kedge.hooks.firing.tap import Tap
from kedge.hooks.ledger import Ledger
from kedge.sites.language import parse
from kedge.sites.site import Site

_SHOWN = 3


@dataclass(eq=False, repr=False)
class Hooked:
    """The handle of one hook of a session, on one or many sites: removes it, and reads its records.

    Attributes:
        session: The session's `Attachments`.
        taps: The taps of this hook.
        actions: Its actions, in order.
        end: Ends the hook's own session; None if the hook belongs to a longer session.
    """

    session: Attachments
    taps: list[Tap]
    actions: tuple[Any, ...]
    end: Callable[..., None] | None = None

    def remove(self) -> None:
        """Remove this hook before its session ends; its records stay readable."""
        if self.end is not None:
            self.end()
        else:
            self.session.drop(self.taps)

    def ledger(self) -> Ledger:
        """Return how often each of its sites fired, or why it did not."""
        return Ledger.of(self.taps, self.session)

    def __getitem__(self, name: str) -> Any:
        """Return the value recorded under a site's name, such as ``"layer4"`` or ``"layer4#1:out.grad"``.

        Raises:
            NotRecorded: If there is none; the message has the cause.
            SeveralRecorded: If the name matches several values; the message lists their names.
            Overwritten: If the program changed the tensor in place after it was recorded.
        """
        return self._readable().read(canonical(self, name), self.ledger().why)

    def records(self, name: str) -> list[Record]:
        """Return every kept `Record` under a site's name, in order of arrival."""
        return self._readable().records(canonical(self, name))

    def __repr__(self) -> str:
        """The actions, their sites, and how often they ran there."""
        fired: dict[str, int] = {}
        for tap in self.taps:  # the actions at one site run together
            fired[str(tap.site)] = max(fired.get(str(tap.site), 0), tap.fired)
        more = f" and {len(fired) - _SHOWN} more" if len(fired) > _SHOWN else ""
        sites = ", ".join(list(fired)[:_SHOWN]) + more
        return f"<hook {', '.join(dict.fromkeys(tap.label for tap in self.taps))} at {sites}: fired {sum(fired.values())} times>"

    def _repr_html_(self) -> str:
        """The actions' own notebook output, such as statistics; the ledger if they have none."""
        shows = [show for action in self.actions if (show := getattr(action, "_repr_html_", None)) is not None]
        return "".join(show() for show in shows) if shows else self.ledger()._repr_html_()

    def _readable(self) -> Readable:
        found = [action for action in self.actions if isinstance(action, Readable)]
        if len(found) != 1:
            raise ReadError(
                f"this hook has {len(found)} recording actions, so a name does not select one record; give it "
                "exactly one kedge.record() or kedge.measure()"
            )
        return found[0]

    def __enter__(self) -> Self:
        """Begin a block that removes the hook at its end."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        """Remove the hook."""
        if self.end is not None:
            self.end(quiet=kind is not None)
        else:
            self.session.drop(self.taps)


def canonical(hooked: Hooked, name: str) -> str:
    """Return the name under which a site fires: the module's first name, and the names of arguments, not positions."""
    term = parse(name)[0]
    paths = {tap.site.path for tap in hooked.taps}
    path = term.literal
    if path is not None and path not in paths:
        path = next(
            (first for first in (t.first_name(path) for t in hooked.session.targets.values()) if first in paths), path
        )
    leaf = term.leaf
    if leaf is not None and term.op is None and term.kind in ("in", "in.grad", "in.share"):
        gates = (tap.gate.canonical for tap in hooked.taps if tap.site.path == path and hasattr(tap.gate, "canonical"))
        leaf = next((rename(leaf) for rename in gates), leaf)
    if path is None or (path, leaf) == (term.literal, term.leaf):
        return name
    site = str(Site(path, term.kind or "", leaf, term.call, term.op))
    return site if term.kind else site.removesuffix(":")
