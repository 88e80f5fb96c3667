"""What a recording says of the program's optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kedge.rules.trained import trained_sites
from kedge.store.recording import Recording

Entry = Mapping[str, Any]


def optimizers(recording: Recording) -> tuple[Entry, ...] | None:
    """Return the program's optimizers; None where the recording does not tell, as before the program ends."""
    written = events_of(recording, "optimizers")
    if not written:
        return None
    return tuple(entry for event in written for entry in event.get("optimizers", ()))


def has_optimizer(recording: Recording) -> bool:
    """Whether a step of an optimizer was seen: only then are parameters and norms of gradients recorded."""
    kinds = ("param", "update", "grad.norm")
    return any(len(recording.rows(site)) for kind in kinds for site in trained_sites(recording, kind))


def events_of(recording: Recording, kind: str) -> list[Entry]:
    """List the events of one kind in the order of their steps; of several ranks, which train alike, those of the lowest."""
    rank = recording.ranks[0]
    found = [event for event in recording.events if event.get("kind") == kind and event.get("rank", rank) == rank]
    return sorted(found, key=lambda event: int(event.get("step", -1)))


def later_starts(recording: Recording, root: int | None = None) -> list[int]:
    """Return the steps, after the first one, in which an optimizer made its first step, in order.

    Args:
        recording: The recording.
        root: Only of optimizers that train this root; of all if None.
    """
    own = [entry for entry in optimizers(recording) or () if root is None or root in entry.get("roots", ())]
    return sorted({int(start) for entry in own if (start := entry.get("first_step") or 0) > 0})


def rates_of(recording: Recording, root: int) -> list[float]:
    """Return the learning rates of the optimizers that train a root, the highest first."""
    own = [entry for entry in optimizers(recording) or () if root in entry.get("roots", ())]
    rates = {float(rate) for entry in own for rate in entry.get("rates", ())}
    return sorted((rate for rate in rates if rate > 0), reverse=True)


def trained_by(recording: Recording, root: int) -> str:
    """Return words for the optimizers that train a root: ``Adam with a learning rate of 0.001``; empty if unknown."""
    own = [entry for entry in optimizers(recording) or () if root in entry.get("roots", ())]
    types = ", ".join(dict.fromkeys(str(entry.get("type", "an optimizer")) for entry in own))
    rates = rates_of(recording, root)
    return types + (f" with a learning rate of {listed_rates(rates)}" if types and rates else "")


def listed_rates(rates: Iterable[float]) -> str:
    """Write learning rates for a sentence."""
    return " and ".join(f"{rate:g}" for rate in list(rates)[:3])
