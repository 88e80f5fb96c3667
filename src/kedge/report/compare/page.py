"""Two recordings compared, as a page that looks like a report's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kedge.compare.alignment.sites import SameSite
from kedge.compare.comparison import Comparison
from kedge.compare.first_parting import ROUNDING_ULPS
from kedge.compare.verdict import Verdict
from kedge.report.compare.document import document
from kedge.report.compare.head import Names, told_parting
from kedge.report.compare.module_lines import each, folded, in_order_of_parting, lines
from kedge.report.compare.ratios import log_ratios, scales
from kedge.report.compare.terminal import MOST_MODULES
from kedge.report.head import command_of
from kedge.report.page.columns import form_of, packed
from kedge.report.page.document import Document
from kedge.report.page.heatmap_sheets import ABSENT, BROKEN, FINITE, MANY, shown_steps
from kedge.report.page.render import assembled, asset, bundled
from kedge.report.page.step_bins import Bins, Grouping
from kedge.sites.folding import block
from kedge.store.rows import Floats, Ints

#: The report's scripts that draw a heat-map, each after those it imports from.
SCRIPTS = (
    "elements.js",
    "numbers.js",
    "colours.js",
    "filters.js",
    "recording.js",
    "state.js",
    "crosses.js",
    "charts.js",
    "quantities.js",
    "cells.js",
    "steps.js",
    "heatmap.js",
    "filter_field.js",
    "theme.js",
    "keys.js",
)
SCRIPT, FRAME = "difference.js", "difference.html"

#: The kinds of sites that the page has maps of, in the order of a step.
KINDS = {
    "out": "outputs",
    "in": "inputs",
    "out.grad": "output gradients",
    "param": "parameters",
    "param.grad": "parameter gradients",
    "update": "updates",
}
#: A colour scale around 1 reaches at least so many powers of two.
LEAST_POWER = 0.001


def render_difference(
    comparison: Comparison, verdict: Verdict, names: Names, chosen: str = ""
) -> str:
    """Return the comparison of two recordings as an HTML page, which opens with a filter."""
    code = bundled(SCRIPTS, asset(SCRIPT, __package__))
    content = condense_difference(comparison, verdict, names)
    return assembled(asset(FRAME, __package__), code, content, chosen=chosen)


def condense_difference(comparison: Comparison, verdict: Verdict, names: Names) -> Document:
    """Return the content of the page."""
    wanted = [] if verdict.first is None else [verdict.first.step]
    bins = Bins.of(_shown(comparison, wanted), wanted)
    entries, tables = _sheets(comparison, bins)
    described = {
        "run": {"name": f"{names.a} ↔ {names.b}"},
        "told": document(comparison, verdict, names),
        "commands": {
            side: command_of(recording.manifest) for side, recording in _sides(comparison)
        },
        "parted": _parted(comparison),
        "findings": list(_pin(verdict)),
        "roots": [{"name": root.name, "prefix": root.prefix} for root in comparison.a.roots],
        "sites": _sites(comparison),
        "columns": {"count": len(bins), "single": bins.single, "steps": len(bins.steps)},
        "sheets": entries,
        "quantities": _quantities(verdict),
    }
    return Document(described, tables)


def _shown(comparison: Comparison, wanted: Sequence[int]) -> Ints:
    """Return the steps of the map's columns: those that the page of either recording has columns for."""
    either = np.union1d(shown_steps(comparison.a), shown_steps(comparison.b))
    return np.union1d(
        np.intersect1d(comparison.steps, either), [*comparison.steps[:1], *wanted]
    ).astype(np.int64)


def _sides(comparison: Comparison) -> tuple[tuple[str, Any], tuple[str, Any]]:
    return ("a", comparison.a), ("b", comparison.b)


def _pin(verdict: Verdict) -> Iterator[dict[str, Any]]:
    """Yield the first parting as the map's pin."""
    if verdict.first is not None:
        yield {
            "code": verdict.cause.code,
            "severity": "error" if verdict.parted else "info",
            "site": verdict.first.same.a.site,
            "step": verdict.first.step,
            "message": told_parting(verdict.first),
        }


