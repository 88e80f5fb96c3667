"""The figure of a finding: the series around its step, or a profile over several places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kedge.report.curves import is_number, number
from kedge.report.page.sheets import statistic
from kedge.rules.evidence import Evidence, Places
from kedge.rules.rule import Finding, Rule
from kedge.short_text import for_json
from kedge.store.recording import STATISTICS, Recording, SiteInfo
from kedge.store.rows import Floats, Ints

#: The samples that a figure shows on each side of the finding's step, at full resolution.
AROUND = 60
MOST_SERIES = 4
MOST_BARS = 48
LEAST_PROFILE = 3
#: From this many steps on, curves in the evidence are preferred to the site's own.
MANY_STEPS = 12


def figure(
    recording: Recording, finding: Finding, rule: Rule | None = None
) -> dict[str, Any] | None:
    """Return the figure for a finding of a rule; None if there is nothing to draw.

    Figures of several places are preferred where the evidence says so, then the series of the site
    around the step, at full resolution, then other figures of the evidence.
    """
    places = [each for each in finding.evidence.places() if _is_profile(each.figures)]
    if places and places[0].preferred:
        return _profile(places[0])
    given = _series_of_evidence(finding.evidence)
    if given is not None and len(given["series"][0]["steps"]) >= MANY_STEPS:
        return given

    drawn = list(_series(recording, finding, rule))
    if drawn:
        bars = _bars(finding.evidence)
        return {"form": "series", "step": finding.step, "series": drawn, "bars": bars}
    return _profile(places[0]) if places else given


def _is_profile(figures: Mapping[str, Any]) -> bool:
    return len(figures) >= LEAST_PROFILE and all(map(_is_number, figures.values()))


def _profile(places: Places) -> dict[str, Any]:
    labels = list(places.figures)[:MOST_BARS]
    values = list(places.figures.values())[:MOST_BARS]
    return {
        "form": "profile",
        "name": places.caption,
        "labels": labels,
        "values": for_json(values),
    }


def _series_of_evidence(evidence: Evidence) -> dict[str, Any] | None:
    """Return the curves in the evidence itself; None if it has none."""
    steps = evidence.axis()
    if not _is_series(steps):
        return None
    drawn = []
    for name, values in evidence.curves().items():
        if _is_series(values) and len(values) == len(steps):
            drawn.append(
                {
                    "label": name,
                    "statistic": name,
                    "steps": for_json(steps),
                    "values": for_json(values),
                    "broken": [],
                }
            )
    if not drawn:
        return None
    return {"form": "series", "step": None, "series": drawn[:MOST_SERIES], "bars": _bars(evidence)}


def _is_series(values: Sequence[float | None]) -> bool:
    return len(values) >= LEAST_PROFILE and all(map(_is_number, values))


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _series(recording: Recording, finding: Finding, rule: Rule | None) -> Iterator[dict[str, Any]]:
    """Yield the series of the sites that the rule draws beside a finding, around its step."""
    known = {site.site: site for site in recording.sites}
    if finding.site not in known:
        return
    named: Sequence[str] = [finding.site]
    if rule is not None:
        named = rule.drawn(recording, finding)
    for text in dict.fromkeys(named[:MOST_SERIES]):
        if text in known:
            yield from _around(recording, known[text], finding, rule)


def _around(
    recording: Recording, site: SiteInfo, finding: Finding, rule: Rule | None
) -> Iterator[dict[str, Any]]:
    rows = recording.rows(site)
    wanted = "" if rule is None else rule.statistic
    name = _statistic_of(recording, site, wanted)
    values = _values(recording, site, name)
    part = _window(rows.step, finding.step)
    bad = ~rows.clean[part] & (rows.count[part] > 0)
    if len(bad) and (bad.any() or not np.isnan(values[part]).all()):
        yield _drawn(_label(site, name), name, (rows.step[part], values[part]), bad)


def _statistic_of(recording: Recording, site: SiteInfo, wanted: str) -> str:
    """Return the statistic that shows a site: the wanted one, if it was measured."""
    if wanted in STATISTICS and not np.isnan(recording.rows(site).statistic(wanted)).all():
        return wanted
    if site.kind == "grad.norm":
        return "norm"
    if site.kind == "loss" or is_number(recording, site):
        return "value"
    return "update ratio" if site.kind == "update" else "rms"


def _values(recording: Recording, site: SiteInfo, name: str) -> Floats:
    """Return a statistic of a site's rows."""
    rows = recording.rows(site)
    if name == "update ratio":
        return _ratio(recording, site)
    if name == "norm":
        return np.asarray(np.sqrt(rows.sumsq))
    return number(rows) if name == "value" else statistic(site, rows, name)


def _label(site: SiteInfo, name: str) -> str:
    if name == "norm":
        return "norm of all gradients"
    return f"{name} of {site.path if name == 'update ratio' else site.site}"


def _ratio(recording: Recording, site: SiteInfo) -> Floats:
    """Return the updates of a parameter relative to its size in the same steps."""
    rows = recording.rows(site)
    owner = next((other for other in recording.of_kind("param") if other.path == site.path), None)
    if owner is None:
        return np.full(len(rows), np.nan)
    sizes = recording.rows(owner)
    ratio = np.full(len(rows), np.nan)
    _, ours, theirs = np.intersect1d(rows.step, sizes.step, return_indices=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio[ours] = rows.statistic("rms")[ours] / sizes.statistic("rms")[theirs]
    return ratio


def _window(steps: Ints, step: int) -> slice:
    if step < 0:
        return slice(max(len(steps) - 2 * AROUND, 0), len(steps))
    at = int(np.searchsorted(steps, step))
    return slice(max(at - AROUND, 0), at + AROUND + 1)


def _drawn(label: str, name: str, course: tuple[Ints, Floats], bad: Any) -> dict[str, Any]:
    steps, values = course
    finite = [value if math.isfinite(value) else None for value in _short(values)]
    return {
        "label": label,
        "statistic": name,
        "steps": steps.tolist(),
        "values": finite,
        "broken": np.flatnonzero(bad).tolist(),
    }


def _short(values: Floats) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _bars(evidence: Evidence) -> list[dict[str, Any]]:
    """Return the limits that a series is compared with."""
    bars = []
    for name, value in evidence.limits().items():
        if value is not None and math.isfinite(value):
            bars.append({"name": name, "value": value})
    return bars
