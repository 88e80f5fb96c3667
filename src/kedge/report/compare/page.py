"""Two recordings compared, as a page that looks like a report's."""

from __future__ import annotations

from typing import Any

import numpy as np

from kedge.compare.comparison import Comparison
from kedge.compare.first_parting import ROUNDING_ULPS
from kedge.compare.verdict import Verdict
from kedge.report.compare.document import document
from kedge.report.compare.head import Names, told_parting
from kedge.report.compare.module_lines import MOST_MODULES, in_order_of_parting, lines, shown_folds
from kedge.report.page.document import Document, described_site
from kedge.report.page.render import assembled, asset, bundled
from kedge.report.page.sheets import ABSENT, BROKEN, FINITE, MANY, Sheet, Sheets, shown_steps
from kedge.report.page.step_bins import Bins, Grouping
from kedge.report.what_ran import command_of
from kedge.store.rows import Floats

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


def condense_difference(
    comparison: Comparison,
    verdict: Verdict,
    names: Names,
) -> Document:
    """Return the content of the page."""
    first = verdict.first
    wanted = []
    pins = []
    if first is not None:
        wanted.append(first.step)
        pins.append(
            {
                "code": verdict.cause.code,
                "severity": "error" if verdict.parted else "info",
                "site": first.same.a.site,
                "step": first.step,
                "message": told_parting(first),
            }
        )

    # The columns are the steps that the page of either recording has columns for.
    either = np.union1d(shown_steps(comparison.a), shown_steps(comparison.b))
    common = np.intersect1d(comparison.steps, either)
    shown = np.union1d(common, [*comparison.steps[:1], *wanted]).astype(np.int64)
    bins = Bins.of(shown, wanted)
    sheets, matrices = _sheets(comparison, bins)
    entries, tables = sheets.packed(brief=matrices > MANY)

    described = {
        "run": {"name": f"{names.a} ↔ {names.b}"},
        "told": document(comparison, verdict, names),
        "commands": {
            "a": command_of(comparison.a.manifest),
            "b": command_of(comparison.b.manifest),
        },
        "parted": _parted(comparison),
        "findings": pins,
        "roots": [{"name": root.name, "prefix": root.prefix} for root in comparison.a.roots],
        "sites": _sites(comparison),
        "columns": {"count": len(bins), "single": bins.single, "steps": len(bins.steps)},
        "sheets": entries,
        "quantities": _quantities(verdict),
    }
    return Document(described, bins.packed() | tables)


def _sites(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the aligned sites under their names in A."""
    numbers: dict[int | None, int] = {
        same.a.id: i for i, same in enumerate(comparison.alignment.sites)
    }
    sites = []
    for same in comparison.alignment.sites:
        site = described_site(same.a) | {"b": same.b.site}
        if same.a.type != same.b.type:
            site["type"] = f"{same.a.type} ↔ {same.b.type}"
        if same.a.dtype != same.b.dtype:
            site["dtype"] = f"{same.a.dtype} ↔ {same.b.dtype}"
        site["from"] = [numbers.get(source) for source in same.a.sources]
        if same.a.site != same.b.site:  # what a filter asks of it under its name in B
            keys = ("site", "path", "kind", "type", "owner")
            site["other"] = {key: getattr(same.b, key) for key in keys}
        sites.append(site)
    return sites


def _parted(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the modules that part as the table has them, by their places in all of them.

    Those that are alike have one name.
    """
    parted = in_order_of_parting(lines(comparison))
    places = {id(line): place for place, line in enumerate(parted)}
    shown = []
    for one in shown_folds(parted, MOST_MODULES):
        members = [places[id(line)] for line in one.members]
        shown.append({"label": one.label, "members": members})
    return shown


def _sheets(comparison: Comparison, bins: Bins) -> tuple[Sheets, int]:
    """Return the sheets of the page, and the number of values in all sites.

    They are the sizes in A and B, their ratio, their distance, and the state of every cell.
    """
    groups = Grouping.of(bins, comparison.steps)

    def folded(matrix: Floats, how: str) -> Floats:
        return np.array([groups.fold(values, how) for values in matrix])

    a, b = scales(comparison)
    apart = folded(comparison.apart, "most")
    states = np.full(apart.shape, FINITE, dtype=np.uint8)
    states[np.isnan(apart)] = ABSENT
    states[np.isinf(apart)] = BROKEN
    matrices = {
        "rms.a": folded(a, "most"),
        "rms.b": folded(b, "most"),
        "change": np.exp2(folded(log_ratios(comparison), "furthest")),
        "apart": np.where(np.isinf(apart), np.nan, apart),
    }
    sheets = {name: Sheet.of(values) for name, values in matrices.items()}
    size = sum(values.size for values in matrices.values())
    return Sheets(bins, states, sheets), size


def scales(comparison: Comparison) -> tuple[Floats, Floats]:
    """Return the root mean squares in A and in B.

    Returns:
        Two matrices with a line for each aligned site and a column for each step, NaN where the
        site was not compared or not measured.
    """
    both = np.full((2, *comparison.apart.shape), np.nan)
    for i, same in enumerate(comparison.alignment.sites):
        columns = np.flatnonzero(~np.isnan(comparison.apart[i]))
        steps = comparison.steps[columns]
        sides = (comparison.a.rows(same.a), comparison.b.rows(same.b))
        for side, rows in enumerate(sides):
            places = np.searchsorted(rows.step, steps)
            both[side, i, columns] = rows.statistic("rms")[places]
    return both[0], both[1]


def log_ratios(comparison: Comparison) -> Floats:
    """Return the logarithm of the ratio of the root mean squares at every site in every step.

    Returns:
        A matrix as of :func:`scales`: 0 where they are equal, 1 where B is twice A, infinite where
        only one is zero, NaN where one is non-finite.
    """
    a, b = scales(comparison)
    known = np.isfinite(a) & np.isfinite(b)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log2(b) - np.log2(a)
    logs[(a == b) & known] = 0.0
    logs[~known] = np.nan
    return np.asarray(logs)


def _quantities(verdict: Verdict) -> list[dict[str, Any]]:
    """Return the quantities that the map can show, the most useful first."""
    first = verdict.first
    kinds = sorted(KINDS, key=lambda kind: first is not None and kind != first.same.kind)
    made = []
    for kind in kinds:
        made += [_ratio(kind), _distance(kind)]
    if first is not None and first.ulps is not None and first.ulps <= ROUNDING_ULPS:
        made.sort(key=lambda quantity: quantity["series"] != "apart")
    return made


def _ratio(kind: str) -> dict[str, Any]:
    return {
        "id": f"ratio.{kind}",
        "label": f"ratio B : A of {KINDS[kind]}",
        "kind": kind,
        "series": "change",
        "scale": "log",
        "middle": 1,
        "least": LEAST_POWER,
        "zero": "one is zero",
    }


def _distance(kind: str) -> dict[str, Any]:
    return {
        "id": f"apart.{kind}",
        "label": f"relative difference of {KINDS[kind]}",
        "kind": kind,
        "series": "apart",
        "scale": "log",
        "zero": "equal",
    }
