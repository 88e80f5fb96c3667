"""The steps before a birth: how the values came to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kedge.rules.nonfinite.bad_steps import FINITE, INFINITE, Moment, seen_steps, states_of
from kedge.rules.nonfinite.births import Birth
from kedge.rules.wiring import Wiring
from kedge.store.recording import Recording

#: How many steps are shown, and of how many sites.
STEPS, SITES = 16, 4

_WORDS = {FINITE: "finite", INFINITE: "inf"}


def lead_up(recording: Recording, wiring: Wiring, moment: Moment, birth: Birth) -> dict[str, Any]:
    """Give the last recorded steps up to a birth, and what its site and its inputs held in each.

    Returns:
        ``steps``, and under ``sites`` for each site ``rms``, ``absmax`` and ``state``: one entry a step, None where
        nothing was measured; a state is "finite", "inf" or "nan".
    """
    steps = seen_steps(recording)
    steps = steps[steps <= moment.step][-STEPS:]
    return {
        "steps": steps.tolist(),
        "sites": {wiring.text(site): _course(recording, site, steps) for site in _shown(wiring, birth)},
    }


def _shown(wiring: Wiring, birth: Birth) -> list[int]:
    """List the site of a birth and what went into it; of an input that was some output, that output."""
    inputs = list(birth.near)
    if birth.module is not None and birth.how in ("module", "own", "unclear"):
        inputs = [site for entry in birth.module.ins for site in _origins(wiring, entry)] or inputs
    return list(dict.fromkeys([birth.site, *inputs]))[:SITES]


def _origins(wiring: Wiring, entry: int) -> list[int]:
    """Give the outputs that an input was; between full steps only those are measured."""
    sources = wiring.sites[entry].sources
    known = [source for source in sources if source is not None]
    return known if known and len(known) == len(sources) else [entry]


def _course(recording: Recording, site: int, steps: Any) -> dict[str, list[Any]]:
    rows = recording.rows(recording.sites[site])
    at = np.searchsorted(rows.step, steps)
    there = at < len(rows)
    there[there] = rows.step[at[there]] == steps[there]
    states = states_of(rows)
    return {
        **{name: _plain(rows.statistic(name), at, there) for name in ("rms", "absmax")},
        "state": [_WORDS.get(int(states[i]), "nan") if known else None for i, known in zip(at, there, strict=True)],
    }


def _plain(values: Any, at: Any, there: Any) -> list[float | None]:
    picked = [float(values[i]) if known else np.nan for i, known in zip(at, there, strict=True)]
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in picked]
