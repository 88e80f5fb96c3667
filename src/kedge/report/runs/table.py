"""The table of several runs: a line for each, a column for each option in which they differ and for each figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from kedge.report.runs.options import Differing
from kedge.report.runs.smoothing import KEPT
from kedge.report.runs.summary import RunSummary
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
        return [RunColumn(name, name, "option", partial(_option, name)) for name in self._names()]

    def _names(self) -> Sequence[str]:
        """Return the names of the options in which the runs differ, typed ones first."""
        names = self.differing.names
        return sorted(names, key=lambda name: not name.startswith("-"))

    @cached_property
    def figures(self) -> list[RunColumn]:
        """The columns of figures that some run has."""
        return [
            column for column in FIGURES if any(column.value(run) is not None for run in self.runs)
        ]

    def document(self) -> dict[str, Any]:
        """Return the table for programs; numbers that JSON does not have are the strings "nan", "inf" and "-inf"."""
        return {
            "runs": [_described(run) for run in self.runs],
            "differ": list(self._names()),
            "equal": dict(self.differing.equal),
            "left_out": [
                {"recording": one.recording, "reason": one.reason} for one in self.left_out
            ],
            "smoothing": KEPT,
        }


def _option(name: str, run: RunSummary) -> str | None:
    return run.options.get(name)


def _described(run: RunSummary) -> dict[str, Any]:
    command = run.recording.manifest.get("command")
    return {
        "run": run.name,
        "recording": str(run.recording.path),
        "command": command,
        "options": dict(run.options),
        "findings": run.counts | {"first": run.findings[0].code if run.findings else None},
        "judged": run.complete,
        "ending": run.ending or "ended",
        **{column.key: for_json(column.value(run)) for column in FIGURES},
        "not_finite": run.loss.broken if run.loss else 0,
    }
