"""The summary of one of several runs: its options, its smoothed ends, and how it went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

import numpy as np

from kedge.report.curves import Curve
from kedge.report.runs.options import options_of
from kedge.report.shown_run import ShownRun
from kedge.report.what_ran import UNNAMED
from kedge.rules.recorded.optimizers import optimizers, rates_of
from kedge.rules.rule import SEVERITIES
from kedge.short_text import thousands
from kedge.shown_text import visible
from kedge.store.rows import Floats

#: The share of an average that is kept at each value, for the figures of tables.
KEPT = 0.9
#: Circumstances of a run, by their names in a manifest.
CIRCUMSTANCES = {"device": "device", "torch": "torch", "python": "Python", "kedge": "Kedge"}


def smoothed(values: Floats, kept: float = KEPT) -> Floats:
    """Return the average of each value and those before it, each weighted by its distance.

    It is an exponential moving average, as TensorBoard has it, and NaN where a value is not
    finite. The weights of the first values add up to 1 too, so that the average does not begin at
    zero.

    Args:
        values: The values.
        kept: The share of the average that is kept at each further value; 0 leaves the values as
            they are.
    """
    made = np.full(len(values), np.nan)
    total = 0.0
    weight = 0.0
    for place in np.flatnonzero(np.isfinite(values)).tolist():
        total = total * kept + float(values[place]) * (1 - kept)
        weight = weight * kept + (1 - kept)
        made[place] = total / weight
    return made


@dataclass(frozen=True)
class SmoothedEnd:
    """The end of a curve.

    Attributes:
        last: The smoothed value at the end; NaN or infinite if the last value is.
        best: The smallest smoothed value; None if no value is finite.
        best_step: Its step.
        broken: The number of steps with a value that is not finite.
    """

    last: float
    best: float | None
    best_step: int | None
    broken: int

    @classmethod
    def of(cls, curve: Curve) -> SmoothedEnd:
        """Return the end of a curve with at least one step."""
        values = np.where(curve.bad & np.isfinite(curve.values), np.nan, curve.values)
        even = smoothed(values)
        last = float(values[-1])
        if np.isfinite(last):
            last = float(even[-1])
        known = np.flatnonzero(np.isfinite(even))
        broken = int(np.count_nonzero(~np.isfinite(values)))
        if not len(known):
            return cls(last, None, None, broken)
        best = known[np.argmin(even[known])]
        return cls(last, float(even[best]), int(curve.steps[best]), broken)


@dataclass(frozen=True, eq=False)
class RunSummary:
    """One of several runs.

    Attributes:
        name: Its name, which no other of them has.
        shown_run: Its recording with its findings.
        wrote: When it was last written, in seconds since 1970; None if it does not matter.
    """

    name: str
    shown_run: ShownRun
    wrote: float | None = None

    @cached_property
    def loss(self) -> SmoothedEnd | None:
        """The end of its first loss."""
        return self._end_of("loss")

    @cached_property
    def norm(self) -> SmoothedEnd | None:
        """The end of the norm of all gradients of its first model."""
        return self._end_of("norm")

    def _end_of(self, kind: str) -> SmoothedEnd | None:
        for curve in self.shown_run.drawn_curves:
            if curve.kind == kind:
                return SmoothedEnd.of(curve)
        return None

    @cached_property
    def options(self) -> Mapping[str, str]:
        """What it was started with: program, model, options, versions."""
        recording = self.shown_run.recording
        manifest = recording.manifest
        command = manifest.get("command") or ()
        program = manifest.get("script") or (command or [UNNAMED])[0]
        found = {"program": visible(str(program))}
        if recording.roots:
            models = []
            for root in recording.roots:
                model = root.title
                if root.parameters:
                    model += f" {thousands(root.parameters)}"
                models.append(model)
            found["model"] = visible(", ".join(models))
        found |= options_of(command)

        types = [one.type for one in optimizers(recording) or ()]
        if types:
            found["optimizer"] = visible(", ".join(dict.fromkeys(types)))
        rates: dict[float, None] = {}
        for place in range(len(recording.roots)):
            rates |= dict.fromkeys(rates_of(recording, place))
        if rates:
            found["learning rate"] = ", ".join(f"{rate:g}" for rate in rates)
        for key, said in CIRCUMSTANCES.items():
            if manifest.get(key):
                found[said] = str(manifest[key])
        found["ranks"] = str(max(int(manifest.get("world") or 1), len(recording.ranks)))
        return found

    @property
    def started(self) -> datetime | None:
        """When it began."""
        started = self.shown_run.recording.manifest.get("started")
        try:
            return datetime.fromisoformat(str(started))
        except ValueError:
            return None

    @property
    def seconds(self) -> float | None:
        """Its duration; of a run that goes on until it was last written, and None if it was killed."""
        end = self.shown_run.recording.end
        if end is not None:
            return end.seconds
        if not self.shown_run.written or self.wrote is None or self.started is None:
            return None
        return max(self.wrote - self.started.timestamp(), 0.0)

    @cached_property
    def steps(self) -> int:
        """The number of its steps; without an end, the steps until the last with a value."""
        recording = self.shown_run.recording
        if recording.end is not None and recording.end.steps:
            return recording.end.steps
        seen = [recording.steps, *(curve.steps for curve in self.shown_run.drawn_curves)]
        return max((int(steps[-1]) + 1 for steps in seen if len(steps)), default=0)

    @property
    def pace(self) -> float | None:
        """The seconds for a step, over the whole run."""
        if not self.seconds or not self.steps:
            return None
        return self.seconds / self.steps

    @property
    def saved(self) -> int | None:
        """The bytes that autograd kept for backward at its peak, if they were recorded."""
        event = self.shown_run.recording.saved
        if event is None:
            return None
        if event.course is None:
            return event.bytes
        return event.course.peak

    @property
    def counts(self) -> dict[str, int]:
        """The number of its findings of each severity."""
        severities = [finding.severity for finding in self.shown_run.findings]
        return {severity: severities.count(severity) for severity in SEVERITIES}

    @property
    def ending(self) -> str:
        """How it ended, if that is not as it should be: it runs, was killed, or failed."""
        end = self.shown_run.recording.end
        if end is None and self.shown_run.recording.stopped is not None:
            return "not written to its end"
        if end is None:
            return {True: "running", False: "killed", None: "no end"}[self.shown_run.written]
        if end.exit:
            return f"exit {end.exit}"
        return ""


def told_apart(paths: Sequence[str]) -> list[str]:
    """Return a name for each path: its last part without its suffix.

    It has as many parts before it as tell it from the others.
    """
    parts = []
    for path in paths:
        plain = path.replace("\\", "/").rstrip("/").removesuffix(".kedge")
        parts.append(plain.split("/"))
    lengths = [1] * len(parts)
    while True:
        names = ["/".join(own[-length:]) for own, length in zip(parts, lengths, strict=True)]
        is_over = True
        for place, name in enumerate(names):
            if names.count(name) > 1 and lengths[place] < len(parts[place]):
                lengths[place] += 1
                is_over = False
        if is_over:
            return names


def numbered(paths: Sequence[str]) -> list[str]:
    """Return a name for each path that does not tell its folder.

    It is its last part, with a number where several have the same.
    """
    names: list[str] = []
    seen: dict[str, int] = {}
    for path in paths:
        end = told_apart([path])[0]
        seen[end] = seen.get(end, 0) + 1
        if seen[end] > 1:
            end = f"{end} ({seen[end]})"
        names.append(end)
    return names
