"""Where each rank was at last: by its last look before a kill, or by the error that ended it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta

from kedge.short_text import listed, seconds
from kedge.shown_text import visible
from kedge.store.events import EndEvent, Position, PositionEvent
from kedge.store.recording import Recording

STILL = 10.0
"""Seconds in one place after which also a program that runs is said to be there."""
_NAMED_RANKS = 8


def last_positions(recording: Recording, *, running: bool = False) -> Iterator[str]:
    """Yield a sentence for each place in which ranks were at last, with the ranks.

    Args:
        recording: The recording.
        running: Whether a process still writes it; then only those are told that stand still, or
            that were seen long before others.
    """
    ends: dict[Position, list[int]] = {}
    for end in recording.of(EndEvent):
        if end.position is not None:
            ends.setdefault(end.position, []).append(recording.rank_of(end))
    for position, ranks in ends.items():
        yield f"{_who(recording, ranks)} ended {_where(position)}"

    every = recording.of(PositionEvent)
    newest = max((look.seen for look in every), default="")
    looks: dict[Position, list[PositionEvent]] = {}
    for look in every:
        stands = _between(look.since, look.seen) >= STILL
        is_gone = _between(look.seen, newest) >= STILL
        if not running or stands or is_gone:
            looks.setdefault(look.position, []).append(look)
    for position, found in looks.items():
        who = _who(recording, [recording.rank_of(look) for look in found])
        were = "was"
        if len(found) > 1:
            were = "were"
        last = max(found, key=lambda look: look.seen)
        stood = max(_between(look.since, look.seen) for look in found)
        since = ""
        if stood:
            since = f", first seen there {seconds(stood)} before"
        yield f"{who} {were} last seen {_where(position)}, at {_time(last.seen)}{since}"


def _who(recording: Recording, ranks: list[int]) -> str:
    if int(recording.manifest.get("world") or 1) == 1:
        return "the program"
    return ranks_named(ranks)


def ranks_named(ranks: Sequence[int]) -> str:
    """Return words for one rank or several."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {listed([str(rank) for rank in ranks], _NAMED_RANKS)}"


def _where(position: Position) -> str:
    where = "outside of modules"
    if position.direction == "backward":
        where = "in backward"
        if position.module is not None:
            where = f"in backward, inside {_named(position.module)}"
    elif position.module is not None:
        where = f"in the forward of {_named(position.module)}"
    where = f"{where}, step {position.step}"
    source = position.source
    if source is None:
        return where
    if source.text is None:
        return f"{where} ({visible(str(source))})"
    return f"{where} ({visible(str(source))}: {visible(source.text)})"


def _named(module: str) -> str:
    if module:
        return visible(module)
    return "the model"


def _between(earlier: str, later: str) -> float:
    """Return the seconds between two times; 0 if one is not known."""
    begin = _moment(earlier)
    end = _moment(later)
    if begin is None or end is None:
        return 0.0
    return max(end - begin, timedelta()).total_seconds()


def _time(seen: str) -> str:
    moment = _moment(seen)
    if moment is None:
        return visible(seen)
    return f"{moment:%H:%M:%S} {moment.tzname() or ''}".rstrip()


def _moment(written: str) -> datetime | None:
    try:
        return datetime.fromisoformat(written)
    except ValueError:
        return None
