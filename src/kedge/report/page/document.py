"""The content of a page: one JSON document, and the texts of its tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kedge.report.curves import curves_of, early_end, is_number
from kedge.report.head import command_of
from kedge.report.held.content import memory_content
from kedge.report.page.columns import packed
from kedge.report.page.curves import curves
from kedge.report.page.figures import figure, words
from kedge.report.page.folds import folds_of, groups_of, owners_of
from kedge.report.page.heatmap_sheets import sheets_of, shown_steps
from kedge.report.page.modules import modules_of, saved_event
from kedge.report.page.step_bins import Bins
from kedge.report.verdict import advice, lack_of
from kedge.rules.judgement import judgement_of
from kedge.rules.registry import explain
from kedge.rules.rule import Finding, Rule
from kedge.short_text import for_json
from kedge.sites.folding import block
from kedge.store.formats import FORMATS
from kedge.store.recording import Recording, SiteInfo
from kedge.store.saved_account import account_of, folded_sums, newest, sections

#: The formats whose limits the page draws.
SHOWN_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32")
#: The keys of the manifest that the head of the page shows.
SHOWN_KEYS = ("device", "torch", "python", "kedge", "started", "every", "world", "budget")
#: The most modules with bars in the section on saved tensors.
MOST_BARS = 16
#: The most numbers of single ranks that a page has: some ten megabytes of it.
MOST_OF_RANKS = 4_000_000


@dataclass(frozen=True)
class Document:
    """A condensed recording.

    Attributes:
        described: Everything but the tables; plain JSON values.
        tables: The tables' base64 texts by name. They are separate, so that a page reads each only
            when it is needed.
    """

    described: dict[str, Any]
    tables: dict[str, str]


def condense(
    recording: Recording,
    findings: Sequence[Finding],
    rules: Sequence[Rule] = (),
    *,
    written: bool | None = None,
    pace: float | None = None,
) -> Document:
    """Return the content of a page.

    Args:
        recording: The recording.
        findings: The findings of the rules, the worst first.
        rules: The rules that were run; the explanation of each rule with findings is included.
        written: Whether a process still writes the recording; None if that is not known.
        pace: Recent steps per second; None if that is not known.
    """
    wanted = [finding.step for finding in findings if finding.step >= 0]
    shown = shown_steps(recording)
    # A finding may be of a step without rows: it is pinned on a column of its own, not on the one
    # before.
    bins = Bins.of(np.union1d(shown, np.array(wanted, dtype=np.int64)), wanted, recording.steps)
    tables: dict[str, str] = {"first": packed(bins.first.astype(np.float64), "f8")}
    tables["last"] = packed(bins.last.astype(np.float64), "f8")
    entries = sheets_of(recording, bins).entries()
    for name, entry in entries.items():
        tables[name] = entry.pop("data")
    ranks, own = _ranks(recording, bins)
    tables |= own
    codes = {finding.code for finding in findings}
    judgement = judgement_of(recording, findings, rules)
    modules, owners = modules_of(recording), owners_of(recording)
    found = list(curves_of(recording))
    described = {
        "run": _head(recording)
        | {"early": early_end(recording, found)}
        | {"written": written, "pace": pace},
        "rules": len(rules),
        "unjudged": [{"code": lack.code, "said": lack_of(lack)} for lack in judgement.unjudged],
        "unseen": list(judgement.unseen),
        "advice": list(advice(judgement)),
        "explained": {rule.code: explain(rule.code, rules) for rule in rules if rule.code in codes},
        "findings": [
            _finding(recording, finding) | {"owner": owners.get(finding.site)}
            for finding in findings
        ],
        "roots": [
            {"name": root.name, "prefix": root.prefix, "parameters": root.parameters}
            for root in recording.roots
        ],
        "sites": [
            _site(recording, site) | {"group": group}
            for site, group in zip(recording.sites, groups_of(recording), strict=True)
        ],
        "columns": {"count": len(bins), "single": bins.single, "steps": len(shown)},
        "sheets": entries,
        "ranks": ranks,
        "curves": list(curves(found)),
        "modules": modules,
        "folds": folds_of(recording, modules, findings),
        "account": _account(recording),
        "formats": [asdict(FORMATS[name]) for name in SHOWN_FORMATS],
    }
    return Document(described, tables)


def _site(recording: Recording, site: SiteInfo) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "site": site.site,
        "path": site.path,
        "kind": site.kind,
        "type": site.type,
        "root": site.root,
        "shape": list(site.shape),
        "dtype": site.dtype,
        "from": list(site.sources),
        "owner": site.owner,
        "block": block(site.path),
    }
    if is_number(recording, site):
        shown["number"] = True
    if site.source:
        shown["source"] = {
            key: site.source.get(key) for key in ("file", "line", "function", "text")
        }
    return shown


def _finding(recording: Recording, finding: Finding) -> dict[str, Any]:
    shown = asdict(finding)
    shown["evidence"] = for_json(finding.evidence)
    shown["figure"] = figure(recording, finding)
    shown["words"] = words(finding.evidence)
    return shown


def _head(recording: Recording) -> dict[str, Any]:
    """Return the head of the page: command, circumstances, end and cost of watching."""
    manifest, end = recording.manifest, recording.end
    shown: dict[str, Any] = {key: manifest.get(key) for key in SHOWN_KEYS}
    shown |= {
        "name": recording.path.name,
        "command": command_of(manifest),
        "watched": manifest.get("sites"),
    }
    shown |= {
        "sampled": len(recording.steps),
        "truncated": recording.truncated,
        "running": end is None,
    }
    shown |= {"last": int(recording.steps[-1]) if len(recording.steps) else None}
    if end is not None:
        shown |= {
            key: end.get(key)
            for key in ("exit", "error", "steps", "seconds", "watching", "slowdown", "levels")
        }
    saved = saved_event(recording)
    shown["saved"] = {"step": saved.get("step"), "bytes": saved.get("bytes")} if saved else None
    shown["ranks"] = len(recording.ranks)
    return shown


def _account(recording: Recording) -> dict[str, Any] | None:
    """Return the section on saved tensors; None unless a full account was recorded."""
    event = newest(recording.events)
    account = None if event is None else account_of(event)
    if event is None or account is None:
        return None
    bars = sorted(
        folded_sums(sums for sums in account.modules if sums.bytes), key=lambda fold: -fold[1].bytes
    )[:MOST_BARS]
    names = {fold.name: fold.members[0].path for fold, _ in folded_sums(account.holders)}
    totals, modules, lines = sections(account)
    return {
        "step": event.get("step"),
        "held": account.total.bytes,
        "totals": [list(row) for row in totals.rows],
        "modules": asdict(modules) | {"paths": [names.get(row[0]) for row in modules.rows]},
        "lines": asdict(lines),
        "bars": [
            {
                "path": fold.members[0].path,
                "name": fold.name,
                "held": sums.bytes,
                "rebuild": sums.rebuild,
                "offload": sums.offload,
            }
            for fold, sums in bars
        ],
        "course": memory_content(account.course, account.parameters),
    }


def _ranks(recording: Recording, bins: Bins) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the sheets of each rank by itself, in the columns that all ranks share.

    The lowest ranks are shown, as many as the page has room for; their numbers have two or three
    digits.

    Returns:
        The ranks that are ``shown``, each with its sheets and curves, and those that are
        ``left_out``; and the texts of the sheets' tables, by rank and name of the sheet.
    """
    shown: list[dict[str, Any]] = []
    tables: dict[str, str] = {}
    room = MOST_OF_RANKS
    ranks = recording.ranks if len(recording.ranks) > 1 else ()
    for rank in ranks:
        own = recording.of_rank(rank)
        sheets = sheets_of(own, bins)
        room -= sheets.size
        if room < 0:
            break
        entries = sheets.entries(brief=True)
        tables |= {f"rank{rank}-{name}": entry.pop("data") for name, entry in entries.items()}
        shown.append({"rank": rank, "sheets": entries, "curves": list(curves(curves_of(own)))})
    return {"shown": shown, "left_out": list(ranks[len(shown) :])}, tables
