"""The table of several runs: a line for each.

It has a column for each option in which they differ, and for each figure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import Any, Literal

from kedge.report.runs.options import Differing
from kedge.report.runs.summary import KEPT, RunSummary
from kedge.short_text import for_json

Kind = Literal["option", "moment", "seconds", "count", "number", "bytes"]


@dataclass(frozen=True)
class RunColumn:
    """One column.

    Attributes:
        key: Its name for programs.
        title: Its title.
        kind: What its values are.
        value: Returns the value of a run; None if it has none.
    """

    key: str
    title: str
    kind: Kind
    value: Callable[[RunSummary], Any]

    def has(self, run: RunSummary) -> bool:
        """Whether a run has a value."""
        return self.value(run) is not None


FIGURES = (
    RunColumn("steps", "steps", "count", lambda run: run.steps),
    RunColumn("loss", "loss", "number", lambda run: run.loss and run.loss.last),
    RunColumn("best", "best loss", "number", lambda run: run.loss and run.loss.best),
    RunColumn("best_step", "at step", "count", lambda run: run.loss and run.loss.best_step),
    RunColumn("norm", "grad norm", "number", lambda run: run.norm and run.norm.last),
    RunColumn("seconds", "duration", "seconds", lambda run: run.seconds),
    RunColumn("seconds_per_step", "s/step", "seconds", lambda run: run.pace),
    RunColumn("saved", "saved", "bytes", lambda run: run.saved),
    RunColumn("started", "started", "moment", lambda run: run.started and run.started.isoformat()),
)
"""The columns after the options, the most important first."""


@dataclass(frozen=True)
class LeftOut:
    """A recording that cannot be read, and why."""

    recording: str
    reason: str


@dataclass(frozen=True, eq=False)
class RunTable:
    """Several runs.

    Attributes:
        runs: The runs.
        left_out: The recordings that cannot be read.
    """

    runs: tuple[RunSummary, ...]
    left_out: tuple[LeftOut, ...] = ()

    @cached_property
    def differing(self) -> Differing:
        """The options in which the runs differ."""
        return Differing.among([run.options for run in self.runs])

    @cached_property
    def options(self) -> list[RunColumn]:
        """A column for each option in which the runs differ."""
        names = self.differing_names
        return [RunColumn(name, name, "option", partial(_option, name)) for name in names]

    @property
    def differing_names(self) -> Sequence[str]:
        """The names of the options in which the runs differ, typed ones first."""
        names = self.differing.names
        return sorted(names, key=lambda name: not name.startswith("-"))

    @property
    def common(self) -> list[str]:
        """The options that are equal in all of several runs, as text: a program is its value alone."""
        told = []
        for name, value in self.differing.equal.items():
            if len(self.runs) == 1 or (name, value) == ("ranks", "1"):
                continue
            if name in ("program", "model", "device"):
                told.append(value)
            elif value == "yes" and name.startswith("-"):
                told.append(name)
            else:
                told.append(f"{name} {value}")
        return told

    @cached_property
    def figures(self) -> list[RunColumn]:
        """The columns of figures that some run has."""
        return [column for column in FIGURES if any(map(column.has, self.runs))]

    def document(self) -> dict[str, Any]:
        """Return the table for programs.

        Numbers that JSON does not have are the strings "nan", "inf" and "-inf".
        """
        return {
            "runs": [_described(run) for run in self.runs],
            "differ": list(self.differing_names),
            "equal": dict(self.differing.equal),
            "left_out": [asdict(one) for one in self.left_out],
            "smoothing": KEPT,
        }


def _option(name: str, run: RunSummary) -> str | None:
    return run.options.get(name)


def _described(run: RunSummary) -> dict[str, Any]:
    recording = run.shown_run.recording
    findings: dict[str, Any] = {**run.counts, "first": None}
    if run.shown_run.findings:
        findings["first"] = run.shown_run.findings[0].code
    return {
        "run": run.name,
        "recording": str(recording.path),
        "command": recording.manifest.get("command"),
        "options": dict(run.options),
        "findings": findings,
        "judged": run.shown_run.judgement.complete,
        "ending": run.ending or "ended",
        **{column.key: for_json(column.value(run)) for column in FIGURES},
        "not_finite": run.loss.broken if run.loss else 0,
    }
