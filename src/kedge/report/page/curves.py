"""Curves, as they are on the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from kedge.report.curves import Curve
from kedge.report.page.columns import form_of, packed
from kedge.report.page.step_bins import Bins, Grouping
from kedge.short_text import for_json

MOST_POINTS = 1500


def curves(found: Iterable[Curve], most: int = MOST_POINTS) -> Iterator[dict[str, Any]]:
    """Return curves for the page, each of so many points at most."""
    return (_entry(curve, most) for curve in found)


def _entry(curve: Curve, most: int) -> dict[str, Any]:
    bins = Bins.of(curve.steps, most=most)
    groups = Grouping.of(bins, curve.steps)
    made: dict[str, Any] = {
        "kind": curve.kind,
        "label": curve.label,
        "site": curve.site,
        "points": len(bins),
    }
    made["step"] = packed(bins.last.astype(np.float64), "f8")
    made["newest"] = (
        [int(curve.steps[-1]), for_json(float(curve.values[-1]))] if len(curve.steps) else None
    )
    made["broken"] = np.flatnonzero(groups.fold(curve.bad.astype(np.float64), "most") > 0).tolist()
    finite = np.where(np.isfinite(curve.values), curve.values, np.nan)
    for how in ("last",) if bins.single else ("last", "most", "least"):
        folded = groups.fold(finite, how)
        form = form_of(folded, share=False, brief=False)
        made[how] = {"form": form, "data": packed(folded, form)}
    return made
