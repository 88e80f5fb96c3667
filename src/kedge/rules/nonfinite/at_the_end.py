"""What is not finite at the end of a run, or in a loss, and that no birth explains.

# Note [No tick past a NaN]
The search for births follows values through rows, and a place that it cannot see gives no birth. So
two facts are findings whatever else is known: a loss that was not finite in some step, and a
parameter or buffer that is not finite at the end. They name what was seen, and between which steps
it was made; not a cause.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kedge.rules.command import again
from kedge.rules.recorded.losses import LOSS
from kedge.rules.rule import Finding, Severity
from kedge.short_text import counted, listed
from kedge.store.recording import Recording, SiteInfo

_NAMED = 4


def with_end(recording: Recording, findings: Sequence[Finding]) -> list[Finding]:
    """Return findings, with those of Note [No tick past a NaN] that no other one explains."""
    found = list(findings)
    lost = _first_bad_loss(recording)
    if lost is not None and not any(finding.step <= lost[1] for finding in found):
        found.append(_of_loss(recording, *lost))
    lasting = [f for f in found if f.severity == "error" and not f.evidence.get("recovered")]
    exams = [e for e in recording.events if e.get("kind") == "nonfinite-at-end" and e["tensors"]]
    if exams and not lasting:
        found.append(_of_exam(recording, exams[0]))
    return found


def _first_bad_loss(recording: Recording) -> tuple[SiteInfo, int] | None:
    """Return the loss that was the first not to be finite, and the step; None if all were."""
    bad = []
    for site in recording.of_kind(LOSS):
        rows = recording.rows(site)
        bad += [(int(step), site.id, site) for step in rows.step[~rows.clean][:1]]
    if not bad:
        return None
    step, _, site = min(bad)
    return site, step


def _of_loss(recording: Recording, site: SiteInfo, step: int) -> Finding:
    rows = recording.rows(site)
    bad = rows.step[~rows.clean]
    lasting = not rows.clean[-1]
    often = f", as in {counted(len(bad), 'recorded step')} in all" if len(bad) > 1 else ""
    end = " It is not finite at the end." if lasting else " It was finite again later."
    return Finding(
        code="NAN-BORN",
        severity="error",
        site=site.site,
        step=step,
        message=f"{site.site} was not finite at step {step}{often}; what made it was not recorded.{end}",
        evidence={"how": "lost", "module": None, "also": [], "recovered": not lasting, "births": 1},
        confidence=0.9,
        remedy=again(recording, "To have the place named").strip() or _LOOK,
    )


_LOOK = "Look at the loss and its inputs in that step: torch.isfinite tells which is the first that is not finite."


def _of_exam(recording: Recording, event: Mapping[str, Any]) -> Finding:
    tensors: Sequence[Mapping[str, Any]] = event["tensors"]
    worst = min(tensors, key=lambda entry: (entry["of"] != "param", not entry["nan"]))
    severity: Severity = "error" if worst["of"] == "param" or worst["nan"] else "warning"
    others = [str(entry["path"]) for entry in tensors if entry is not worst]
    more = int(event["count"]) - 1
    also = ""
    if more:
        verb = "were" if more > 1 else "was"
        rest = f" and {more - _NAMED} more" if more > _NAMED else ""
        also = f", and so {verb} {listed(others[:_NAMED])}{rest}"
    words = {"param": "parameter", "buffer": "buffer"}[worst["of"]]
    return Finding(
        code="NAN-BORN",
        severity=severity,
        site=f"{worst['path']}:param" if worst["of"] == "param" else str(worst["path"]),
        step=int(event["step"]),
        message=(
            f"The {words} {worst['path']} was not finite at the end of its training ({_amount(worst)}){also}. "
            f"{_since(recording, worst)}"
        ),
        evidence={
            "how": "end", "module": None, "also": others[:_NAMED], "recovered": False, "births": 1,
            "nan": worst["nan"], "inf": worst["inf"],
        },
        confidence=1.0,
        remedy=again(recording, "To have the place named") + "Do not use this checkpoint.",
    )  # fmt: skip


def _amount(entry: Mapping[str, Any]) -> str:
    parts = [f"{entry['nan']} NaN"] if entry["nan"] else []
    parts += [f"{entry['inf']} infinite"] if entry["inf"] else []
    return " and ".join(parts)


def _since(recording: Recording, entry: Mapping[str, Any]) -> str:
    """Return a sentence about the last record in which the tensor was finite."""
    sites = [site for site in recording.of_kind("param") if site.path == entry["path"]]
    rows = recording.rows(sites[0]) if sites and entry["of"] == "param" else None
    sound = np.zeros(0, dtype=np.int64) if rows is None else rows.step[rows.clean]
    if not len(sound):
        return "No step recorded it."
    return (
        f"It was finite when last recorded, before the optimizer's step of step {int(sound[-1])}: what made it came "
        "after that, in steps of which it was not recorded."
    )
