"""The content of a page: one JSON document, and the texts of its tables."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kedge.report.curves import Curve, curves_of, is_number
from kedge.report.held import memory_content
from kedge.report.page.columns import form_of, packed
from kedge.report.page.figures import figure
from kedge.report.page.modules import folds_of, groups_of, modules_of, owners_of
from kedge.report.page.sheets import sheets_of, shown_steps
from kedge.report.page.step_bins import Bins, Grouping
from kedge.report.page.timed_sites import with_times
from kedge.report.positions import last_positions
from kedge.report.program_line import line_of_finding, line_of_site
from kedge.report.shown_run import ShownRun
from kedge.report.verdict import advice, headline, lack_of, tone, without_work
from kedge.rules.recorded.roots import root_names, root_titles
from kedge.rules.registry import by_code, explain
from kedge.rules.rule import Finding, Rule
from kedge.short_text import for_json
from kedge.sites.folding import block
from kedge.store.formats import FORMATS
from kedge.store.recording import Recording, SiteInfo
from kedge.store.saved_tables import folded_sums, sections

#: The formats whose limits the page draws.
SHOWN_FORMATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32")
#: The most points of a curve.
MOST_POINTS = 1500
#: The keys of the manifest that the head of the page shows.
SHOWN_KEYS = ("device", "torch", "python", "kedge", "started", "every", "world", "budget")
#: The keys of its end that the head shows.
ENDED_KEYS = ("exit", "error", "steps", "seconds", "watching", "slowdown", "levels")
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


def condense(shown_run: ShownRun) -> Document:
    """Return the content of a page; it includes the explanation of each rule with findings."""
    recording, findings, judgement = shown_run.recording, shown_run.findings, shown_run.judgement
    rules = shown_run.rules or ()

    # A finding may be of a step without rows: it is pinned on a column of its own, not on the one
    # before.
    wanted = [finding.step for finding in findings if finding.step >= 0]
    shown = shown_steps(recording)
    bins = Bins.of(np.union1d(shown, np.array(wanted, dtype=np.int64)), wanted, recording.steps)
    ranks, of_ranks = _ranks(recording, bins)
    modules, owners = modules_of(shown_run), owners_of(recording)

    known = by_code(rules)
    explained = {}
    codes = {finding.code for finding in findings}
    for rule in rules:
        if rule.code in codes:
            explained[rule.code] = explain(rule.code, rules)
    roots = [
        {
            "name": name,
            "title": title,
            "prefix": root.prefix,
            "parameters": root.parameters,
        }
        for root, name, title in zip(
            recording.roots, root_names(recording), root_titles(recording), strict=True
        )
    ]
    sites = []
    for site, group in zip(recording.sites, groups_of(recording), strict=True):
        sites.append(_site(recording, site) | {"group": group})
    sites, all_sheets = with_times(recording, sites, sheets_of(recording, bins))
    sheets, tables = all_sheets.packed()
    said = headline(judgement)
    if not findings and not judgement.measured:
        said = "nothing was judged: no step was measured"
        if not judgement.ended:
            said = "nothing is judged yet: no step has been measured"
    idle = ""
    if not findings and judgement.complete and judgement.idle:
        idle = without_work(judgement.idle)
    described = {
        "run": _head(shown_run),
        "verdict": {"said": said, "tone": tone(judgement), "idle": idle},
        "unjudged": [{"code": lack.code, "said": lack_of(lack)} for lack in judgement.unjudged],
        "unseen": list(judgement.unseen),
        "advice": list(advice(judgement)),
        "explained": explained,
        "findings": [
            _finding(recording, finding, known.get(finding.code))
            | {"owner": owners.get(finding.site)}
            for finding in findings
        ],
        "roots": roots,
        "sites": sites,
        "columns": {
            "count": len(bins),
            "single": bins.single,
            "steps": len(shown),
            "end": None if recording.end is None else recording.end.steps,
        },
        "sheets": sheets,
        "ranks": ranks,
        "curves": packed_curves(shown_run.curves),
        "modules": modules,
        "folds": folds_of(shown_run, modules),
        "account": _account(shown_run),
        "formats": [asdict(FORMATS[name]) for name in SHOWN_FORMATS],
    }
    return Document(described, bins.packed() | tables | of_ranks)


def described_site(site: SiteInfo) -> dict[str, Any]:
    """Return what every page has of a site."""
    return {
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


def _site(recording: Recording, site: SiteInfo) -> dict[str, Any]:
    shown = described_site(site)
    if is_number(recording, site):
        shown["number"] = True
    line = line_of_site(site)
    if line is not None:
        shown["line"] = line.entry()
    return shown


def packed_curves(curves: Iterable[Curve], most: int = MOST_POINTS) -> list[dict[str, Any]]:
    """Return curves for a page, each of so many points at most."""
    made = []
    for curve in curves:
        bins = Bins.of(curve.steps, most=most)
        groups = Grouping.of(bins, curve.steps)
        newest = None
        if len(curve.steps):
            newest = [int(curve.steps[-1]), for_json(float(curve.values[-1]))]
        bad = groups.fold(curve.bad.astype(np.float64), "most") > 0
        entry: dict[str, Any] = {
            "kind": curve.kind,
            "title": curve.title,
            "label": curve.label,
            "part": curve.part,
            "site": curve.site,
            "points": len(bins),
            "step": packed(bins.last.astype(np.float64), "f8"),
            "newest": newest,
            "broken": np.flatnonzero(bad).tolist(),
        }
        finite = np.where(np.isfinite(curve.values), curve.values, np.nan)
        for how in ("last",) if bins.single else ("last", "most", "least"):
            folded = groups.fold(finite, how)
            form = form_of(folded, share=False, brief=False)
            entry[how] = {"form": form, "data": packed(folded, form)}
        made.append(entry)
    return made


def _finding(recording: Recording, finding: Finding, rule: Rule | None) -> dict[str, Any]:
    shown = finding.entry()
    shown["evidence"] = for_json(shown["evidence"])
    shown["figure"] = figure(recording, finding, rule)
    shown["words"] = finding.words()
    shown["line"] = None
    line = line_of_finding(recording, finding)
    if line is not None:
        shown["line"] = line.entry()
    return shown


def _head(shown_run: ShownRun) -> dict[str, Any]:
    """Return the head of the page: command, circumstances, end and cost of watching."""
    recording = shown_run.recording
    manifest, end = recording.manifest, recording.end
    shown: dict[str, Any] = {key: manifest.get(key) for key in SHOWN_KEYS}
    shown |= {
        "name": recording.path.name,
        "command": shown_run.command,
        "watched": manifest.get("sites"),
        "sampled": len(recording.steps),
        "truncated": recording.truncated,
        "running": end is None,
        "last": int(recording.steps[-1]) if len(recording.steps) else None,
    }
    if end is not None:
        shown |= {key: getattr(end, key) for key in ENDED_KEYS}
    shown["saved"] = None
    if recording.saved is not None:
        shown["saved"] = {"step": recording.saved.step, "bytes": recording.saved.bytes}
    shown["ranks"] = len(recording.ranks)
    shown["early"] = shown_run.early
    shown["written"] = shown_run.written
    shown["over"] = shown_run.is_over
    shown["pace"] = shown_run.pace
    running = shown_run.written is True
    shown["positions"] = list(last_positions(recording, running=running))
    return shown


def _account(shown_run: ShownRun) -> dict[str, Any] | None:
    """Return the section on saved tensors; None unless a full account was recorded."""
    event = shown_run.recording.saved
    account = None if event is None else event.account
    if event is None or account is None:
        return None
    holding = folded_sums(sums for sums in account.modules if sums.bytes)
    bars = sorted(holding, key=lambda fold: -fold[1].bytes)[:MOST_BARS]
    names = {fold.name: fold.members[0].path for fold, _ in folded_sums(account.holders)}
    totals, modules, lines = sections(account)
    return {
        "step": event.step,
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
        entries, texts = sheets.packed(brief=True)
        tables |= {f"rank{rank}-{name}": text for name, text in texts.items()}
        curves = packed_curves(curves_of(own))
        shown.append({"rank": rank, "sheets": entries, "curves": curves})
    return {"shown": shown, "left_out": list(ranks[len(shown) :])}, tables
