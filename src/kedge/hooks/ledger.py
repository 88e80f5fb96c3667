"""The sites that fired, in order, and those that did not, with the cause.

PyTorch's hooks are silent when they do not fire. The ledger is not: each site has either
fired or has a cause and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from kedge import notebook
from kedge.flow import Event
from kedge.hooks.attach import MOST_FIRINGS, Attachments
from kedge.hooks.firing.cause import Cause, ExpectedSilence
from kedge.hooks.firing.tap import Tap
from kedge.hooks.unfired import explain, explain_leaves, explaining_many
from kedge.short_text import counted, listed
from kedge.sites.folding import Fold, Folding, folded_names, pattern
from kedge.sites.language import parse
from kedge.sites.site import Site

_SHOWN = 12
_COLUMNS = ("step", "when", "call", "site", "action")
_SILENT = "nothing has fired"
_LAST = f"these are the last {MOST_FIRINGS:,} firings; earlier ones are not kept"


@dataclass(frozen=True)
class LedgerEntry:
    """One line of the ledger.

    Attributes:
        site: The site, as hooked.
        fired: How often its actions ran.
        cause: The cause of their never running; None if they ran.
        unseen: The lines that assign a variable something that is no site of its own.
    """

    site: Site
    fired: int
    cause: Cause | None
    unseen: tuple[str, ...] = ()

    def __str__(self) -> str:
        """The line."""
        if self.cause is None:
            return f"{self.site}  {self.what}"
        return f"{self.site}  never fired: {self.cause.why} ({self.cause.remedy})"

    @property
    def what(self) -> str:
        """What happened there, in words."""
        if self.cause is not None:
            return f"never fired: {self.cause.why}"
        fired = f"fired {counted(self.fired, 'time')}"
        if not self.unseen:
            return fired
        return f"{fired}; not seen: {listed(list(self.unseen), _SHOWN)}"


class Ledger(notebook.Printed):
    """How often each site of a session fired, or why it did not."""

    def __init__(
        self, entries: Iterable[LedgerEntry], leaves: Mapping[Site, Cause] | None = None
    ) -> None:
        self.entries = tuple(entries)
        #: Of sites that fired: why one of their leaves would not have.
        self._leaves = leaves or {}

    @classmethod
    def of(cls, taps: Iterable[Tap], session: Attachments) -> Ledger:
        """Return the ledger of some taps of a session, one entry a site."""
        by_site: dict[tuple[int, Site], list[Tap]] = {}
        for tap in taps:
            by_site.setdefault((tap.gate.whose, tap.site), []).append(tap)

        entries: list[LedgerEntry] = []
        leaves: dict[Site, Cause] = {}
        with explaining_many(session):
            for (_, site), group in by_site.items():
                fired = max(tap.fired for tap in group)
                if not fired:
                    entries.append(LedgerEntry(site, 0, explain(group[0], session)))
                    continue
                unseen = getattr(group[0].gate, "unseen", None)  # of an `OperationGate`
                entries.append(LedgerEntry(site, fired, None, tuple(unseen() if unseen else ())))
                for leaf, cause in explain_leaves(group[0], session).items():
                    leaves[replace(site, leaf=leaf)] = cause

        for site, cause in session.unmatched(taps):
            entries.append(LedgerEntry(site, 0, cause))
        return cls(entries, leaves)

    def __iter__(self) -> Iterator[LedgerEntry]:
        """The entries, in the order in which the sites were hooked."""
        return iter(self.entries)

    def __len__(self) -> int:
        """The number of sites."""
        return len(self.entries)

    def __getitem__(self, site: str) -> LedgerEntry:
        """The entry of a site, by its text; ``:out`` may be left out."""
        for entry in self.entries:
            if str(entry.site) in (site, f"{site}:out"):
                return entry
        raise KeyError(
            f'the ledger has no site "{site}"; it has '
            f"{', '.join(str(e.site) for e in self.entries[:_SHOWN])}"
        )

    def __str__(self) -> str:
        """A table: site, and times fired or the cause."""
        if not self.entries:
            return "no site was hooked"
        width = max(len(str(e.site)) for e in self.entries)
        return "\n".join(f"{e.site!s:{width}}  {e.what}" for e in self.entries)

    def _repr_html_(self) -> str:
        """The table for a notebook, with the causes and remedies of sites that never fired; alike blocks share a line."""
        if not self.entries:
            return notebook.paragraph(str(self))
        rows = [
            (one.name, f"{one.members[0].fired:,}", _causes(one))
            for one in _FOLDING.shown(self.entries)
        ]
        return notebook.table(("site", "fired", "cause"), rows, align="mrl")

    def silent(self) -> str:
        """The sites that never fired, grouped by cause, as a message; empty if all did.

        Sites with an `ExpectedSilence` are left out if others of their kind and operation fired.
        """
        groups: dict[Cause, list[str]] = {}
        fired = {(e.site.kind, e.site.op) for e in self.entries if e.fired}
        for e in self.entries:
            if e.cause is None:
                continue
            others_fired = (e.site.kind, e.site.op) in fired
            if isinstance(e.cause, ExpectedSilence) and others_fired:
                continue
            groups.setdefault(e.cause, []).append(str(e.site))
        if not groups:
            return ""

        count = sum(map(len, groups.values()))
        lines = [f"{count} of {len(self.entries)} hooked sites never fired"]
        for told, sites in _together(groups):
            lines.append(f"  {listed(sites, _SHOWN)}: {told}")
        return "\n".join(lines)

    def why(self, name: str) -> str:
        """Return why nothing was recorded under a name, as far as the ledger knows."""
        term = parse(name)[0]
        here = [
            e
            for e in self.entries
            if e.site.path == term.literal and (e.site.op is None) == (term.op is None)
        ]
        causes = [str(e) for e in here if e.cause is not None]
        causes += [
            str(LedgerEntry(site, 0, cause))
            for site, cause in self._leaves.items()
            if (site.path, site.kind, site.leaf, site.op)
            == (term.literal, term.kind, term.leaf, term.op)
        ]
        if causes:
            return "; ".join(causes)
        hooked = ", ".join(str(e.site) for e in self.entries[:_SHOWN])
        return f"the sites hooked here are {hooked or 'none'}"


_FOLDING = Folding[LedgerEntry](
    lambda entry: str(entry.site),
    lambda entry: (entry.fired, entry.cause and entry.cause.why),
)


def _together(groups: Mapping[Cause, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Yield causes as text with their sites.

    Many whose remedies differ only in the numbers of blocks are one.
    """
    alike: dict[tuple[object, ...], list[Cause]] = {}
    for cause in groups:
        alike.setdefault((cause.why, pattern(cause.remedy)), []).append(cause)
    for causes in alike.values():
        if len(causes) > _SHOWN:
            sites = folded_names(site for cause in causes for site in groups[cause])
            yield f"{causes[0].why}; {causes[0].remedy}, and so on", sites
        else:
            for cause in causes:
                yield f"{cause.why}; {cause.remedy}", groups[cause]


