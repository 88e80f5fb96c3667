"""Curves that have a value in every step: the loss, and the norm of all gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from kedge.report.page.columns import form_of, packed
from kedge.report.page.heatmap_sheets import is_number
from kedge.report.page.step_bins import Bins, Floats, Grouping, Ints
from kedge.store.recording import Recording, Rows, SiteInfo
from kedge.store.rows import Bools

MOST_POINTS = 1500


@dataclass(frozen=True, eq=False)
class Curve:
    """One number for each of some steps; ``bad`` tells the steps in which it was not finite."""

    steps: Ints
    values: Floats
    bad: Bools


def curves(recording: Recording) -> Iterator[dict[str, Any]]:
    """Describe the curves of a recording for the page."""
    for site in recording.sites:
        if is_number(recording, site):
            rows = recording.rows(site)
            curve = Curve(rows.step, number(rows), _bad(rows))
            yield _entry("loss", f"{_root(recording, site)} ({site.site})", site.id, curve)
    norms = recording.of_kind("grad.norm")
    for site in norms:
        rows = recording.rows(site)
        curve = Curve(rows.step, np.sqrt(rows.sumsq), _bad(rows))
        yield _entry("norm", f"all gradients of {_root(recording, site)}", site.id, curve)
    if not norms:
        yield from _from_parameters(recording)


def _bad(rows: Rows) -> Bools:
    return ~rows.clean & (rows.count > 0)


def _from_parameters(recording: Recording) -> Iterator[dict[str, Any]]:
    """Add up the gradients of each root's parameters in the steps on schedule, where no norm was recorded."""
    steps = recording.steps
    for root in sorted({site.root for site in recording.of_kind("param.grad")}):
        total = np.zeros(len(steps))
        seen = np.zeros(len(steps), dtype=bool)
        own = [site for site in recording.of_kind("param.grad") if site.root == root]
        for site in own:
            squares = recording.series(site, "rms") ** 2 * recording.series(site, "count")
            absent = np.isnan(recording.series(site, "count"))
            total += np.where(absent, 0, squares)
            seen |= ~absent
        if seen.any():
            label = f"all gradients of {_root(recording, own[0])}, sampled steps"
            norm = np.sqrt(total[seen])
            yield _entry("norm", label, None, Curve(steps[seen], norm, ~np.isfinite(norm)))


def number(rows: Rows) -> Floats:
    """Give the values of a single number; of a light step only its size may be known."""
    value, size = rows.statistic("mean"), rows.statistic("rms")
    never_negative = not (value < 0).any()
    return np.where(np.isnan(value) & rows.clean & never_negative, size, value)


def _root(recording: Recording, site: SiteInfo) -> str:
    return recording.roots[site.root].name if site.root < len(recording.roots) else "the model"


def _entry(kind: str, label: str, site: int | None, curve: Curve) -> dict[str, Any]:
    bins = Bins.of(curve.steps, most=MOST_POINTS)
    groups = Grouping.of(bins, curve.steps)
    made: dict[str, Any] = {"kind": kind, "label": label, "site": site, "points": len(bins)}
    made["step"] = packed(bins.last.astype(np.float64), "f8")
    made["broken"] = np.flatnonzero(groups.fold(curve.bad.astype(np.float64), "most") > 0).tolist()
    finite = np.where(np.isfinite(curve.values), curve.values, np.nan)
    for how in ("last",) if bins.single else ("last", "most", "least"):
        folded = groups.fold(finite, how)
        form = form_of(folded, share=False, brief=False)
        made[how] = {"form": form, "data": packed(folded, form)}
    return made
