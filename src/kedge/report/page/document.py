"""Everything that a page shows, as one JSON document and the texts of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kedge.report.curves import is_number
from kedge.report.page.columns import packed
from kedge.report.page.curves import curves
from kedge.report.page.figures import figure, plain
from kedge.report.page.header import about
from kedge.report.page.heatmap_sheets import sheets_of, shown_steps
from kedge.report.page.modules import modules_of
from kedge.report.page.ranks import ranks_of
from kedge.report.page.saved_section import account_section
from kedge.report.page.step_bins import Bins
from kedge.report.verdict import advice, lack_of
from kedge.rules.judgement import judgement_of
from kedge.rules.registry import explain
from kedge.rules.rule import Finding, Rule
from kedge.store.formats import FORMATS
from kedge.store.recording import Recording, SiteInfo

#: The formats that the page draws the limits of.
SHOWN_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32")


@dataclass(frozen=True)
class Document:
    """A condensed recording.

    Attributes:
        described: What is not a table; plain JSON values.
        tables: The tables' base64 texts by name. They stand apart, so that a page reads each only when it is needed.
    """

    described: dict[str, Any]
    tables: dict[str, str]


def condense(recording: Recording, findings: Sequence[Finding], rules: Sequence[Rule] = ()) -> Document:
    """Condense a recording into what a page shows.

    Args:
        recording: What was seen.
        findings: What the rules say of it, the worst first.
        rules: The rules that were run; the page of each that found something is put in.
    """
    wanted = [finding.step for finding in findings if finding.step >= 0]
    shown = shown_steps(recording)
    # A finding may be of a step that no row tells of: it is pinned on a column of its own, not on the one before.
    bins = Bins.of(np.union1d(shown, np.array(wanted, dtype=np.int64)), wanted, recording.steps)
    tables: dict[str, str] = {"first": packed(bins.first.astype(np.float64), "f8")}
    tables["last"] = packed(bins.last.astype(np.float64), "f8")
    entries = sheets_of(recording, bins).entries()
    for name, entry in entries.items():
        tables[name] = entry.pop("data")
    ranks, own = ranks_of(recording, bins)
    tables |= own
    codes = {finding.code for finding in findings}
    judgement = judgement_of(recording, findings, rules)
    described = {
        "run": about(recording),
        "rules": len(rules),
        "unjudged": [{"code": lack.code, "said": lack_of(lack)} for lack in judgement.unjudged],
        "unseen": list(judgement.unseen),
        "advice": list(advice(judgement)),
        "explained": {rule.code: explain(rule.code, rules) for rule in rules if rule.code in codes},
        "findings": [_finding(recording, finding) for finding in findings],
        "roots": [
            {"name": root.name, "prefix": root.prefix, "parameters": root.parameters} for root in recording.roots
        ],
        "sites": [_site(recording, site) for site in recording.sites],
        "columns": {"count": len(bins), "single": bins.single, "steps": len(shown)},
        "sheets": entries,
        "ranks": ranks,
        "curves": list(curves(recording)),
        "modules": modules_of(recording),
        "account": account_section(recording),
        "formats": [asdict(FORMATS[name]) for name in SHOWN_FORMATS],
    }
    return Document(described, tables)


def _site(recording: Recording, site: SiteInfo) -> dict[str, Any]:
    told: dict[str, Any] = {
        "site": site.site,
        "path": site.path,
        "kind": site.kind,
        "type": site.type,
        "root": site.root,
        "shape": list(site.shape),
        "dtype": site.dtype,
        "from": list(site.sources),
        "owner": site.owner,
    }
    if is_number(recording, site):
        told["number"] = True
    if site.source:
        told["source"] = {key: site.source.get(key) for key in ("file", "line", "function", "text")}
    return told


def _finding(recording: Recording, finding: Finding) -> dict[str, Any]:
    told = asdict(finding)
    told["evidence"] = plain(finding.evidence)
    told["figure"] = figure(recording, finding)
    return told
