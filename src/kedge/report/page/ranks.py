"""What each of several ranks recorded, for a page that shows all together and can show one by itself."""

from __future__ import annotations

from typing import Any

from kedge.report.page.curves import curves
from kedge.report.page.heatmap_sheets import sheets_of
from kedge.report.page.step_bins import Bins
from kedge.store.recording import Recording

#: How many numbers of single ranks a page takes: some ten megabytes of it.
MOST = 4_000_000


def ranks_of(recording: Recording, bins: Bins) -> tuple[dict[str, Any], dict[str, str]]:
    """Describe what each rank recorded by itself, in the columns that all have together.

    The lowest ranks are taken, as many as a page has room for; their numbers have two or three digits.

    Returns:
        The ranks that are ``shown``, each with its sheets and curves, and those that are ``left_out``; and the texts
        of the sheets' tables, by the rank and the sheet's name.
    """
    shown: list[dict[str, Any]] = []
    tables: dict[str, str] = {}
    room = MOST
    ranks = recording.ranks if len(recording.ranks) > 1 else ()
    for rank in ranks:
        own = recording.of_rank(rank)
        sheets = sheets_of(own, bins)
        room -= sheets.size
        if room < 0:
            break
        entries = sheets.entries(brief=True)
        tables |= {f"rank{rank}-{name}": entry.pop("data") for name, entry in entries.items()}
        shown.append({"rank": rank, "sheets": entries, "curves": list(curves(own))})
    return {"shown": shown, "left_out": list(ranks[len(shown) :])}, tables
