"""The steps before the first non-finite value as text: a line for its site and for each site that went into it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.text import Text

from kedge.report.fitted_text import cut
from kedge.report.sparkline import GAP, ScaleSeries, sparkline
from kedge.short_text import compact

#: Longer names are cut in their middle.
NAME = 32


def lead_up(evidence: Mapping[str, Any]) -> list[Text]:
    """Return the steps before a finding as lines, from its evidence; none if it has none.

    The last line is that of the site itself. A cross stands for a step with a non-finite value, a
    gap for a step that was not measured.
    """
    before = evidence.get("before") or {}
    steps, sites = before.get("steps", ()), before.get("sites", {})
    if len(steps) < 2 or not any(_measured(course) for course in sites.values()):
        return []
    names = [cut(name, NAME) for name in sites]
    width = max(map(len, names))
    lines = [
        _line(name.ljust(width), course) for name, course in zip(names, sites.values(), strict=True)
    ]
    head = Text(f"rms in steps {steps[0]:,} to {steps[-1]:,}", "dim")
    return [head, *reversed(lines)]


def _line(name: str, course: Mapping[str, Any]) -> Text:
    rms = np.array(
        [np.nan if value is None else value for value in course["rms"]], dtype=np.float64
    )
    states = course["state"]
    broken = np.array([state in ("inf", "nan") for state in states], dtype=bool)
    drawn = sparkline(ScaleSeries(rms, broken, None, int(broken.sum())), max(len(rms), 1)) or GAP
    finite = rms[np.isfinite(rms)]
    ends = (
        [compact(float(finite[0])), *([compact(float(finite[-1]))] if len(finite) > 1 else [])]
        if len(finite)
        else []
    )
    ends += [states[-1]] if len(broken) and broken[-1] else []
    return Text.assemble((f"  {name}  ", "dim"), drawn, ("  " + " → ".join(ends), "dim"))


def _measured(course: Mapping[str, Any]) -> bool:
    return sum(state is not None for state in course["state"]) > 1
