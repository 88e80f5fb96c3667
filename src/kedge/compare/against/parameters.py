"""Relations of parameters: those that move, and those that are frozen."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kedge.compare.against.run_pair import LEAST_STEPS, Departure, RunPair, values_of
from kedge.compare.parameter_names import names_of_parameters
from kedge.short_text import counted
from kedge.sites.site import escape
from kedge.store.recording import Recording, SiteInfo
from kedge.store.rows import Ints

#: After so many measured steps without a change a parameter has stopped.
STOPPED = 10
#: A parameter that changes in so many of the steps moves; others may wait for a batch that uses them.
MOVES = 0.9


def still(pair: RunPair) -> Iterator[Departure]:
    """The parameters that move in the good run, and do not here."""
    others = {same.a.path: same.b for same in pair.of_kind("update")}
    there = {site.path for same in pair.alignment.modules for site in same.a.sites}
    moved = []
    for site in pair.good.of_kind("update"):
        moving, steps = _moves(pair.good, site)
        is_moved = len(steps) >= LEAST_STEPS and len(moving) >= MOVES * len(steps)
        if is_moved and steps[0] <= pair.last_step and site.path in there:
            moved.append(site)
    stopped: list[SiteInfo] = []
    since: list[int] = []
    measured = len(pair.run.steps)
    for site in moved:
        other = others.get(site.path)
        if other is None:
            stopped.append(site)
            since.append(int(pair.run.steps[0]))
            continue
        moving, steps = _moves(pair.run, other)
        steps = steps[steps <= pair.last_good_step]
        after = steps[steps > moving[-1]] if len(moving) else steps
        if len(after) == len(steps) >= LEAST_STEPS or len(after) >= STOPPED:
            stopped.append(site)
            since.append(int(after[0]))
            measured = len(after)
    if stopped and measured >= LEAST_STEPS and pair.measures_alike:
        known = [_path_here(pair, site) for site in moved]
        here = [_path_here(pair, site) for site in stopped]
        names = names_of_parameters(here, known)
        yield Departure(
            kind="still",
            site=f"{escape(here[0])}:param",
            step=min(since),
            message=f"{names}: changed in the good run by nearly each step, and not once in the last "
            f"{counted(measured, 'measured step')} here.",
            good="changed by nearly each step",
            here=f"not changed from step {min(since)} on",
            paths=tuple(here),
            remedy="Look whether they need gradients, get some, and are held by an optimizer that "
            "steps with a rate above zero.",
        )


def _path_here(pair: RunPair, site: SiteInfo) -> str:
    """Return the path of a parameter of the good run in the other one."""
    owner = pair.names.get(site.owner, site.owner)
    name = site.path.removeprefix(site.owner).removeprefix(".")
    return f"{owner}.{name}".removeprefix(".")


def moving(pair: RunPair) -> Iterator[Departure]:
    """The parameters that are frozen in the good run, and move here."""
    frozen = _frozen_modules(pair.good)
    updates = {same.b.path: same.a for same in pair.of_kind("update")}
    paths = {same.b.path: same.a.path for same in pair.alignment.modules}
    found: list[tuple[str, int]] = []
    for site in pair.run.of_kind("update"):
        if site.owner not in paths:
            continue
        moves, _ = _moves(pair.run, site)
        if not len(moves):
            continue
        good = updates.get(site.path)
        if good is None:
            if paths[site.owner] in frozen:
                found.append((site.path, int(moves[0])))
            continue
        good_moves, good_steps = _moves(pair.good, good)
        if len(good_steps) >= LEAST_STEPS and not len(good_moves):
            found.append((site.path, int(moves[0])))
    if found:
        known = [site.path for site in pair.run.of_kind("update")]
        names = names_of_parameters([path for path, _ in found], known)
        yield Departure(
            kind="moving",
            site=f"{escape(found[0][0])}:param",
            step=min(step for _, step in found),
            message=f"{names}: never changed in the good run, and changed here.",
            good="never changed",
            here="changed",
            paths=tuple(path for path, _ in found),
            remedy="Look whether a part is to be frozen, and what the optimizer is given.",
        )


def _frozen_modules(recording: Recording) -> set[str]:
    """Return the paths of the modules all of whose parameters were frozen."""
    return {
        str(module["path"])
        for root in recording.roots
        for module in root.modules
        if module.get("parameters") and not module.get("trainable")
    }


def _moves(recording: Recording, site: SiteInfo) -> tuple[Ints, Ints]:
    """Return the measured steps in which a parameter changed, and all of them."""
    steps, sizes = values_of(recording, site, "rms")
    return steps[np.asarray(sizes > 0)], steps
