"""Relations between ranks: the parameters that are equal on all of them, and the inputs that are not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kedge.compare.against.run_pair import LEAST_STEPS, Departure, RunPair
from kedge.compare.first_parting import is_from_outside
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


def own_inputs(pair: RunPair) -> Iterator[Departure]:
    """The inputs of models that each rank has for itself."""
    if len(pair.good.ranks) < 2 or len(pair.run.ranks) < 2:
        return
    for same in pair.of_kind("in"):
        if same.a.node is not None or not is_from_outside(pair.good, same):
            continue
        apart = _first_apart(pair.good, same.a)
        if apart is None or apart < 0 or _first_apart(pair.run, same.b) is not None:
            continue
        yield Departure(
            kind="ranks",
            site=same.b.site,
            step=int(pair.run.steps[0]),
            message=f"{same.b.site}: the ranks had inputs of their own in the good run, and all "
            f"{len(pair.run.ranks)} have the same ones in each measured step here.",
            good="each rank has its own",
            here="the same on all ranks",
            paths=(same.b.site,),
            remedy="Look how the data are divided among ranks: DistributedSampler, and a seed of its "
            "own for each rank where samples are drawn.",
        )
        return


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
