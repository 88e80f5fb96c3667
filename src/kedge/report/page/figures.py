"""The evidence of a finding, in words and as a figure: the series around its step, a profile over the depth, or a list."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np

from kedge.report.curves import is_number, number
from kedge.report.page.sheets import statistic
from kedge.rules.rule import Finding
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

#: The statistics that show the findings of some rules; others are shown by the scale of their
#: sites.
SHOWN_BY = {
    "DEAD-CHANNEL": "zero",
    "SATURATED": "saturated",
    "NEAR-OVERFLOW": "absmax",
    "UNDERFLOW": "q05",
}
#: The most names that a list in the evidence is written with.
MOST_NAMES = 8
#: The words for figures of the evidence; none for those that the message or the figure tells.
WORDS: dict[str, str] = {
    "also": "also at {}",
    "bar": "the limit is {}",
    "below": "{} of them below zero",
    "bytes": "{} bytes",
    "cause": "{}",
    "causes": "{}",
    "certainty": "",
    "channels": "of {} channels",
    "checked": "{} parameters checked",
    "classes": "{} classes",
    "concerned": "{} of this kind",
    "count": "of {} elements",
    "course": "",
    "dead": "{} dead channels",
    "deep_update_ratio": "relative updates of the last third {}",
    "doublings": "{} doublings",
    "doublings_per_1000_steps": "{} doublings in 1,000 steps",
    "dtype": "in {}",
    "elements": "{} elements",
    "factor": "a factor of {} from layer to layer",
    "first": "at first {}",
    "first_dead": "dead channels {}",
    "follows": "it follows from {}",
    "foreign": "{} tensors of no model",
    "graded": "with a gradient: {}",
    "gradient_to_others": "its gradient is {} times that of the others",
    "gradients": "of {} gradients",
    "gradients_part_at": "gradients differ from step {} on",
    "headroom": "room for {} doublings",
    "healed": "finite again at {}",
    "height": "height {}",
    "how": "",
    "input": "input {}",
    "interruptions": "",
    "kept": "{} of them kept a gradient",
    "kind": "",
    "largest": "largest {}",
    "last": "at last {}",
    "least": "least {}",
    "limit": "the limit is {}",
    "losses": "{} losses",
    "module": "",
    "modules": "modules {}",
    "next_with_gradient": "the next with a gradient is {}",
    "node": "",
    "noise": "noise {}",
    "nan": "{} of them NaN",
    "nonfinite": "{} not finite",
    "norm": "norm {}",
    "of": "of {} in all",
    "once_alive": "{} of them were alive before",
    "operation": "operation {}",
    "operations": "operations {}",
    "optimizer": "",
    "output": "output {}",
    "parameters": "parameters {}",
    "propagated": "{} more sites not finite in that step",
    "propagators": "not finite too: {}",
    "rank": "rank {}",
    "rank_correlation": "rank correlation {}",
    "ratio": "ratio {}",
    "ratio_of_output_gradients": "the first output gradients are {} times the last",
    "replaced": "replaced since: {}",
    "samples": "{} measured steps",
    "samples_before": "{} measured steps before",
    "saturated_sites": "{} saturated sites",
    "shallow_update_ratio": "relative updates of the first third {}",
    "share": "a share of {}",
    "since": "since step {}",
    "site": "",
    "sites": "sites {}",
    "spikes": "{} spikes",
    "steps": "steps {}",
    "tensors": "{} tensors",
    "times": "{} times",
    "total": "of {} bytes in all",
    "type": "",
    "types": "of type {}",
    "update_ratio": "update relative to the parameter {}",
    "usual": "usually {}",
    "value": "its value is {}",
    "weights": "of {} weights",
}
#: The words for what is so or not; none where it is the usual case.
STATES: dict[str, dict[bool, str]] = {
    "came_back": {True: "it came back to the level before", False: "it did not come back"},
    "ends_badly": {True: "the run ends with values that are not finite", False: ""},
    "once_alive": {True: "they were alive before", False: "they were never alive"},
    "recovered": {True: "finite again later", False: "not finite again until the end"},
}
#: The words above figures of several places, by the rule, if it matters, and the name in its
#: evidence.
CAPTIONS: dict[tuple[str, str], str] = {
    ("GRAD-VANISH", "profile"): "gradient of each weight relative to its size",
    ("INIT-SCALE", "profile"): "root mean square of each layer's output",
    ("", "profile"): "value of each layer",
    ("", "next"): "bytes held by the next modules",
    ("", "rms"): "root mean square on each rank",
    ("", "shares"): "share at each site",
}
#: The rules that compare places, not steps.
COMPARED = {"SAVED-MEMORY", "RANK-DEPARTS"}


def figure(recording: Recording, finding: Finding) -> dict[str, Any] | None:
    """Return the figure for a finding; None if there is nothing to draw.

    A profile over the depth is preferred, then the series of the site around the step, at full
    resolution, then other figures of the evidence.
    """
    profile, places = finding.evidence.get("profile"), _places(finding)
    if _is_profile(profile):
        return _profile(_caption(finding.code, "profile"), profile)
    if finding.code in COMPARED and places is not None:
        return places
    given = _series_of_evidence(finding.evidence)
    if given is not None and len(given["series"][0]["steps"]) >= MANY_STEPS:
        return given
    drawn = list(_series(recording, finding))
    if not drawn:
        return places or given
    return {
        "form": "series",
        "step": finding.step,
        "series": drawn,
        "bars": _bars(finding.evidence),
    }


def words(evidence: Mapping[str, Any]) -> list[str]:
    """Return the plain figures of the evidence in words; what else it holds is left to the figure."""
    return [said for name, value in evidence.items() if (said := _said(name, value))]


def _said(name: str, value: object) -> str:
    if isinstance(value, bool):
        return (
            STATES[name][value]
            if name in STATES
            else f"{name.replace('_', ' ')}: {'yes' if value else 'no'}"
        )
    if name == "births":
        return f"it began at {value} places" if isinstance(value, int) and value > 1 else ""
    if name in ("count", "of") and not isinstance(value, int | float):
        return ""
    text = _written(value, share=name == "share")
    return WORDS.get(name, f"{name.replace('_', ' ')}: {{}}").format(text) if text else ""


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


def _places(finding: Finding) -> dict[str, Any] | None:
    """Return figures of several places in the evidence: ``{"conv1.weight": 1e-9, ...}``."""
    named = ((name, value) for name, value in finding.evidence.items() if _is_profile(value))
    return next((_profile(_caption(finding.code, name), value) for name, value in named), None)


def _caption(code: str, name: str) -> str:
    """Return the words above a figure of several places, given the rule and the name in its evidence."""
    return CAPTIONS.get((code, name)) or CAPTIONS.get(("", name)) or name.replace("_", " ")


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


def _series(recording: Recording, finding: Finding) -> Iterator[dict[str, Any]]:
    """Yield the series of the finding's site, and of sites named by its evidence, around its step."""
    known = {site.site: site for site in recording.sites}
    if finding.site not in known:
        return
    near = finding.evidence.get("near")
    named = [finding.site, *(near if isinstance(near, Mapping) else ())]
    if (
        finding.code == "GRAD-EXPLODE"
    ):  # it is about the norm, and its site is the parameter with most of it
        named = [
            site.site
            for site in recording.of_kind("grad.norm")
            if site.root == known[finding.site].root
        ] or named
    for text in dict.fromkeys(named[:MOST_SERIES]):
        if text in known:
            yield from _around(recording, known[text], finding)


def _around(recording: Recording, site: SiteInfo, finding: Finding) -> Iterator[dict[str, Any]]:
    rows = recording.rows(site)
    name = _statistic_of(recording, site, finding)
    values = _values(recording, site, name)
    part = _window(rows.step, finding.step)
    bad = ~rows.clean[part] & (rows.count[part] > 0)
    if len(bad) and (bad.any() or not np.isnan(values[part]).all()):
        yield _drawn(_label(site, name), name, (rows.step[part], values[part]), bad)


def _statistic_of(recording: Recording, site: SiteInfo, finding: Finding) -> str:
    """Return the statistic that shows a finding, which its evidence may name."""
    said = finding.evidence.get("statistic", SHOWN_BY.get(finding.code))
    if said in STATISTICS and not np.isnan(recording.rows(site).statistic(said)).all():
        return str(said)
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
