"""Two recordings compared, as one object for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from kedge.compare.alignment.modules import RecordedModule
from kedge.compare.alignment.sites import Alignment
from kedge.compare.circumstances import circumstances
from kedge.compare.comparison import Comparison, Parting
from kedge.compare.operations.finding import OperationFinding
from kedge.compare.operations.seen import SeenOperation
from kedge.compare.verdict import Verdict
from kedge.report.compare.head import Names
from kedge.report.compare.module_lines import ModuleDifference, in_order_of_parting, lines
from kedge.short_text import for_json


def document(comparison: Comparison, verdict: Verdict, names: Names) -> dict[str, Any]:
    """Return the object; numbers that JSON does not have are strings: "nan", "inf", "-inf"."""
    differs = {}
    for found in circumstances(comparison.a, comparison.b):
        differs[found.name] = {"a": found.a, "b": found.b}
    return {
        "a": names.a,
        "b": names.b,
        "parted": verdict.parted,
        "headline": verdict.headline,
        "tolerance": comparison.tolerance,
        "cause": asdict(verdict.cause),
        "departures": [for_json(finding.entry()) for finding in verdict.departures],
        "first": _parting(verdict.first),
        "operation": _operation(verdict.operation),
        "differs": differs,
        "steps": {"both": comparison.steps.tolist(), "full": comparison.full},
        "sites": len(comparison.alignment.sites),
        "modules": [_line(line) for line in in_order_of_parting(lines(comparison))],
        "alignment": _alignment(comparison.alignment),
    }


def _parting(parting: Parting | None) -> dict[str, Any] | None:
    if parting is None:
        return None
    return {
        "step": parting.step,
        "site": {"a": parting.same.a.site, "b": parting.same.b.site},
        "statistic": parting.statistic,
        "a": for_json(parting.a),
        "b": for_json(parting.b),
        "apart": for_json(parting.apart),
        "ulps": for_json(parting.ulps),
    }


def _operation(found: OperationFinding | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return {
        "how": found.how,
        "headline": found.headline,
        "evidence": found.evidence,
        "a": [_seen(each) for each in found.a],
        "b": [_seen(each) for each in found.b],
        "arguments": [asdict(each) for each in found.arguments],
        "written": list(found.written),
    }


def _seen(operation: SeenOperation) -> dict[str, Any]:
    return {
        "name": operation.name,
        "module": operation.module,
        "file": operation.file,
        "line": operation.line,
        "text": operation.text,
    }


def _line(line: ModuleDifference) -> dict[str, Any]:
    return {
        "module": {"a": line.same.a.path, "b": line.same.b.path},
        "type": line.same.a.type,
        "first": _parting(line.first),
        "last": for_json(line.last),
    }


def _alignment(alignment: Alignment) -> dict[str, Any]:
    renamed = []
    for same in alignment.modules:
        if same.a.path == same.b.path and same.kept:
            continue
        paths = {"a": same.a.path, "b": same.b.path}
        renamed.append(paths | {"how": same.how, "changed": not same.kept})
    return {
        "renamed": renamed,
        "only_a": _modules(alignment.only_a),
        "only_b": _modules(alignment.only_b),
        "sites_only_a": [site.site for site in alignment.sites_a],
        "sites_only_b": [site.site for site in alignment.sites_b],
    }


def _modules(modules: Sequence[RecordedModule]) -> list[dict[str, str]]:
    return [{"path": module.path, "type": module.type} for module in modules]
