"""Who holds the memory that autograd saves for backward, as the page's section about it needs it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from kedge.store.recording import Recording
from kedge.store.saved_account import account_of, named, newest, sections

MOST_BARS = 16


def account_section(recording: Recording) -> dict[str, Any] | None:
    """Condense the account of a step in which everything that is saved was written down; None if there is none."""
    event = newest(recording.events)
    account = None if event is None else account_of(event)
    if event is None or account is None:
        return None
    largest = sorted((sums for sums in account.modules if sums.bytes), key=lambda sums: -sums.bytes)[:MOST_BARS]
    names = {named(sums.path): sums.path for sums in account.tree}
    totals, modules, lines = sections(account)
    return {
        "step": event.get("step"),
        "held": account.total.bytes,
        "totals": [list(row) for row in totals.rows],
        "modules": asdict(modules) | {"paths": [names.get(row[0]) for row in modules.rows]},
        "lines": asdict(lines),
        "bars": [
            {
                "path": sums.path,
                "name": named(sums.path),
                "held": sums.bytes,
                "rebuild": sums.rebuild,
                "offload": sums.offload,
            }
            for sums in largest
        ],
        "course": asdict(account.course),
    }
