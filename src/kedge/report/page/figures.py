"""The evidence of a finding, in words and as a figure: the series around its step, a profile over the depth, or a list."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from kedge.report.curves import is_number, number
from kedge.report.page.sheets import statistic
from kedge.rules.rule import Finding, Rule, Words
from kedge.short_text import compact, for_json, percent
from kedge.store.recording import STATISTICS, Recording, SiteInfo
from kedge.store.rows import Floats, Ints

#: The samples that a figure shows on each side of the finding's step, at full resolution.
AROUND = 60
MOST_SERIES = 4
MOST_BARS = 48
LEAST_PROFILE = 3
#: From this many steps on, a series in the evidence is preferred to the site's own.
MANY_STEPS = 12

#: The most names that a list in the evidence is written with.
MOST_NAMES = 8
#: The words for figures that several rules have; none for those that the message or the figure
#: shows. For a yes or no, the words for each.
SHARED_WORDS: Words = {
    "cause": "{}",
    "causes": "{}",
    "concerned": "{} of this kind",
    "course": "",
    "dtype": "in {}",
    "follows": "it follows from {}",
    "kind": "",
    "modules": "modules {}",
    "of": "of {} in all",
    "samples": "{} measured steps",
    "share": "a share of {}",
    "sites": "sites {}",
    "steps": "steps {}",
    "times": "{} times",
}
#: The words above figures of several places that several rules have.
SHARED_CAPTIONS = {"profile": "value of each layer", "shares": "share at each site"}


def figure(
    recording: Recording, finding: Finding, rule: Rule | None = None
) -> dict[str, Any] | None:
    """Return the figure for a finding of a rule; None if there is nothing to draw.

    A profile over the depth is preferred, then the series of the site around the step, at full
    resolution, then other figures of the evidence.
    """
    captions = {**SHARED_CAPTIONS, **(rule.captions if rule else {})}
    profile, places = finding.evidence.get("profile"), _places(finding, captions)
    if _is_profile(profile):
        return _profile(captions["profile"], profile)
    if rule and rule.compares_places and places is not None:
        return places
    given = _series_of_evidence(finding.evidence)
    if given is not None and len(given["series"][0]["steps"]) >= MANY_STEPS:
        return given
    drawn = list(_series(recording, finding, rule))
    if not drawn:
        return places or given
    return {
        "form": "series",
        "step": finding.step,
        "series": drawn,
        "bars": _bars(finding.evidence),
    }


def words(evidence: Mapping[str, Any], rule: Rule | None = None) -> list[str]:
    """Return the plain figures of a rule's evidence in words; what else it holds is left to the figure."""
    known = {**SHARED_WORDS, **(rule.words if rule else {})}
    return [said for name, value in evidence.items() if (said := _said(name, value, known))]


def _said(name: str, value: object, known: Words) -> str:
    wording = known.get(name)
    if isinstance(value, bool):
        if isinstance(wording, tuple):
            return wording[0] if value else wording[1]
        return f"{name.replace('_', ' ')}: {'yes' if value else 'no'}"
    if name == "births":
        return f"it began at {value} places" if isinstance(value, int) and value > 1 else ""
    if name in ("count", "of") and not isinstance(value, int | float):
        return ""
    text = _written(value, share=name == "share")
    if not isinstance(wording, str):
        wording = f"{name.replace('_', ' ')}: {{}}"
    return wording.format(text) if text else ""


def _written(value: object, *, share: bool = False) -> str:
    """Return a plain value as text; empty for what is not one."""
    if isinstance(value, float) and share:
        return percent(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return compact(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        plain = len(value) <= MOST_NAMES and all(
            isinstance(one, str | int | float) for one in value
        )
        return ", ".join(map(_written, value)) if plain else ""
    return value if isinstance(value, str) else ""


def _is_profile(value: object) -> TypeGuard[Mapping[str, Any]]:
    return (
        isinstance(value, Mapping)
        and len(value) >= LEAST_PROFILE
        and all(map(_is_number, value.values()))
    )


def _places(finding: Finding, captions: Mapping[str, str]) -> dict[str, Any] | None:
    """Return figures of several places in the evidence: ``{"conv1.weight": 1e-9, ...}``."""
    for name, value in finding.evidence.items():
        if _is_profile(value):
            return _profile(captions.get(name, name.replace("_", " ")), value)
    return None


def _profile(name: str, figures: Mapping[str, Any]) -> dict[str, Any]:
    labels, values = list(figures)[:MOST_BARS], list(figures.values())[:MOST_BARS]
    return {"form": "profile", "name": name, "labels": labels, "values": for_json(values)}


def _series_of_evidence(evidence: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the series in the evidence itself: ``{"steps": [...], "norm": [...]}``."""
    steps = evidence.get("steps")
    if not _is_series(steps):
        return None
    drawn = [
        {
            "label": name,
            "statistic": name,
            "steps": for_json(steps),
            "values": for_json(value),
            "broken": [],
        }
        for name, value in evidence.items()
        if name != "steps" and _is_series(value) and len(value) == len(steps)
    ]
    return (
        {"form": "series", "step": None, "series": drawn[:MOST_SERIES], "bars": _bars(evidence)}
        if drawn
        else None
    )


def _is_series(value: object) -> TypeGuard[Sequence[float | None]]:
    return (
        isinstance(value, Sequence) and len(value) >= LEAST_PROFILE and all(map(_is_number, value))
    )


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _series(recording: Recording, finding: Finding, rule: Rule | None) -> Iterator[dict[str, Any]]:
    """Yield the series of the finding's site, and of sites named by its evidence, around its step."""
    known = {site.site: site for site in recording.sites}
    if finding.site not in known:
        return
    near = finding.evidence.get("near")
    named = [*(rule.drawn(recording, finding) if rule else [finding.site])]
    named += near if isinstance(near, Mapping) else ()
    for text in dict.fromkeys(named[:MOST_SERIES]):
        if text in known:
            yield from _around(recording, known[text], finding, rule)


def _around(
    recording: Recording, site: SiteInfo, finding: Finding, rule: Rule | None
) -> Iterator[dict[str, Any]]:
    rows = recording.rows(site)
    wanted = finding.evidence.get("statistic", rule.statistic if rule else "")
    name = _statistic_of(recording, site, wanted)
    values = _values(recording, site, name)
    part = _window(rows.step, finding.step)
    bad = ~rows.clean[part] & (rows.count[part] > 0)
    if len(bad) and (bad.any() or not np.isnan(values[part]).all()):
        yield _drawn(_label(site, name), name, (rows.step[part], values[part]), bad)


def _statistic_of(recording: Recording, site: SiteInfo, wanted: object) -> str:
    """Return the statistic that shows a site: the wanted one, if it was measured."""
    if wanted in STATISTICS and not np.isnan(recording.rows(site).statistic(str(wanted))).all():
        return str(wanted)
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


def _bars(evidence: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the limits that a series is compared with."""
    names = {"bar": "limit", "threshold": "threshold", "limit": "limit"}
    return [
        {"name": shown, "value": evidence[key]}
        for key, shown in names.items()
        if _is_finite(evidence.get(key))
    ]


def _is_finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
