"""What a finding rests on, as a figure: the series around its step, a profile over the depth, or a list of figures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from kedge.report.curves import is_number, number
from kedge.report.page.heatmap_sheets import statistic
from kedge.report.page.step_bins import Floats, Ints
from kedge.rules.rule import Finding
from kedge.store.recording import STATISTICS, Recording, SiteInfo

#: How many samples a figure shows on each side of the finding's step, at full resolution.
AROUND = 60
MOST_SERIES = 4
MOST_BARS = 48
LEAST_PROFILE = 3
#: From this many steps on a series in the evidence is better than the site's own.
MANY_TOLD = 12

#: What shows best what some rules are about; their sites' scale is what shows the others.
TELLING = {"DEAD-CHANNEL": "zero", "SATURATED": "saturated", "NEAR-OVERFLOW": "absmax", "UNDERFLOW": "q05"}
#: Rules that compare places with each other and not steps.
COMPARED = {"SAVED-MEMORY", "RANK-DEPARTS"}


def figure(recording: Recording, finding: Finding) -> dict[str, Any] | None:
    """Choose the figure for a finding; None if there is nothing to draw.

    A profile over the depth says most; then the course of the site around the step, at full resolution; then
    whatever else the evidence has.
    """
    profile, places = finding.evidence.get("profile"), _places(finding.evidence)
    if _is_profile(profile):
        return _profile("profile", profile)
    if finding.code in COMPARED and places is not None:
        return places
    told = _told_series(finding.evidence)
    if told is not None and len(told["series"][0]["steps"]) >= MANY_TOLD:
        return told
    drawn = list(_series(recording, finding))
    if not drawn:
        return places or told
    return {"form": "series", "step": finding.step, "series": drawn, "bars": _bars(finding.evidence)}


def _is_profile(value: object) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(value, Mapping) and len(value) >= LEAST_PROFILE and all(map(_is_number, value.values()))


def _places(evidence: Mapping[str, Any]) -> dict[str, Any] | None:
    """Find a figure for each of several places: ``{"conv1.weight": 1e-9, ...}``."""
    return next((_profile(name, value) for name, value in evidence.items() if _is_profile(value)), None)


def _profile(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    labels, values = list(figures)[:MOST_BARS], list(figures.values())[:MOST_BARS]
    return {"form": "profile", "name": name, "labels": labels, "values": plain(values)}


def _told_series(evidence: Mapping[str, Any]) -> dict[str, Any] | None:
    """Find a series in the evidence itself: ``{"steps": [...], "norm": [...]}``."""
    steps = evidence.get("steps")
    if not _is_series(steps):
        return None
    drawn = [
        {"label": name, "statistic": name, "steps": plain(steps), "values": plain(value), "broken": []}
        for name, value in evidence.items()
        if name != "steps" and _is_series(value) and len(value) == len(steps)
    ]
    return {"form": "series", "step": None, "series": drawn[:MOST_SERIES], "bars": _bars(evidence)} if drawn else None


def _is_series(value: object) -> TypeGuard[Sequence[float | None]]:
    return isinstance(value, Sequence) and len(value) >= LEAST_PROFILE and all(map(_is_number, value))


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _series(recording: Recording, finding: Finding) -> Iterator[dict[str, Any]]:
    """Give the course of the finding's site, and of those that its evidence names, around its step."""
    known = {site.site: site for site in recording.sites}
    if finding.site not in known:
        return
    near = finding.evidence.get("near")
    named = [finding.site, *(near if isinstance(near, Mapping) else ())]
    if finding.code == "GRAD-EXPLODE":  # it speaks of the norm, and names the parameter that holds most of it
        named = [site.site for site in recording.of_kind("grad.norm") if site.root == known[finding.site].root] or named
    for text in dict.fromkeys(named[:MOST_SERIES]):
        if text in known:
            yield from _around(recording, known[text], finding)


def _around(recording: Recording, site: SiteInfo, finding: Finding) -> Iterator[dict[str, Any]]:
    rows = recording.rows(site)
    name = _telling(recording, site, finding)
    values = _values(recording, site, name)
    part = _window(rows.step, finding.step)
    bad = ~rows.clean[part] & (rows.count[part] > 0)
    if len(bad) and (bad.any() or not np.isnan(values[part]).all()):
        yield _drawn(_label(site, name), name, (rows.step[part], values[part]), bad)


def _telling(recording: Recording, site: SiteInfo, finding: Finding) -> str:
    """Name the statistic that shows what a finding is about; its evidence may say so."""
    said = finding.evidence.get("statistic", TELLING.get(finding.code))
    if said in STATISTICS and not np.isnan(recording.rows(site).statistic(said)).all():
        return str(said)
    if site.kind == "grad.norm":
        return "norm"
    if site.kind == "loss" or is_number(recording, site):
        return "value"
    return "update ratio" if site.kind == "update" else "rms"


def _values(recording: Recording, site: SiteInfo, name: str) -> Floats:
    """Give the figures of a site's rows."""
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
    """Relate the updates of a parameter to its size in the same steps."""
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


def _bars(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Find the figures that a series is held against."""
    names = ("bar", "threshold", "limit")
    return [{"name": name, "value": evidence[name]} for name in names if _is_finite(evidence.get(name))]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def plain(value: Any) -> Any:
    """Turn what evidence may hold into what JSON has; numbers that it lacks become text."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
