"""Relations between ranks: the parameters that are equal on all of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kedge.compare.against.run_pair import LEAST_STEPS, Departure, RunPair
from kedge.compare.parameter_names import names_of_parameters
from kedge.short_text import counted
from kedge.store.recording import Recording, SiteInfo


def equal_parameters(pair: RunPair) -> Iterator[Departure]:
    """The parameters that have the same values on all ranks in each measured step."""
    if len(pair.good.ranks) < 2 or len(pair.run.ranks) < 2:
        return
    known = []
    parted: list[tuple[int, SiteInfo]] = []
    for same in pair.of_kind("param"):
        if _first_apart(pair.good, same.a) is not None:
            continue
        known.append(same.b.path)
        step = _first_apart(pair.run, same.b)
        if step is not None and step >= 0:
            parted.append((step, same.b))
    if parted:
        first, site = min(parted, key=lambda each: each[0])
        names = names_of_parameters([site.path for _, site in parted], known)
        yield Departure(
            kind="ranks",
            site=site.site,
            step=first,
            message=f"{names}: equal on all {len(pair.good.ranks)} ranks in each measured step of "
            f"the good run, and not here from step {first} on.",
            good="equal on all ranks",
            here=f"not equal on {counted(len(pair.run.ranks), 'rank')}",
            paths=tuple(site.path for _, site in parted),
            remedy="Look for what one rank does alone: clipping, an exchange of gradients that is "
            "left out, other initial values.",
        )


def _first_apart(recording: Recording, site: SiteInfo) -> int | None:
    """Return the first step in which ranks have other values; None if they never do, -1 if it is not known."""
    rows = [recording.of_rank(rank).rows(site) for rank in recording.ranks]
    steps = rows[0].step
    for other in rows[1:]:
        steps = np.intersect1d(steps, other.step)
    if len(steps) < LEAST_STEPS:
        return -1
    first = rows[0]
    apart = np.zeros(len(steps), dtype=bool)
    here = np.searchsorted(first.step, steps)
    for other in rows[1:]:
        there = np.searchsorted(other.step, steps)
        apart |= np.asarray(first.sumsq[here] != other.sumsq[there])
    if not apart.any():
        return None
    return int(steps[apart.argmax()])
