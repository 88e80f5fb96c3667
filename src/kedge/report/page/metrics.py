"""A run as metrics for Prometheus: its newest figures, in the text format 0.0.4.

The format is written by hand: a line for each number, `NAME{LABEL="VALUE"} NUMBER`. A library for
it would be one more dependency, with a registry of its own, to replace the last thirty lines.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from math import isnan
from typing import Any, Literal

from kedge.report.page.document import Document
from kedge.rules.rule import SEVERITIES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("running", "ended", "failed", "killed", "unknown")
"""The states of a run; it is unknown whether a run without an end goes on if its recording is on another machine."""

Samples = Iterable[tuple[Mapping[str, str], float | str | None]]


@dataclass(frozen=True)
class Metric:
    """A metric: its name, its type, its help, and its samples: labels with a number, None if it is not known."""

    name: str
    type: Literal["counter", "gauge"]
    help: str
    samples: Samples


def metrics_of(document: Document) -> str:
    """Return the newest figures of a run in the text format of Prometheus."""
    run = document.described["run"]
    common = {"run": run["name"], "program": run["command"]}
    return "".join(
        line for metric in _metrics(document.described) for line in _lines(metric, common)
    )


def _metrics(described: Mapping[str, Any]) -> Iterator[Metric]:
    run, findings, curves = described["run"], described["findings"], described["curves"]
    state = state_of(run)
    seconds, steps = run.get("seconds"), run.get("steps")
    pace = run["pace"] if state == "running" else steps / seconds if steps and seconds else None
    newest = [curve["newest"] for curve in curves if curve["newest"] is not None]
    reached = (
        max([run["last"] if run["last"] is not None else -1, *(step for step, _ in newest)]) + 1
    )
    yield Metric(
        "kedge_run_state",
        "gauge",
        "1 for the state of the run, 0 for the others.",
        _one_of(STATES, state),
    )
    yield _single(
        "kedge_start_time_seconds",
        "gauge",
        "When the run began, in Unix time.",
        _moment(run["started"]),
    )
    yield _single(
        "kedge_steps_total",
        "counter",
        "Steps of the optimizer that are recorded so far.",
        steps or reached,
    )
    yield _single(
        "kedge_measured_steps_total", "counter", "Steps that were measured in full.", run["sampled"]
    )
    yield _single(
        "kedge_step_seconds",
        "gauge",
        "Seconds per step, lately or in the whole run.",
        pace and 1 / pace,
    )
    yield _single(
        "kedge_overhead_ratio",
        "gauge",
        "Share of the run's time that watching took.",
        run.get("slowdown"),
    )
    for name, kind, text in (
        ("kedge_loss", "loss", "The newest loss: the tensor that a backward pass began at."),
        ("kedge_gradient_norm", "norm", "The newest norm of all gradients of a model."),
    ):
        shown = [curve for curve in curves if curve["kind"] == kind and curve["newest"] is not None]
        samples = [({"site": _site(described, curve)}, curve["newest"][1]) for curve in shown]
        yield Metric(name, "gauge", text, samples)
    yield Metric(
        "kedge_findings",
        "gauge",
        "Findings of the rules so far.",
        _counted(findings, "severity", SEVERITIES),
    )
    codes = dict.fromkeys((finding["code"], finding["severity"]) for finding in findings)
    yield Metric(
        "kedge_rule_findings",
        "gauge",
        "Findings of each rule that has any.",
        [
            (
                {"code": code, "severity": severity},
                sum((f["code"], f["severity"]) == (code, severity) for f in findings),
            )
            for code, severity in codes
        ],
    )
    lacking = len(described["unjudged"])
    yield _single(
        "kedge_unjudged_rules", "gauge", "Rules that had too few samples to judge so far.", lacking
    )


def state_of(run: Mapping[str, Any]) -> str:
    """Return the state of a run from the head of its page."""
    if not run["running"]:
        return "failed" if run["exit"] else "ended"
    return {True: "running", False: "killed", None: "unknown"}[run["written"]]


def _single(
    name: str, kind: Literal["counter", "gauge"], text: str, number: float | None
) -> Metric:
    return Metric(name, kind, text, [({}, number)])


def _one_of(states: Iterable[str], state: str) -> Samples:
    return [({"state": name}, int(name == state)) for name in states]


def _counted(findings: Iterable[Mapping[str, Any]], key: str, values: Iterable[str]) -> Samples:
    found = [finding[key] for finding in findings]
    return [({key: value}, found.count(value)) for value in values]


def _site(described: Mapping[str, Any], curve: Mapping[str, Any]) -> str:
    """Return the site of a curve; its label, if it is the sum over several sites."""
    return str(
        curve["label"] if curve["site"] is None else described["sites"][curve["site"]]["site"]
    )


def _moment(started: str | None) -> float | None:
    try:
        return datetime.fromisoformat(started or "").timestamp()
    except ValueError:
        return None


def _lines(metric: Metric, common: Mapping[str, str]) -> Iterator[str]:
    """Yield the lines of a metric; none if no number of it is known."""
    known = [(labels, number) for labels, number in metric.samples if number is not None]
    if known:
        yield f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n"
    for labels, number in known:
        named = ",".join(
            f'{name}="{_escaped(value)}"' for name, value in {**common, **labels}.items()
        )
        yield f"{metric.name}{{{named}}} {_number(float(number))}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(number: float) -> str:
    if isnan(number):
        return "NaN"
    return repr(number).replace("inf", "Inf") if number < 0 else repr(number).replace("inf", "+Inf")
