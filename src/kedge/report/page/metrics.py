"""A run as metrics for Prometheus: its newest figures, in the text format 0.0.4.

The format is written by hand: a line for each number, `NAME{LABEL="VALUE"} NUMBER`. A library for
it would be one more dependency, with a registry of its own, to replace the last thirty lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import isinf, isnan
from typing import Any, Literal

from kedge.report.page.document import Document
from kedge.rules.rule import SEVERITIES

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("running", "ended", "failed", "killed", "unknown")
"""The states of a run.

It is unknown whether a run without an end goes on if its recording is on another machine.
"""

Sample = tuple[Mapping[str, str], float | str | None]


@dataclass(frozen=True)
class Metric:
    """A metric: its name, its type, its help, and its samples.

    A sample is labels with a number, which is None if it is not known.
    """

    name: str
    type: Literal["counter", "gauge"]
    help: str
    samples: Sequence[Sample]


def metrics_of(document: Document) -> str:
    """Return the newest figures of a run in the text format of Prometheus."""
    run = document.described["run"]
    common = {"run": run["name"], "program": run["command"]}
    lines: list[str] = []
    for metric in _metrics(document.described):
        lines += _lines(metric, common)
    return "".join(lines)


def _metrics(described: Mapping[str, Any]) -> Iterator[Metric]:
    run = described["run"]
    findings = described["findings"]
    curves = [curve for curve in described["curves"] if curve["newest"] is not None]
    steps = run.get("steps")
    if not steps:
        last = -1 if run["last"] is None else run["last"]
        steps = max([last, *(curve["newest"][0] for curve in curves)]) + 1
    state = state_of(run)
    states = [({"state": name}, int(name == state)) for name in STATES]
    yield Metric(
        "kedge_run_state",
        "gauge",
        "1 for the state of the run, 0 for the others.",
        states,
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
        steps,
    )
    yield _single(
        "kedge_measured_steps_total",
        "counter",
        "Steps that were measured in full.",
        run["sampled"],
    )
    yield _single(
        "kedge_step_seconds",
        "gauge",
        "Seconds per step, lately or in the whole run.",
        _seconds_of_a_step(run, state),
    )
    yield _single(
        "kedge_overhead_ratio",
        "gauge",
        "Share of the run's time that watching took.",
        run.get("slowdown"),
    )
    newest: dict[str, list[Sample]] = {"loss": [], "norm": [], "rate": [], "logged": []}
    for curve in curves:
        labels = {"site": _site(described, curve)}
        if curve["kind"] == "logged":
            labels = {"name": curve["title"]}
        newest[curve["kind"]].append((labels, curve["newest"][1]))
    yield Metric(
        "kedge_loss",
        "gauge",
        "The newest loss: the tensor that a backward pass began at.",
        newest["loss"],
    )
    yield Metric(
        "kedge_gradient_norm",
        "gauge",
        "The newest norm of all gradients of a model.",
        newest["norm"],
    )
    yield Metric(
        "kedge_learning_rate",
        "gauge",
        "The newest learning rate of the groups of an optimizer.",
        newest["rate"],
    )
    yield Metric(
        "kedge_logged",
        "gauge",
        "The newest value that the program logged under a name.",
        newest["logged"],
    )

    by_severity = Counter(finding["severity"] for finding in findings)
    yield Metric(
        "kedge_findings",
        "gauge",
        "Findings of the rules so far.",
        [({"severity": severity}, by_severity[severity]) for severity in SEVERITIES],
    )
    by_rule = Counter((finding["code"], finding["severity"]) for finding in findings)
    of_rules = []
    for (code, severity), number in by_rule.items():
        of_rules.append(({"code": code, "severity": severity}, number))
    yield Metric(
        "kedge_rule_findings",
        "gauge",
        "Findings of each rule that has any.",
        of_rules,
    )
    yield _single(
        "kedge_unjudged_rules",
        "gauge",
        "Rules that had too few samples to judge so far.",
        len(described["unjudged"]),
    )


def _seconds_of_a_step(run: Mapping[str, Any], state: str) -> float | None:
    if state == "running":
        pace: float | None = run["pace"]
        return 1 / pace if pace else None
    steps = run.get("steps")
    seconds = run.get("seconds")
    if not steps or not seconds:
        return None
    return float(seconds / steps)


def state_of(run: Mapping[str, Any]) -> str:
    """Return the state of a run from the head of its page."""
    if run["running"]:
        return {True: "running", False: "killed", None: "unknown"}[run["written"]]
    if run["exit"]:
        return "failed"
    return "ended"


def _single(
    name: str, kind: Literal["counter", "gauge"], text: str, number: float | None
) -> Metric:
    return Metric(name, kind, text, [({}, number)])


def _site(described: Mapping[str, Any], curve: Mapping[str, Any]) -> str:
    """Return the site of a curve; its name, if it has none."""
    if curve["site"] is None:
        return ", ".join(filter(None, (curve["label"], curve["part"])))
    return str(described["sites"][curve["site"]]["site"])


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
        named = []
        for name, value in {**common, **labels}.items():
            named.append(f'{name}="{_escaped(value)}"')
        yield f"{metric.name}{{{','.join(named)}}} {_number(float(number))}\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(number: float) -> str:
    if isnan(number):
        return "NaN"
    if isinf(number):
        return "+Inf" if number > 0 else "-Inf"
    return repr(number)
