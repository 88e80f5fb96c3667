"""The steps before a birth."""

from __future__ import annotations

from typing import Any

import numpy as np

from kedge.rules.naming import plain
from kedge.rules.nonfinite.bad_steps import FINITE, INFINITE, recorded_steps, states_of
from kedge.rules.nonfinite.search.births import Birth
from kedge.rules.recorded.wiring import Wiring
from kedge.store.recording import Recording

#: The number of steps, and of sites.
STEPS, SITES = 16, 4

_WORDS = {FINITE: "finite", INFINITE: "inf"}


def lead_up(recording: Recording, wiring: Wiring, step: int, birth: Birth) -> dict[str, Any]:
    """Return the last recorded steps up to that of a birth, with the figures of its site and its inputs in each.

    Returns:
        ``steps``, and under ``sites`` for each site ``rms``, ``absmax`` and ``state``: one entry a
        step, None where nothing was measured; a state is "finite", "inf" or "nan".
    """
    steps = recorded_steps(recording)
    steps = steps[steps <= step][-STEPS:]
    return {
        "steps": steps.tolist(),
        "sites": {
            wiring.text(site): _course(recording, site, steps) for site in _shown(wiring, birth)
        },
    }


def _shown(wiring: Wiring, birth: Birth) -> list[int]:
    """Return the site of a birth and its inputs; for an input that was some output, that output."""
    inputs = list(birth.near)
    if birth.module is not None and birth.how in ("module", "own", "unclear"):
        inputs = [site for entry in birth.module.ins for site in _origins(wiring, entry)] or inputs
    return list(dict.fromkeys([birth.site, *inputs]))[:SITES]


def _origins(wiring: Wiring, entry: int) -> list[int]:
    """Return the outputs that an input was; between measured steps only those have rows."""
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
        **{name: _figures(rows.statistic(name), at, there) for name in ("rms", "absmax")},
        "state": [
            _WORDS.get(int(states[i]), "nan") if known else None
            for i, known in zip(at, there, strict=True)
        ],
    }


def _figures(values: Any, at: Any, there: Any) -> list[float | None]:
    return [plain(values[i]) if known else None for i, known in zip(at, there, strict=True)]