def _causes(fold: Fold[LedgerEntry]) -> str:
    """Return the cause of sites that share it.

    Remedies that name a site each are those of the first one and so on.
    """
    causes = [entry.cause for entry in fold.members if entry.cause is not None]
    if not causes:
        return ""
    text = f"never: {causes[0].why}; {causes[0].remedy}"
    if any(cause.remedy != causes[0].remedy for cause in causes):
        text += ", and so on"
    return text


class Timeline(notebook.Printed):
    """The firings of a session, in order."""

    def __init__(self, entries: tuple[tuple[Event, str], ...]) -> None:
        self.entries = entries

    def __iter__(self) -> Iterator[tuple[Event, str]]:
        """Each event, with the name of the action that ran."""
        return iter(self.entries)

    def __len__(self) -> int:
        """The number of firings kept, 2,000 at most."""
        return len(self.entries)

    @property
    def sites(self) -> list[str]:
        """The sites alone, as text."""
        return [str(event.site) for event, _ in self.entries]

    def __str__(self) -> str:
        """A table with one line a firing: step, pass or backward, call, site and action."""
        if not self.entries:
            return _SILENT
        rows = [_COLUMNS, *self._rows()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        if self._is_cut:
            lines.append(_LAST)
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """The firings for a notebook."""
        if not self.entries:
            return notebook.paragraph(_SILENT)
        note = _LAST if self._is_cut else ""
        return notebook.table(_COLUMNS, self._rows(), align="rlrmm", note=note)

    @property
    def _is_cut(self) -> bool:
        return len(self) == MOST_FIRINGS

    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for event, label in self.entries:
            when = f"pass {event.pass_}"
            if event.backward >= 0:
                when = f"backward {event.backward}"
            if event.recompute:
                when += ", recompute"
            step = str(event.step)
            call = str(event.call)
            rows.append((step, when, call, str(event.site), label))
        return rows
