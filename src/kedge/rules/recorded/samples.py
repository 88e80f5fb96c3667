"""The samples of a recording for a rule, and the lack of a rule with too few of them."""

from __future__ import annotations

from collections.abc import Iterable

from kedge.rules.recorded.trained import trains
from kedge.rules.rule import Lack
from kedge.store.events import LossGraphEvent
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import FULL

MEASURED = "measured steps"


def too_few(code: str, have: int, need: int, lacks: str = MEASURED) -> Lack | None:
    """Return the lack of a rule that needs a number of samples; None if there are enough."""
    if have < need:
        return Lack(code, lacks, have, need)
    return None


def no_end(code: str, recording: Recording) -> Lack | None:
    """Return the lack of a rule that reads events written at the end of the program."""
    if recording.end is not None:
        return None
    return Lack(code, "end of the program", 0, 1, grows=False)


def no_loss_graph(code: str, recording: Recording) -> Lack | None:
    """Return the lack of a rule that reads the graph of the loss; without training there is none to record."""
    if not trains(recording) or recording.of(LossGraphEvent):
        return None
    return Lack(code, "record of the loss's graph", 0, 1, grows=False)


def measured(recording: Recording, sites: Iterable[SiteInfo]) -> int:
    """Return the largest number of steps in which any of some sites was measured in full."""
    rows = recording.all_rows
    full = rows.count(rows.rows.level == FULL)
    return max((int(full[site.id]) for site in sites), default=0)