def _sites(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the aligned sites under their names in A."""
    numbers = {same.a.id: i for i, same in enumerate(comparison.alignment.sites)}
    return [
        {
            "site": same.a.site,
            "b": same.b.site,
            "path": same.a.path,
            "kind": same.a.kind,
            "type": same.a.type if same.a.type == same.b.type else f"{same.a.type} ↔ {same.b.type}",
            "root": same.a.root,
            "shape": list(same.a.shape),
            "dtype": same.a.dtype
            if same.a.dtype == same.b.dtype
            else f"{same.a.dtype} ↔ {same.b.dtype}",
            "from": [
                numbers.get(source) if source is not None else None for source in same.a.sources
            ],
            "owner": same.a.owner,
            "block": block(same.a.path),
        }
        | _other_names(same)
        for same in comparison.alignment.sites
    ]


def _other_names(same: SameSite) -> dict[str, Any]:
    """Return what a filter asks of a site under its name in B, if it has another one there."""
    if same.a.site == same.b.site:
        return {}
    return {
        "other": {key: getattr(same.b, key) for key in ("site", "path", "kind", "type", "owner")}
    }


def _parted(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the modules that part as the table has them: those that are alike under one name, by their places in all."""
    parted = in_order_of_parting(lines(comparison))
    places = {id(line): place for place, line in enumerate(parted)}
    folds = folded(parted) if len(parted) > MOST_MODULES else each(parted)
    return [
        {"label": one.label, "members": [places[id(line)] for line in one.members]} for one in folds
    ]


def _sheets(comparison: Comparison, bins: Bins) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the matrices of the page: sizes in A and B, their ratio, their distance, and the state of every cell."""
    groups = Grouping.of(bins, comparison.steps)
    a, b = scales(comparison)
    matrices = (
        ("rms.a", a, "most"),
        ("rms.b", b, "most"),
        ("change", log_ratios(comparison), "furthest"),
    )
    folded = {name: _folded(groups, values, how) for name, values, how in matrices}
    folded["change"] = np.exp2(folded["change"])
    apart = _folded(groups, comparison.apart, "most")
    states = np.where(np.isnan(apart), ABSENT, np.where(np.isinf(apart), BROKEN, FINITE))
    folded["apart"] = np.where(np.isinf(apart), np.nan, apart)
    entries: dict[str, Any] = {}
    tables = {
        side: packed(values.astype(np.float64), "f8")
        for side, values in (("first", bins.first), ("last", bins.last))
    }
    for name, values in folded.items():
        rows = np.flatnonzero((~np.isnan(values)).any(axis=1))
        form = form_of(values[rows], share=False, brief=sum(m.size for m in folded.values()) > MANY)
        entries[name] = {"rows": rows.tolist(), "form": form}
        tables[name] = packed(values[rows], form)
    entries["state"] = {"rows": None, "form": "n1"}
    tables["state"] = packed(states, "n1")
    return entries, tables


def _folded(groups: Grouping, matrix: Floats, how: str) -> Floats:
    return np.array([groups.fold(values, how) for values in matrix])


def _quantities(verdict: Verdict) -> list[dict[str, Any]]:
    """Return the quantities that the map can show, the most useful first."""
    first = verdict.first
    kinds = sorted(KINDS, key=lambda kind: first is not None and kind != first.same.kind)
    made = [quantity for kind in kinds for quantity in (_ratio(kind), _distance(kind))]
    if first is not None and first.ulps is not None and first.ulps <= ROUNDING_ULPS:
        made.sort(key=lambda quantity: quantity["series"] != "apart")
    return made


def _ratio(kind: str) -> dict[str, Any]:
    label = f"ratio B : A of {KINDS[kind]}"
    shown = {
        "series": "change",
        "scale": "log",
        "middle": 1,
        "least": LEAST_POWER,
        "zero": "one is zero",
    }
    return {"id": f"ratio.{kind}", "label": label, "kind": kind, **shown}


def _distance(kind: str) -> dict[str, Any]:
    label = f"relative difference of {KINDS[kind]}"
    return {
        "id": f"apart.{kind}",
        "label": label,
        "kind": kind,
        "series": "apart",
        "scale": "log",
        "zero": "equal",
    }
